"""Errors that more than one part raises."""


class ProtocolError(ValueError):
    """The peer said something that its protocol does not allow here."""
