"""Errors a person can act on: one line that names the thing and what would fix it.

All are a :class:`GradveilError`; the kinds below it are for programs that go on in another way.
"""

_LONGEST = 2000


class GradveilError(Exception):
    """Bad usage or bad input. The command line prints its one line and exits with code 2.

    What it quotes may come from a stranger's file and be meant to break lines, to steer a terminal or to fill it: only
    printable characters are shown as they are, and not too many.
    """

    def __init__(self, line: str) -> None:
        if len(line) > _LONGEST:
            line = f"{line[: _LONGEST * 3 // 4]} ... {line[-_LONGEST // 4 :]}"
        super().__init__("".join(char if char.isprintable() else repr(char)[1:-1] for char in line))


class SpecError(GradveilError):
    """A spec such as ``noise:sigma=0.1`` that cannot be read."""


class UnknownNameError(SpecError):
    """A name that no registry holds."""


class UnfitModelError(GradveilError):
    """A model on which a defense cannot work."""


class RefusedError(GradveilError):
    """A guard refused a step, because something would have left undefended."""


class StrategyError(GradveilError):
    """A strategy that was asked for cannot run this attack on this model."""


class NotAvailableError(GradveilError):
    """Something real that cannot be had here and now, such as weights while offline. Carries the reason."""


class BadFileError(GradveilError):
    """A file from outside that is truncated, too large, of another kind or holds impossible values."""


class PluginWarning(UserWarning):
    """An installed package offers something that cannot be used. The command line prints its one line."""


def in_one_line(error: BaseException) -> str:
    """What somebody else's code raised, fit for the one line of an error."""
    return " ".join(f"{type(error).__name__}: {error}".split())
