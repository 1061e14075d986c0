"""The gateway: an external processor that picks an endpoint for each LLM request."""
