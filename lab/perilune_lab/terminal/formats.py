"""Numbers as text, as the lab's tables show them."""


def as_number(value: float) -> str:
    """Return three significant digits; from 100 on, a whole number with commas."""
    if value == 0:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


def as_seconds(value: float) -> str:
    """Return seconds; milliseconds if below one second."""
    return f"{as_number(value * 1e3)} ms" if value < 0.9995 else f"{as_number(value)} s"


def as_percent(value: float, digits: int = 1) -> str:
    """Return a share (0–1) as a percentage. A share above 0 is never printed as 0 %, and one below 1 never as
    100 %, but as `<0.1%` and `>99.9%`."""
    text, least = f"{value:.{digits}%}", 10.0**-digits
    if value > 0 and text == f"{0:.{digits}%}":
        return f"<{least:g}%"
    if value < 1 and text == f"{1:.{digits}%}":
        return f">{100 - least:.{digits}f}%"
    return text
