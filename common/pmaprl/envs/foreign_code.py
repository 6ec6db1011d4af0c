"""Code that is not ours, such as suites and users' environments: imports, and errors in a sentence.

Processes of environments import this too, so it imports nothing slow.
"""

import importlib
import io
import re
import sys
import sysconfig
import traceback
import warnings
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from types import ModuleType

from pmaprl.cli.errors import FailedEnvError, UsageError

EXTRAS = {
    "mujoco_playground": "playground",
    "envpool": "host",
    "ale_py": "",
    "jax2onnx": "onnx",
    "onnxruntime": "onnx",
}
"""Extras of pyproject.toml, by package, if the names differ; "": no extra has the package."""


@contextmanager
def quiet():
    """Hide warnings and the output of a suite, such as notes on parts that are not installed.

    Not for threads of actors, because it redirects the output of the whole process.
    """
    printed = io.StringIO()
    console = sys.__stdout__
    errors = sys.stderr
    try:
        # jaxmarl replaces `sys.stdout` by `sys.__stdout__`, and `sys.stderr` too
        sys.__stdout__ = printed
        with warnings.catch_warnings(action="ignore"), redirect_stdout(printed):
            yield
    finally:
        sys.__stdout__ = console
        sys.stderr = errors


def import_package(package: str, use: str = "") -> ModuleType:
    """Import a package that is an extra, or a module of it.

    Args:
        package: name of the package or module.
        use: reason why it is needed, for the error.

    Raises:
        UsageError: it is not installed; the message says how to install it.
    """
    root = package.partition(".")[0]
    extra = EXTRAS.get(root, root)
    try:
        with nullcontext() if extra in ("", "host") else quiet():
            return importlib.import_module(package)
    except ImportError as error:
        target = f'-e ".[{extra}]"' if extra else root.replace("_", "-")
        raise UsageError(
            f"{root} cannot be imported{use}: pip install {target} ({error})"
        ) from error


@contextmanager
def readable_errors(failure: str):
    """Turn exceptions into a UsageError that names the `failure`, its reason, and its place."""
    try:
        yield
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(f"{failure}: {reason(error)}{place_in_code(error)}") from error


PACKAGE = Path(__file__).resolve().parents[1]

NOT_THE_USERS = f"{PACKAGE}/", f"{sysconfig.get_path('stdlib')}/", "<"


def place_in_code(error: BaseException) -> str:
    """Place in the user's own code at which an exception arose, to follow its text; "" if none.

    JAX traces environments, so the innermost line of a traceback is hardly ever the user's mistake.
    The cause of an error may be the text of a traceback in another process.
    """
    frames = traceback.extract_tb(error.__traceback__)
    places = [(frame.filename, frame.lineno) for frame in frames]
    places += re.findall(r'File "(.+)", line (\d+)', str(error.__cause__ or ""))
    here = Path.cwd()
    for file, line in reversed(places):
        if file.startswith(NOT_THE_USERS) or "site-packages" in file:
            continue
        path = Path(file)
        if path.is_relative_to(here):
            path = path.relative_to(here)
        return f" ({path}, line {line})"
    return ""


def reason(error: BaseException) -> str:
    """Describe an exception in one line."""
    text = str(error)
    if not isinstance(error, FailedEnvError | UsageError):
        text = f"{type(error).__name__}: {text}"
    return text.splitlines()[0][:300].removesuffix(": ")
