"""`--help`: the flags of an algorithm in groups, which comments in their classes name, such as `# loss`."""

import dataclasses
import inspect
import re
import shutil
import sys
import textwrap
from contextlib import suppress
from typing import Any, get_args, get_origin

from tyro.constructors import PrimitiveConstructorSpec

from common.cli.checks import flag_of, kinds_of, metavar_of, note_of

FIRST = ("environment", "run")
LAST = "actors", "evaluation and checkpoints", "logging", "games and teams", "populations"
LAST += ("population-based training", "devices and machines")
COLUMN = 27  # where texts begin
FLAG = r'^    (?:# (.+)|(\w+): .+(?:\n    """((?:.|\n)*?)""")?)'  # or the title of a group of them


def help_text(args_class: type, defaults: Any, program: str | None) -> str:
    """What --help prints; `defaults` are those of a run that is resumed, or tuned ones, or None."""
    width = min(max(shutil.get_terminal_size().columns - 1, 50), 119)
    titles, texts = _read(args_class)
    groups = {title: [] for title in FIRST}
    for field in dataclasses.fields(args_class):
        default = getattr(defaults, field.name, field.default)
        row = _row(field.name, kinds_of(args_class)[field.name], texts.get(field.name, ""), default, width)
        groups.setdefault(titles.get(field.name, "more"), []).append(row)
    order = [*(title for title in groups if title not in LAST), *(title for title in LAST if title in groups)]
    start = [
        f"usage: {program or sys.argv[0]} [--FLAG VALUE ...]",
        textwrap.fill(inspect.getdoc(args_class) or "", width),
    ]
    return "\n\n".join([*start, *("\n".join([title, *groups[title]]) for title in order)])


def _read(args_class: type) -> tuple[dict[str, str], dict[str, str]]:
    """Group and text of each flag, from the code of its class, or of a base where that says nothing."""
    titles, texts = {}, {}
    for part in filter(dataclasses.is_dataclass, args_class.__mro__):
        source, here = "", ""
        with suppress(OSError, TypeError):  # it was typed into a console
            source = inspect.getsource(part)
        for title, name, text in re.findall(FLAG, source, re.MULTILINE):
            here = title or here
            titles |= {name: here} if here and name not in titles else {}
            texts |= {name: text} if text and name not in texts else {}
    return titles, texts


def _row(name: str, kind: Any, text: str, default: Any, width: int) -> str:
    """The lines of a flag."""
    flag = flag_of(name)
    head = f"  --[no-]{flag[2:]}" if kind is bool else f"  {flag} {_value(kind)}"
    hint = "" if "(default" in text else _hint(default)
    lines = textwrap.wrap(" ".join(text.split()) + hint, width - COLUMN, break_on_hyphens=False)
    if lines and len(head) <= COLUMN - 2:
        head = f"{head:{COLUMN}}{lines.pop(0)}"
    return "\n".join([head, *(" " * COLUMN + line for line in lines)])


def _value(kind: Any) -> str:
    """What stands for the value of a flag of this type."""
    if spec := note_of(kind, PrimitiveConstructorSpec):
        return spec.metavar
    parts = get_args(kind) if get_origin(kind) in (tuple, list, dict) else ()
    return " ".join("..." if part is ... else _value(part) for part in parts) or metavar_of(kind) or "TEXT"


def _hint(default: Any) -> str:
    """The default; nothing where it is nothing, or off."""
    if default is dataclasses.MISSING or default is False or default in (None, "", ()):
        return ""
    shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
    return f" (default: {'on' if default is True else shown})"
