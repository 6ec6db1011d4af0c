"""From a command line to flags, and from what training raises to an exit code.

Nothing in this folder imports JAX, NumPy or other folders, so that `--help` and usage errors answer
at once.
"""

import argparse
import dataclasses
import errno
import inspect
import io
import os
import re
import select
import shutil
import signal
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin

import tyro

from pmaprl.cli.checks import WORDS, check_flags, flag_of, kinds_of, metavar_of
from pmaprl.cli.errors import (
    FailedEnvError,
    ProcessEnded,
    TrainingError,
    UsageError,
    fail,
    printable,
)
from pmaprl.cli.files import defaults_of, finished_text, is_run, read_config
from pmaprl.cli.run_flags import PARAMS, ArgsFactory, differences

NO_DEFAULT = tyro.conf.arg(help_behavior_hint="")  # for a text that says it, or a value that is ""


RUN = tyro.conf.arg(metavar="RUN", help_behavior_hint="(required)")


@dataclass
class PolicyArgs:
    """Flags that choose a policy."""

    run: Annotated[tyro.conf.Positional[str], RUN] = ""
    """Run directory, or one of its checkpoints."""
    step: int | Literal["best", "latest"] = "latest"
    """Checkpoint to take: latest, best (by its evaluation), or a number of environment steps."""
    agent: Annotated[int | None, NO_DEFAULT] = None
    """Seed of the agent to take from a run with --num-seeds (default: the first)."""
    member: Annotated[int | None, NO_DEFAULT] = None
    """Member to take from a population, from 0 (default: the one with the best evaluation)."""
    algorithm: Annotated[str, NO_DEFAULT] = ""
    """File of the algorithm, whose code is run (default: the one in algos/)."""

    def __post_init__(self):
        check_flags(self)
        if not self.run:
            raise UsageError("name a run directory, such as runs/NAME")


THREAD = "pmaprl worker"  # the name of threads that may hang


def parse(args_class: type, argv: list[str] | None = None) -> Any:
    """Arguments of a script from its command line. Prints and exits with 0 for --help, with 2 for a
    usage error.
    """
    program = None  # the name of the script
    if argv is None:
        argv = sys.argv[1:]
        module = sys.modules["__main__"].__spec__
        program = f"python -m {module.name.removesuffix('.__main__')}" if module else None
        for stream in filter(None, (sys.stdout, sys.stderr)):  # None where it is closed
            stream.reconfigure(errors="replace")  # where it has no ±
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing to save until a run begins
        if hasattr(signal, "SIGPIPE") and {"--help", "--list-envs"} & set(argv):
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as in `--help | head`
    try:
        return _read(args_class, argv, program)
    except (UsageError, argparse.ArgumentError) as error:
        raise SystemExit(fail(str(error), 2)) from None


def main(train: Callable[[Any], Any], args: Any) -> NoReturn:
    """Train and end the process; at once where a thread hangs in foreign code, which Python's
    shutdown could crash.
    """
    code = exit_code(train, args)
    if not any(thread.name == THREAD for thread in threading.enumerate()):
        sys.exit(code)
    _end_at_once(code)


def exit_code(train: Callable[[Any], Any], args: Any) -> int:
    """Train and return the exit code: 0 finished or stopped, 1 failed, 2 bad usage, 128 + N signal
    N.
    """
    try:
        if _has_nothing_to_do(args):
            print(finished_text(args.resume))
        else:
            train(args)
        if sys.stdout:
            sys.stdout.flush()
    # What waits for the others, in threads or at Python's exit, is left behind
    except ProcessEnded as end:
        if not isinstance(
            end.__cause__, UsageError | TrainingError | None
        ) and "has lost" not in str(end):
            traceback.print_exception(end.__cause__)  # a defect
        fail(str(end), end.code)
        time.sleep(end.grace)
        _end_at_once(end.code)
    except UsageError as error:
        return fail(_with_table(str(error), args), 2)
    except (TrainingError, FailedEnvError) as error:
        return fail(str(error), 1)
    except BrokenPipeError as error:
        return _end_of_reader(error)
    except OSError as error:
        if error.errno not in (
            errno.ENOSPC,
            errno.EFBIG,
            errno.EDQUOT,
            errno.EROFS,
            errno.EACCES,
            errno.EPERM,
        ):
            raise
        return fail(f"{error}; saved checkpoints are intact", 1)
    except (RuntimeError, MemoryError) as error:
        if "RESOURCE_EXHAUSTED" not in str(error) and not isinstance(error, MemoryError):
            raise
        return fail(f"there is not enough memory for these sizes: {str(error).splitlines()[0]}", 1)
    except KeyboardInterrupt:
        return 130
    except SystemExit as stop:
        return stop.code
    return 0


