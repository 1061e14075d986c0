"""The gateway: an external processor that picks an endpoint for each LLM request."""

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # read when grpc is imported; we say ourselves what failed
