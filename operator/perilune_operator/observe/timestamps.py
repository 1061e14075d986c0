"""Times as Kubernetes writes them: RFC 3339, whole seconds, UTC."""

from datetime import UTC, datetime

_FORM = "%Y-%m-%dT%H:%M:%SZ"


def timestamp(seconds: float) -> str:
    """Write `seconds` since the epoch."""
    return datetime.fromtimestamp(seconds, UTC).strftime(_FORM)


def seconds(timestamp: str) -> float | None:
    """Return seconds since the epoch, or None for text in another form."""
    try:
        return datetime.strptime(timestamp, _FORM).replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None