def _end_of_reader(error: BrokenPipeError) -> int:
    """The exit code where nobody reads what is printed any more, as in `... | head`. Raises other
    broken pipes.
    """
    with suppress(AttributeError, OSError, ValueError):  # there is no standard output
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        if any(event & select.POLLERR for _, event in poll.poll(0)):
            # For what Python still has to write
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 128 + signal.SIGPIPE
    raise error


def _end_at_once(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        # It is None, nobody reads it, or it is closed
        with suppress(AttributeError, OSError, ValueError):
            stream.flush()
    os._exit(code)


def _has_nothing_to_do(args: Any) -> bool:
    """Tell if --resume-or-start names a run that has finished with these flags."""
    if not (
        getattr(args, "resume_or_start", False)
        and args.resume
        and (Path(args.resume) / "DONE").exists()
    ):
        return False
    then = defaults_of(type(args)) | read_config(args.resume)["args"]
    return not differences(then, dataclasses.asdict(args), args.lasting_flags())


def _read(args_class: type, argv: list[str], program: str | None) -> Any:
    """The arguments. Raises UsageError where there is something wrong with them, SystemExit for
    --help.
    """
    argv = [re.sub("^--[^=]*", lambda flag: flag[0].replace("_", "-"), word) for word in argv]
    default = None
    if issubclass(args_class, ArgsFactory):
        args_class, default = _with_defaults(args_class, argv)
        _check_lists(args_class, argv)
        argv = list(_numbers_apart(args_class, argv))
        if {"-h", "--help"} & set(argv):
            print(help_text(args_class, default, program))
            raise SystemExit(0)
    try:
        with redirect_stderr(io.StringIO()) as box:  # where errors are explained
            return tyro.cli(args_class, args=argv, default=default, prog=program, registry=WORDS)
    except SystemExit as end:
        if end.code != 2:
            raise
        if isinstance(end.__context__, UsageError):  # from the checks of flags
            raise UsageError(_with_table(str(end.__context__), default)) from None
        hint = (
            _known_elsewhere(args_class, argv)
            or _switched(args_class, argv)
            or _unknown(args_class, argv)
        )
        raise UsageError(hint or _sentence_in(box.getvalue())) from None


# Flags by the names that they have in CleanRL, Stable-Baselines3 and other kits
OTHER_NAMES = {"--lr": "--learning-rate", "--anneal-lr": "--lr-schedule", "--track": "--wandb"}
OTHER_NAMES |= {
    "--clip-coef": "--clip-eps",
    "--clip-range": "--clip-eps",
    "--capture-video": "--gif",
}
OTHER_NAMES |= {
    "--n-envs": "--num-envs",
    "--n-epochs": "--update-epochs",
    "--num-epochs": "--update-epochs",
    "--n-atoms": "--num-atoms",
}
OTHER_NAMES |= {
    "--run-name": "--run-dir",
    "--exp-name": "--run-dir",
    "--total-steps": "--total-timesteps",
}
OTHER_NAMES |= {"--start-e": "--epsilon-start", "--end-e": "--epsilon-end"}
OTHER_NAMES |= {
    "--exploration-fraction": "--epsilon-fraction",
    "--target-network-frequency": "--target-frequency",
}


OTHER_NAMES |= {
    "--actor-lr": "--policy-lr",
    "--actor-learning-rate": "--policy-lr",
    "--pi-lr": "--policy-lr",
    "--critic-lr": "--q-lr",
    "--critic-learning-rate": "--q-lr",
    "--qf-lr": "--q-lr",
}


SEEDS_ON_HOST = (
    "for seed in 0 1 2; do python ... --seed $seed; done trains them one after another, and "
)
SEEDS_ON_HOST += "pmaprl.compare and pmaprl.plot put their runs together"

# By a flag of one place what does the same in the other place, and the flag that it needs there
COUNTERPARTS = {
    "--num-seeds": ("--seed", SEEDS_ON_HOST),
    "--num-devices": ("--learner-devices", "--learner-devices 0,1 names those that learn"),
    "--learner-devices": ("--num-devices", "--num-devices 2 says how many learn"),
    "--actor-devices": ("--num-devices", "--num-devices 2 says how many act and learn"),
    "--num-envs": ("--envs-per-actor", "--envs-per-actor says how many each actor thread steps"),
    "--envs-per-actor": ("--num-envs", "--num-envs says how many in all"),
}


def _known_elsewhere(args_class: type, argv: list[str]) -> str:
    """That a word is another kit's name of a flag, or a flag of the place where the environment
    does not step.
    """
    places = {where: getattr(args_class, f"on_{where}", args_class) for where in ("device", "host")}
    own = {flag_of(name) for name in kinds_of(args_class)}
    unknown = [
        flag
        for flag in (re.sub("^--no-", "--", word.split("=")[0]) for word in argv)
        if flag not in own
    ]
    for flag in unknown:
        if OTHER_NAMES.get(flag) in own:
            return f"{flag} is called {OTHER_NAMES[flag]} here"
    for where, other in places.items():
        elsewhere = set(map(flag_of, kinds_of(other)))
        named = [flag for flag in dict.fromkeys(unknown) if flag in elsewhere]
        if named:
            told = (
                f"{' and '.join(named)}: for environments that step on the {where}, and "
                "this one does not"
            )
            return ": ".join(filter(None, [told, _counterparts(named, own)]))
    # An algorithm that has one place only
    replaced = [flag for flag in dict.fromkeys(unknown) if _counterparts([flag], own)]
    if replaced:
        return (
            f"{' and '.join(replaced)}: no flag of this algorithm: {_counterparts(replaced, own)}"
        )
    return ""


def _counterparts(flags: list[str], own: set[str]) -> str:
    """Say which of the `own` flags do the same as these of the other place; empty if none do."""
    hints = [COUNTERPARTS[flag] for flag in flags if flag in COUNTERPARTS]
    return "; ".join(hint for replacement, hint in hints if replacement in own)


def _switched(args_class: type, argv: list[str]) -> str:
    """A hint on a switch that was given a value, such as `--normalize-obs False`; empty where there
    is none.
    """
    switches = {flag_of(name) for name, kind in kinds_of(args_class).items() if kind is bool}
    for flag, value in pairwise([part for word in argv for part in word.split("=", 1)]):
        if flag in switches and value.lower() in (
            "true",
            "false",
            "yes",
            "no",
            "on",
            "off",
            "0",
            "1",
        ):
            return (
                f"{flag} {value}: it is a switch without a value, {flag} turns it on and "
                f"--no-{flag[2:]} off"
            )
    return ""


def _unknown(args_class: type, argv: list[str]) -> str:
    """Name the flags that are none, and those that have similar names; empty if all are flags."""
    own = {flag_of(name): kind for name, kind in kinds_of(args_class).items()}
    switches = {f"--no-{flag[2:]}" for flag, kind in own.items() if kind is bool}
    flags = dict.fromkeys(word.split("=")[0] for word in argv if word.startswith("--"))
    unknown = [flag for flag in flags if flag not in own and flag not in switches]
    if not unknown:
        return ""
    known = [*own, *switches]
    similar = [near for flag in unknown for near in get_close_matches(flag, known, n=1, cutoff=0.7)]
    meant = (
        f": did you mean {' or '.join(dict.fromkeys(similar))}?"
        if similar
        else "; --help lists all flags"
    )
    kind = "is no flag" if len(unknown) == 1 else "are no flags"
    return f"{' and '.join(unknown)} {kind} here{meant}"


def _numbers_apart(args_class: type, argv: list[str]) -> Iterator[str]:
    """The words, with numbers of a flag that takes several one by one: `--hidden-sizes 64,64` is as
    `64 64`.
    """
    several = set()
    for name, kind in kinds_of(args_class).items():
        plain = get_args(kind)[0] if get_origin(kind) is Annotated else kind
        if get_origin(plain) is tuple and plain != tuple[str, ...]:
            several.add(flag_of(name))
    flag = ""
    for word in argv:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            if equals and flag in several and "," in value:
                yield from (flag, *value.split(","))
                continue
        elif flag in several and "," in word:
            yield from word.removesuffix(",").split(",")  # of `64, 64` the first word ends so
            continue
        yield word


def _sentence_in(box: str) -> str:
    """Extract the parser's sentence on an unknown, missing or empty flag from its box."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", box)  # on a terminal it has colours
    lines = [line.strip(" │╭╰─╮╯") for line in plain.splitlines()]
    title, *said = [line for line in lines if line and "full helptext" not in line]
    return " ".join(said) or title


def _check_lists(args_class: type, argv: list[str]) -> None:
    """Raise UsageError where a flag that takes several texts stands there twice, which loses the
    first, or bare.
    """
    words = [word.split("=")[0] for word in argv]
    bare = {word for word, after in pairwise([*argv, "--"]) if after[:2] == "--"}
    for flag in (
        flag_of(name) for name, kind in kinds_of(args_class).items() if kind == tuple[str, ...]
    ):
        if words.count(flag) > 1:
            raise UsageError(f"{flag} is there twice: put all that it says behind one of them")
        if flag in bare:
            raise UsageError(f"{flag} needs a value")


def _with_table(message: str, args: Any) -> str:
    """A refusal, and where flags in it come from that nobody has typed."""
    entry = (
        args.tuned_entry(args.env) if getattr(args, "tuned", False) and not args.resume else None
    )
    if entry and any(flag_of(name) in message for name in entry.flags):
        return f"{message} (flags that were tuned come from {entry}; --no-tuned leaves them out)"
    return message


def _with_defaults(args_class: type, argv: list[str]) -> tuple[type, Any]:
    """The class of flags for the place of the environment and the recipe, and those that explicit
    ones override: the flags of the run that these continue, else those that were tuned for the
    environment; None without any.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for flag in ("--env", "--recipe", "--resume", "--run-dir", *map(flag_of, PARAMS)):
        parser.add_argument(flag, nargs="?")
    for flag in ("--tuned", "--resume-or-start"):
        parser.add_argument(flag, action=argparse.BooleanOptionalAction)
    given, _ = parser.parse_known_args(argv)
    goes_on = given.resume_or_start and given.run_dir and is_run(given.run_dir)
    resumed = given.resume or (given.run_dir if goes_on else "")
    config = read_config(resumed) if resumed else {"args": {}}
    env, recipe = [
        getattr(given, name) or config["args"].get(name, "") for name in ("env", "recipe")
    ]
    args_class = args_class.at(env, recipe)
    if resumed:
        algorithms = [script.stem for script in args_class.scripts()]
        if config["algorithm"] not in algorithms:  # whose flags may well have the same names
            raise UsageError(f"{resumed} was made by {config['algorithm']}, not by {algorithms[0]}")
        named = {name: x for name in PARAMS if (x := getattr(given, name)) is not None}
        flags = args_class.stored_flags(resumed, **named | ({"env": env} if given.env else {}))
    else:
        env = env or getattr(args_class, "env", "")
        entry = None if given.tuned is False else args_class.tuned_entry(env)
        if entry is None:
            return args_class, None
        flags = entry.flags | {"env": env, "tuned": True}
    # Not checked: explicit flags may replace what will not do
    defaults = object.__new__(args_class)
    vars(defaults).update(defaults_of(args_class) | flags)
    return args_class, defaults


class _HelpFormatter(argparse.HelpFormatter):
    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)  # flags stay whole


