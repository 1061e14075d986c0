"""rich's console, as all commands use it.

rich ends the process itself, with status 1, when the reader of a pipe has left (`| head`). Here the error
is raised to `commands.run`, which ends every command alike.
"""

import rich.console


class Console(rich.console.Console):
    def on_broken_pipe(self) -> None:
        """Raise the BrokenPipeError that rich has caught; nothing is printed from now on."""
        self.quiet = True
        raise BrokenPipeError
