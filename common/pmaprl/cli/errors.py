"""The errors that a person reads as one sentence instead of a traceback."""

import sys

LONGEST = 4_000  # characters of an error


def printable(text: object) -> str:
    """A text on one line, without what a terminal would obey: it may come from another's run
    directory.

    Characters of control, and those that turn the direction of writing, become `\\x1b` and the
    like; line ends and tabulators become spaces. All that is printed, drawn or raised and has
    something of a run in it goes through here.
    """
    text = str(text)
    return text if text.isprintable() else "".join(map(_visible, text))


def printable_lines(text: object) -> str:
    """A text as `printable` makes it, with its line ends: such as a traceback."""
    return "\n".join(map(printable, str(text).split("\n")))


def _visible(character: str) -> str:
    if character.isprintable():
        return character
    return " " if character.isspace() else character.encode("unicode_escape").decode()


class UsageError(ValueError):
    """The request cannot be carried out as asked; the message says what would work. Exit code 2."""

    def __init__(self, message: object = ""):
        super().__init__(printable(message)[:LONGEST])


class TrainingError(RuntimeError):
    """The run had to stop; the message says why and what is saved. Exit code 1."""

    def __init__(self, message: object = ""):
        super().__init__(printable(message)[:LONGEST])


class ProcessEnded(RuntimeError):
    """One of several processes cannot go on: a command ends there at once, without waiting for the
    others.
    """

    def __init__(self, message: str, code: int, grace: float):
        """`code` is the exit code; until a command ends it leaves the others `grace` seconds to end
        by themselves.
        """
        super().__init__(message)
        self.code = code
        self.grace = grace


class FailedEnvError(RuntimeError):
    """An environment gave what cannot be used, or nothing at all; one that is made anew may do
    better.
    """


def shortened(text: str) -> str:
    """The text, or its beginning, for a message of one sentence."""
    return text if len(text) <= 60 else f"{text[:57]}..."


def fail(message: str, code: int) -> int:
    """Print why the program ends, to stderr; returns `code`."""
    print(f"error: {printable(message)[:LONGEST]}", file=sys.stderr)
    return code
