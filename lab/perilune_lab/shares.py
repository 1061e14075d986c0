"""Shares as text."""


def as_percent(value: float, digits: int = 1) -> str:
    """What is not nothing is never printed as nothing, nor what is not all as all: `<0.1%`, `>99.9%`."""
    text, least = f"{value:.{digits}%}", 10.0**-digits
    if value > 0 and text == f"{0:.{digits}%}":
        return f"<{least:g}%"
    if value < 1 and text == f"{1:.{digits}%}":
        return f">{100 - least:.{digits}f}%"
    return text
