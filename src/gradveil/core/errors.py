"""Errors a person can act on: one line that names the thing and what would fix it."""


class GradveilError(Exception):
    """Bad usage or bad input. The command line prints its one line and exits with code 2."""


class UnknownNameError(GradveilError):
    """A name that no registry holds."""


class NotAvailableError(GradveilError):
    """Something real that cannot be had here and now, such as weights while offline. Carries the reason."""


class BadFileError(GradveilError):
    """A file from outside that is truncated, too large, of another kind or holds impossible values.

    What it quotes of the file may be meant to break lines or to steer a terminal: only printable characters are shown
    as they are.
    """

    def __init__(self, line: str) -> None:
        super().__init__("".join(char if char.isprintable() else repr(char)[1:-1] for char in line))
