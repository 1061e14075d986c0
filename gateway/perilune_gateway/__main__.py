"""Start the gateway: `perilune-gateway`, or `python -m perilune_gateway`.

What is imported stays, so the garbage collector is off meanwhile: looking for garbage among it again and
again would be a seventh of the CPU time of the imports.
"""

import gc
import sys


def main() -> int:
    """Import the gateway, run it, and return its exit status."""
    gc.disable()
    from perilune_gateway import main as gateway

    gc.freeze()
    gc.enable()
    return gateway.main()


if __name__ == "__main__":
    sys.exit(main())
