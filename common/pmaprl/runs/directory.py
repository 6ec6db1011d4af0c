"""The directory of a run: its choice, its `config.json`, and files that may be replaced."""

import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from pmaprl import __version__
from pmaprl.cli.checks import flag_of
from pmaprl.cli.env_flags import CUSTOM, split_name
from pmaprl.cli.errors import UsageError
from pmaprl.cli.files import (
    ALGOS,
    KIT,
    NAME,
    ROOT,
    defaults_of,
    is_of_kit,
    is_run,
    is_temporary,
    read_config,
    write_json,
    writing,
)
from pmaprl.cli.run_flags import MEANING, ONE_TIME, brief_value, differences
from pmaprl.cli.stored import LARGE, check_regular, entries_of
from pmaprl.envs.differences import difference, difference_from_run
from pmaprl.envs.spaces import EnvSpec
from pmaprl.machine import multihost
from pmaprl.machine.devices import Device
from pmaprl.runs.checkpoints import FOLDER, Checkpoints, is_checkpoint, step_of
from pmaprl.runs.lock import LOCK, check_free

BATCH = (
    "num_envs",
    "num_steps",
    "envs_per_actor",
    "actor_threads",
    "actor_devices",
    "rollouts_per_update",
    "distributed",
)
"""Flags that decide how many steps an update takes, in algorithms that have them."""
NAMING = "env", "env_params"  # flags that name the environment
FILES = (
    "metrics.jsonl",
    "curve.png",
    "policy.gif",
    "result.json",
    "wandb_id",
    "DONE",
    "population.png",
    "elo.json",
    "wandb",
    "events.out.tfevents.*",
)
"""Files that a run writes beside `config.json` and its checkpoints."""
SECONDS_TO_APPEAR = 10  # time after which a file of another host has to be visible


def describe_run(args: Any, script: str, env: Any, devices: list[Device]) -> dict[str, Any]:
    """Collect the content of `config.json`: everything needed to repeat the run."""
    path = Path(script).resolve()
    suite, env_id = split_name(args.env)
    flags = dataclasses.asdict(args)
    if ":" not in env_id and args.env != env.name:
        # An environment object passed to `train`: resuming needs it again.
        flags["env"] = f"{type(env.inner).__module__}:{type(env.inner).__qualname__}"
    if args.resume:
        flags["init_from"] = read_config(args.resume)["args"].get("init_from", "")
    return {
        "algorithm": path.stem,
        "script": str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path),
        "script_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "args": flags,
        "members": args.flags_of_members(),
        "steps_per_update": args.steps_per_update,
        "env_spec": env.spec.to_json(),
        "versions": versions() | suite_version(suite),
        "git": git_hash(ROOT) if ALGOS.parent == ROOT else "",
        "devices": [str(device) for device in devices],
        "command": sys.argv,
    }


def versions() -> dict[str, str]:
    """Versions of Python, of the libraries that decide the numbers, and of the kit."""
    numbers = {KIT: __version__, "python": sys.version.split()[0]}
    for name in ("jax", "jaxlib", "flax", "optax", "gymnax", "orbax-checkpoint"):
        numbers[name] = metadata.version(name)
    return numbers


def suite_version(suite: str) -> dict[str, str]:
    """The version of a suite of environments, if it is a package of its own."""
    if suite in (CUSTOM, "pmaprl", "gymnax"):
        return {}
    with suppress(metadata.PackageNotFoundError):  # it may be a module in the working directory
        return {suite: metadata.version(suite)}
    return {}


