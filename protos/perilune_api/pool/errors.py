"""What a wrong document is answered with."""


class SpecError(ValueError):
    """The user's document is wrong. The message names the field and, where possible, the remedy."""
