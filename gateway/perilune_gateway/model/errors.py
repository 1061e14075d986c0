"""Errors that several parts of the gateway raise."""


class ProtocolError(ValueError):
    """The peer sent a message that its protocol does not allow in this state."""
