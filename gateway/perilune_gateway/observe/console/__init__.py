"""The console: a page that shows the pool while it works, and the event stream that the page lives from.

`page/` has what the browser gets: one HTML file, its style and its script, without a build step and without
any outside address. `rows.py` has the values of the stream, `stream.py` sends them.
"""

from perilune_gateway.observe.console.stream import STREAM, Stream

__all__ = ["STREAM", "Stream"]
