"""Times as Kubernetes writes them: RFC 3339, whole seconds, UTC."""

from datetime import UTC, datetime

_FORM = "%Y-%m-%dT%H:%M:%SZ"


def stamp(seconds: float) -> str:
    """`seconds`: since the epoch."""
    return datetime.fromtimestamp(seconds, UTC).strftime(_FORM)


def seconds(stamp: str) -> float | None:
    """Since the epoch; None: it is no such time."""
    try:
        return datetime.strptime(stamp, _FORM).replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None
