"""`--help`: the flags of an algorithm in groups, which comments in their classes name, such as `# loss`."""

import ast
import dataclasses
import inspect
import itertools
import shutil
import sys
import textwrap
from typing import Any, get_args, get_origin

from tyro.constructors import PrimitiveConstructorSpec

from common.cli.checks import flag_of, kinds_of, metavar_of, note_of

FIRST = ("environment", "run")
LAST = ("actors", "evaluation and checkpoints", "logging", "games and teams", "populations")
LAST += ("population-based training", "devices and machines")
COLUMN = 27  # where texts begin


def help_text(args_class: type, defaults: Any, program: str | None) -> str:
    """What --help prints; `defaults` are those of a run that is resumed, or tuned ones, or None."""
    width = min(max(shutil.get_terminal_size().columns - 1, 50), 119)
    about, groups = read_groups(args_class)
    intro = textwrap.fill(about, width)
    sections = ["\n".join([title, *_rows(args_class, names, defaults, width)]) for title, names in groups.items()]
    return "\n\n".join([f"usage: {program or sys.argv[0]} [--FLAG VALUE ...]", intro, *sections])


def read_groups(args_class: type) -> tuple[str, dict[str, dict[str, str]]]:
    """The description of a class of flags, and by group the text of each flag, in the order of `--help`."""
    groups, texts = {}, {}
    for part in args_class.__mro__:  # what a subclass says goes before
        for name, (group, text) in _read_class(part).items():
            groups[name] = groups.get(name) or group
            texts[name] = texts.get(name) or text
    fields = [field.name for field in dataclasses.fields(args_class)]
    titles = dict.fromkeys(groups.get(name) or "more" for name in fields)
    order = [*FIRST, *(title for title in titles if title not in FIRST + LAST), *LAST]
    by_group = {title: {x: texts.get(x, "") for x in fields if (groups.get(x) or "more") == title} for title in order}
    return inspect.getdoc(args_class) or "", {title: names for title, names in by_group.items() if names}


def _read_class(part: type) -> dict[str, tuple[str, str]]:
    """Group and text of each flag that a class defines; nothing where its code is not to be found."""
    try:
        source = textwrap.dedent(inspect.getsource(part)) if dataclasses.is_dataclass(part) else ""
    except (OSError, TypeError):  # typed into a console
        source = ""
    lines, body = source.splitlines(), ast.parse(source).body
    found, body = {}, body[0].body if body else []
    for node, after in itertools.zip_longest(body, body[1:]):
        if isinstance(node, ast.AnnAssign):
            titles = [line[6:] for line in lines[: node.lineno] if line.startswith("    # ")]
            is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            found[node.target.id] = (titles[-1] if titles else "", after.value.value if is_text else "")
    return found


def _rows(args_class: type, names: dict[str, str], defaults: Any, width: int) -> list[str]:
    """The lines of a group."""
    kinds, fields = kinds_of(args_class), {field.name: field for field in dataclasses.fields(args_class)}
    rows = []
    for name, text in names.items():
        flag, kind, default = flag_of(name), kinds[name], getattr(defaults, name, fields[name].default)
        head = f"  --[no-]{flag[2:]}" if kind is bool else f"  {flag} {_value(kind)}"
        hint = "" if "(default" in text else _hint(default)
        lines = textwrap.wrap(" ".join(text.split()) + hint, width - COLUMN, break_on_hyphens=False) or [""]
        if len(head) > COLUMN - 2:
            rows, head = [*rows, head], ""
        rows += [f"{head:{COLUMN}}{lines[0]}", *(" " * COLUMN + line for line in lines[1:])]
    return rows


def _value(kind: Any) -> str:
    """What stands for the value of a flag of this type."""
    if spec := note_of(kind, PrimitiveConstructorSpec):
        return spec.metavar
    parts = get_args(kind) if get_origin(kind) in (tuple, list, dict) else ()
    return " ".join("..." if part is ... else _value(part) for part in parts) or metavar_of(kind) or "TEXT"


def _hint(default: Any) -> str:
    """The default; nothing where it is nothing."""
    if default is True:
        return " (default: on)"
    if default in (False, None, "", ()) and type(default) not in (int, float) or callable(default):
        return ""
    shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
    return "" if default is dataclasses.MISSING else f" (default: {shown})"
