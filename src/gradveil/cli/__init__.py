"""The command line."""

ARGUMENTS = "gradveil.arguments"
"""Under what a context of click holds the arguments as they were typed."""


def printable(text: str) -> str:
    """A text in which nothing breaks the line or steers the terminal: it may quote a stranger's."""
    return "".join(c if c.isprintable() or c == "\t" else repr(c)[1:-1] for c in text)


def shown(text: str) -> str:
    r"""The same, and nothing in it is a command for GitHub, wherever a table breaks it into lines.

    >>> shown("::stop-commands::x\n"), shown("##[error]")
    (':\\x3astop-commands:\\x3ax\\n', '#\\x23[error]')
    """
    return printable(text).replace("::", r":\x3a").replace("##[", r"#\x23[")
