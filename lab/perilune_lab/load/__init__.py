"""Load for any OpenAI-compatible server: bodies of requests, the client that sends them, and its results."""