def help_text(args_class: type, defaults: Any, program: str | None) -> str:
    """Text that --help prints, with the `defaults` of a resumed run, or tuned ones, or None."""
    width = min(max(shutil.get_terminal_size().columns - 1, 50), 119)
    layout = partial(_HelpFormatter, max_help_position=27, width=width)
    usage = "%(prog)s [--FLAG VALUE ...]"
    about = inspect.getdoc(args_class)
    parser = argparse.ArgumentParser(
        program or sys.argv[0], usage, about, formatter_class=layout, add_help=False
    )
    titles, texts = read_code(args_class)
    groups: dict[str, Any] = {}
    for name, kind in kinds_of(args_class).items():
        title = titles.get(name, "more")
        text = " ".join(texts.get(name, "").split())
        text = _with_default(text, getattr(defaults or args_class, name, None))
        groups[title] = groups.get(title) or parser.add_argument_group(title)
        flag = flag_of(name)
        value = {"metavar": metavar_of(kind)}
        if kind is bool:
            flag = f"--[no-]{flag[2:]}"
            value = {"action": "store_true"}
        groups[title].add_argument(flag, help=text.replace("%", "%%"), **value)
    return parser.format_help().rstrip()


FLAG = r'^    (?:# (.+)|(\w+): .+(?:\n    """((?:.|\n)*?)""")?)'  # or the title of a group of them


def read_code(args_class: type) -> tuple[dict[str, str], dict[str, str]]:
    """Group and text of each flag, from the code of its class, or of a base where that says
    nothing.
    """
    titles = {}
    texts = {}
    for part in filter(dataclasses.is_dataclass, args_class.__mro__):
        source = ""
        title = ""
        with suppress(OSError, TypeError):  # it was typed into a console
            source = inspect.getsource(part)
        for new_title, name, text in re.findall(FLAG, source, re.MULTILINE):
            title = new_title or title
            titles |= {name: title} if title and name not in titles else {}
            texts |= {name: text} if text and name not in texts else {}
    return titles, texts


def _with_default(text: str, default: Any) -> str:
    """The text of a flag with its default; as it is where that is nothing, or off."""
    if default is False or default in (None, "", ()):
        return text
    shown = printable(" ".join(map(str, default)) if isinstance(default, tuple) else default)
    return (
        re.sub(r" \(default[^)]*\)", "", text) + f" (default: {'on' if default is True else shown})"
    )
