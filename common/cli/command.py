"""From a command line to flags, and from what training raises to an exit code."""

import errno
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import tyro

from common.cli.errors import TrainingError, UsageError, fail
from common.cli.flags import RunArgs


def parse(args_class: type, argv: list[str] | None = None) -> Any:
    """Arguments of a script from its command line. Prints and exits with 0 for --help, with 2 for a usage error."""
    program = None  # the name of the script
    if argv is None:
        argv = sys.argv[1:]
        module = sys.modules["__main__"].__spec__
        program = f"python -m {module.name}" if module else None
        for stream in filter(None, (sys.stdout, sys.stderr)):  # None where it is closed
            stream.reconfigure(errors="replace")  # where it has no ±
        signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))  # nothing to save until a run begins
        if hasattr(signal, "SIGPIPE") and "--help" in argv:
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as in `--help | head`
    try:
        _refuse_old_spellings(args_class, argv)
        return tyro.cli(args_class, args=argv, default=_resume_defaults(args_class, argv), prog=program)
    except UsageError as error:
        raise SystemExit(fail(str(error), 2)) from None


def main(train: Callable[[Any], Any], args: Any) -> int:
    """Train and return the exit code: 0 finished or stopped, 1 failed, 2 bad usage, 130 SIGINT, 143 SIGTERM."""
    try:
        train(args)
    except UsageError as error:
        return fail(str(error), 2)
    except TrainingError as error:
        return fail(str(error), 1)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EROFS):
            raise
        return fail(f"{error}; saved checkpoints are intact", 1)
    except RuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return fail(f"the device has not enough memory for these sizes: {str(error).splitlines()[0]}", 1)
    except KeyboardInterrupt:
        return 130
    except SystemExit as stop:
        return stop.code
    return 0


OLD_SPELLINGS = {
    "anneal-lr": ("lr_schedule", "--lr-schedule linear anneals the step size, --lr-schedule constant does not"),
    "normalize-rewards": ("normalize_returns", "--normalize-returns, which is on by default, takes its place"),
    "reward-scale": ("normalize_returns", "--normalize-returns, which is on by default, finds the scale by itself"),
}
"""Flags that algorithms once had: the field that took their place, and what to do."""


def _refuse_old_spellings(args_class: type, argv: list[str]) -> None:
    for word in argv:
        name = word.split("=")[0].replace("_", "-").removeprefix("--").removeprefix("no-")
        field, advice = OLD_SPELLINGS.get(name, ("", ""))
        if word.startswith("--") and hasattr(args_class, field) and not hasattr(args_class, name.replace("-", "_")):
            raise UsageError(f"--{name} is gone: {advice}")


def _resume_defaults(args_class: type, argv: list[str]) -> Any:
    """The resumed run's flags, as defaults that explicit flags override; None without --resume."""
    words = [part for word in argv for part in (word.split("=", 1) if word.startswith("--") else [word])]
    given = dict(zip(words, words[1:], strict=False))  # of a repeated flag the last counts
    if "--resume" not in given or not issubclass(args_class, RunArgs):
        return None
    explicit_env = {"env": given["--env"]} if "--env" in given else {}
    return args_class.from_run(given["--resume"], **explicit_env)