def describe_shared(args: Any, script: str) -> dict[str, Any]:
    """Collect all that the processes of a run have in common, and that is known before JAX starts.

    Processes compare it when they meet, and refuse a process of another run.
    """
    path = Path(script).resolve()
    code = {"algorithm": path.stem, "script_sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    packages = versions() | suite_version(split_name(args.env)[0])
    code |= {f"the version of {name}": version for name, version in packages.items()}
    return _comparable(args, dataclasses.asdict(args)) | code


def _comparable(args: Any, flags: dict[str, Any]) -> dict[str, Any]:
    """Flags that all processes have in common, with the absolute path of the run or its folder."""
    same = {
        flag_of(name): value
        for name, value in flags.items()
        if name not in ("distributed", "quiet")
    }
    if not args.benchmark:
        # Orbax wants one path in all processes
        same["--run-dir"] = str(Path(args.run_dir or "runs").absolute())
    return same


def agree_on_directory(args: Any, config: dict[str, Any]) -> tuple[Path | None, list[str]]:
    """Choose the run's directory in all processes, as `choose_directory` does in one.

    Returns:
        The directory, and the changed flags; (None, []) with --benchmark, which has no directory.

    Raises:
        UsageError: the processes have different flags, versions or spaces, or see
            `choose_directory`.
    """
    ours = _comparable(args, config["args"])
    ours |= {name: config[name] for name in ("algorithm", "script_sha256", "versions")}
    spec = EnvSpec.from_json(config["env_spec"])
    of_all = multihost.allgather(ours | {"env_spec": config["env_spec"]})
    this = jax.process_index()
    for process, theirs in enumerate(of_all):
        different = [name for name in ours if of_all[this][name] != theirs.get(name)]
        values = [f"{name} is {theirs.get(name)} there, {ours[name]} here" for name in different]
        values.append(
            difference(
                EnvSpec.from_json(theirs["env_spec"]), spec, when=("there", "here"), exact=True
            )
        )
        problems = "; ".join(filter(None, values))
        if problems:
            raise UsageError(f"process {process} differs from process {this}: {problems}")
    if args.benchmark:
        if args.init_from:
            _check_source(args.init_from, config)
        return None, []
    path, changes = multihost.on_first(choose_directory, args, config)
    return Path(path), changes


def choose_directory(args: Any, config: dict[str, Any]) -> tuple[Path, list[str]]:
    """Choose the run's directory, without writing to the disk.

    Of a resumed run, add the earlier scripts to `config`, in the first process only, which is the
    one that writes it.

    Returns:
        The directory, and a note on each flag that differs from those of a resumed run.

    Raises:
        UsageError: the directory is in use, occupied or unsafe, or flags do not fit its run.
    """
    env = config["args"]["env"].replace(":", ".").replace("/", ".")
    stamp = time.strftime("%Y%m%d-%H%M%S")
    path = Path(args.run_dir or f"runs/{env}__{config['algorithm']}__{args.seed}__{stamp}")
    while not args.run_dir and path.exists():  # a run that started in the same second has it
        path = path.with_name(f"{path.name}-1")
    if "://" in args.run_dir:
        raise UsageError(
            f"--run-dir {args.run_dir} is no folder: mount that storage, and name a folder in it"
        )
    with writing(f"run directory {path}"):
        check_free(path)  # first, because a run that goes on there deletes and makes files
        check_files(path)
        if args.wandb and any(entry.name == "settings" for entry in entries_of(path / "wandb")):
            raise UsageError(
                f"{path}/wandb/settings says where Weights & Biases sends data to: delete it"
            )
        if not args.resume:
            _check_unoccupied(path, args.overwrite)
    if args.resume:
        stored = read_config(path)
        config["earlier_scripts"] = _earlier_scripts(stored, config["script_sha256"])
        return path, _compare(args, stored, config, path)
    if args.init_from:
        _check_source(args.init_from, config)
    return path, []


def _check_source(source: str, config: dict[str, Any]) -> None:
    """Raise UsageError if parameters of the run `source` would mean something else in this one."""
    stored = read_config(source)
    flags = stored["args"], config["args"]
    if differences(*flags, MEANING):
        changed = differences(*flags, ("env", "recipe", *MEANING))
        raise UsageError(f"--init-from {source} does not fit: {'; '.join(changed)}")
    found = difference_from_run(source, stored, EnvSpec.from_json(config["env_spec"]))
    if found:
        changed = [*differences(*flags, NAMING), found]
        raise UsageError(f"--init-from {source} needs the spaces of its run: {'; '.join(changed)}")


def _earlier_scripts(stored: dict[str, Any], digest: str) -> list[str]:
    """Checksums of the other versions of the algorithm's file that the run was trained with."""
    earlier = stored.get("earlier_scripts")
    digests = list(earlier) if isinstance(earlier, list) else []
    digests.append(stored.get("script_sha256"))
    return sorted({str(known) for known in digests if known} - {digest})


def earlier_flags(
    stored: dict[str, Any], flags_now: dict[str, Any], step: int
) -> dict[str, list[list[Any]]]:
    """Find the values that flags had before a resume, so that nobody takes today's for all.

    Args:
        stored: content of `config.json` before the resume.
        flags_now: the flags of the resumed run.
        step: environment steps at which it goes on, which may be before an earlier resume.

    Returns:
        By name, values and the steps at which each ended, in turn. Flags of one invocation and
        flags that never changed are left out.
    """
    now = json.loads(json.dumps(flags_now))  # tuples are lists in `stored`
    known = stored.get("earlier_flags", {})
    found = {}
    for name, value in stored["args"].items():
        if name not in now or name in ONE_TIME:
            continue
        segments = []
        begin = 0
        for past, end in [*known.get(name, []), [value, step]]:
            end = min(end, step)
            if segments and segments[-1][0] == past:
                segments[-1][1] = end
            elif end > begin:  # otherwise nothing that is left was trained with it
                segments.append([past, end])
            begin = end
        if segments and segments[-1][0] == now[name]:
            segments.pop()
        if segments:
            found[name] = segments
    return found


def check_files(run_dir: Path) -> None:
    """Raise UsageError if a file that a run reads, replaces or deletes is a link.

    The directory itself may be reached through links. Other files in it are the user's, and nobody
    opens them.
    """
    for path in entries_of_run(run_dir):
        is_written = path.name != "wandb" and any(map(path.match, FILES))
        if path.name in (NAME, LOCK) or is_written:
            check_regular(path, path.lstat(), LARGE)
    Checkpoints(run_dir / FOLDER).check_files()


def entries_of_run(run_dir: Path) -> list[Path]:
    """The paths in a run directory, which may be a link; none if it does not exist."""
    return entries_of(Path(os.path.realpath(run_dir)))


def claim_directory(path: Path, config: dict[str, Any], overwrite: bool) -> str:
    """Make `path` this run's, with a current `config.json` and without `DONE`.

    An earlier run in it is deleted with `overwrite`, or if it has trained nothing.

    Returns:
        A line on what was deleted, or "".
    """
    with writing(f"run directory {path}"):
        note = ""
        if overwrite and is_run(path) or _is_untrained(path):
            note = delete_run(path)
        path.mkdir(parents=True, exist_ok=True)
        for entry in entries_of_run(path):
            if is_temporary(entry.name):  # a process was killed while it wrote the file
                entry.unlink()
        (path / "DONE").unlink(missing_ok=True)
        write_json(path / NAME, config)
    return note


def _check_unoccupied(path: Path, overwrite: bool) -> None:
    is_empty = not path.exists() or all(map(_is_left_over, entries_of_run(path)))
    if is_empty or _is_untrained(path):
        return
    if not is_run(path):
        raise UsageError(
            f"{path} exists already and is no run directory, for it has no config.json: name "
            "another one, or delete it"
        )
    if not overwrite:
        raise UsageError(
            f"{path} exists already: continue it with --resume {path}, or replace it with "
            "--overwrite"
        )
    if not is_of_kit(path):
        raise UsageError(
            f"{path} has a config.json that no run of {KIT} has written: name another one to "
            "--overwrite"
        )


def _is_left_over(path: Path) -> bool:
    """True for files that a run leaves if it is killed, or its directory is deleted meanwhile."""
    if path.name == FOLDER:
        names = [entry.name for entry in entries_of(path)]
        return all(is_checkpoint(name) and step_of(name) is None for name in names)
    return path.name == LOCK or is_temporary(path.name)


def _compare(args: Any, stored: dict[str, Any], config: dict[str, Any], path: Path) -> list[str]:
    if stored["algorithm"] != config["algorithm"]:
        raise UsageError(f"{path} was made by {stored['algorithm']}, not by {config['algorithm']}")
    old = stored.get("steps_per_update")
    new = config["steps_per_update"]
    if old != new:
        flags = "; ".join(differences(stored["args"], config["args"], BATCH)) or "these flags"
        raise UsageError(
            f"a resumed run keeps its batch: {old} steps per update in {path}, {new} with {flags}"
        )
    flags_now = config["args"]
    flags_then = defaults_of(type(args)) | stored["args"]  # some flags are newer than the run
    refused = differences(flags_then, flags_now, args.fixed)
    if refused:
        raise UsageError(f"{path} cannot go on with these flags: {'; '.join(refused)}")
    spec_now = EnvSpec.from_json(config["env_spec"])
    found = difference_from_run(path, stored, spec_now)
    if found and not _is_untrained(path):
        found = "; ".join([*differences(flags_then, flags_now, NAMING), found])
        raise UsageError(
            f"{path} cannot go on in an environment of other spaces, as a new run could: {found}"
        )
    compared = [name for name in flags_now if name not in ONE_TIME]
    changes = differences(flags_then, flags_now, compared)
    for name in sorted(stored["args"].keys() - flags_now.keys()):
        changes.append(
            f"{flag_of(name)}: {brief_value(stored['args'][name])} then, no flag of this file now"
        )
    # Networks do not see this difference, but it may be a slip
    hidden = difference_from_run(path, stored, spec_now, exact=True)
    changes += [hidden] if hidden else []
    suite_of_env, _ = split_name(args.env)
    versions_then = stored.get("versions", {})
    for suite, now in suite_version(suite_of_env).items():
        then = versions_then.get(suite)
        if then not in (None, now):
            changes.append(f"{suite} is {now}, it was {then}: the same name may be another task")
    if stored.get("script_sha256") != config["script_sha256"]:
        changes.append(f"{config['script']} itself: it is not the file that the run was made with")
    return changes


def _is_untrained(path: Path) -> bool:
    """True if a run has begun in `path`, and ended before it had trained anything."""
    metrics = path / "metrics.jsonl"
    has_rows = metrics.exists() and metrics.stat().st_size > 0
    if has_rows or entries_of(path / FOLDER):
        return False
    return is_run(path) and is_of_kit(path)


def git_hash(checkout: Path) -> str | None:
    try:
        command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def delete_run(run_dir: Path) -> str:
    """Delete the files of a run, except for `config.json`, which is replaced.

    Returns:
        A line that names them.
    """
    files = sorted(path for path in run_dir.iterdir() if any(map(path.match, FILES)))
    saved = [path for path in (run_dir / FOLDER).glob("*") if is_checkpoint(path.name)]
    for path in (*files, *saved):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    names = ", ".join(path.name for path in files)
    return f"deleted  the run in {run_dir}: {names}, {len(saved)} checkpoints"


def check_shared(run_dir: Path | None) -> None:
    """Raise UsageError if a process does not see the `run_dir` that the first one has locked."""
    if run_dir is None or multihost.count() == 1:
        return
    multihost.max_over_processes(0)  # waits until the first process has made the lock
    lock = run_dir / LOCK
    end = time.monotonic() + SECONDS_TO_APPEAR
    is_visible = lock.exists()
    while not is_visible and time.monotonic() < end:
        time.sleep(0.1)
        is_visible = lock.exists()
    blind = multihost.max_over_processes(0 if is_visible else jax.process_index())
    if blind:
        raise UsageError(
            f"process {blind} does not see {run_dir}: it has to be on storage that all "
            "processes share"
        )
