"""The directory of a run: which one, its `config.json`, what else lies in it, and what may be replaced."""

import dataclasses
import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from common.cli.env_flags import CUSTOM, is_custom, split_name
from common.cli.errors import UsageError
from common.cli.files import KIT, NAME, defaults_of, final_name, in_one_step, is_of_kit, is_run, read_config, writing
from common.cli.run_flags import ONE_TIME
from common.device import multihost
from common.runs import lock
from common.runs.checkpoint_files import is_checkpoint, step_of
from common.runs.checkpoints import FOLDER
from common.runs.metrics import check_exchanges, check_members

ROOT = Path(__file__).resolve().parents[2]
VERSION = "0.1.0"  # of the kit; pyproject.toml takes it from here, and copies of the code have it too
BATCH = "num_envs", "num_steps", "envs_per_actor", "actor_threads", "actor_devices", "rollouts_per_update"
BATCH += ("distributed",)
"""Flags that say how many steps an update takes, in algorithms that have them."""


def describe_run(args: Any, script: str, env: Any, devices: list[jax.Device]) -> dict[str, Any]:
    """What `config.json` holds: everything needed to repeat the run."""
    path = Path(script).resolve()
    flags = dataclasses.asdict(args)
    if not is_custom(args.env) and args.env != env.name:
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
        "versions": versions() | suite_version(args.env),
        "git": git_hash(ROOT),
        "devices": [str(device) for device in devices],
        "command": sys.argv,
    }


def versions() -> dict[str, str]:
    """Versions of Python, of the libraries that decide the numbers, and of the kit."""
    names = ("jax", "jaxlib", "flax", "optax", "gymnax", "orbax-checkpoint")
    return {KIT: VERSION, "python": sys.version.split()[0]} | {name: metadata.version(name) for name in names}


def suite_version(env: str) -> dict[str, str]:
    """The version of the suite of an environment, where that is a package of its own."""
    suite = split_name(env)[0]
    if suite in (CUSTOM, "pmaprl", "gymnax"):
        return {}
    with suppress(metadata.PackageNotFoundError):  # a module beside the working directory, say
        return {suite: metadata.version(suite)}
    return {}


def agree_on_directory(args: Any, config: dict[str, Any]) -> tuple[Path | None, list[str]]:
    """What `choose_directory` returns, in all processes; (None, []) with --benchmark, which has none.

    Raises UsageError, also where the processes have different flags, code or versions.
    """
    flags = {name: value for name, value in config["args"].items() if name not in ("distributed", "quiet")}
    here = {f"--{name.replace('_', '-')}": value for name, value in flags.items()}
    here |= {name: config[name] for name in ("algorithm", "script_sha256", "versions")}
    of_all, this = multihost.allgather(here), jax.process_index()
    here = of_all[this]
    for process, there in enumerate(of_all):
        if other := [
            f"{name} is {there.get(name)} there, {here[name]} here" for name in here if here[name] != there.get(name)
        ]:
            raise UsageError(f"process {process} differs from process {this}: {'; '.join(other)}")
    if args.benchmark:
        return None, []
    path, changes = multihost.on_first(choose_directory, args, config)
    return Path(path), changes


def choose_directory(args: Any, config: dict[str, Any]) -> tuple[Path, list[str]]:
    """The run's directory, and what differs from the flags of the run that is resumed. Writes nothing.

    Raises UsageError where the directory is occupied, not a run, or of another algorithm.
    """
    path = Path(args.run_dir) if args.run_dir else _free(Path("runs") / _name(args.seed, config))
    _check_name(args.run_dir, path)
    with writing(f"run directory {path}"):
        if path.exists() and not path.is_dir():
            raise UsageError(f"--run-dir {path} exists and is not a directory")
        lock.check_free(path)
        if not args.resume:
            _check_unoccupied(path, args.overwrite)
            return path, []
        check_contents(path)
        check_exchanges(path)
    stored = read_config(path)
    return path, _compare(args, stored, config, path)


def claim_directory(path: Path, config: dict[str, Any], overwrite: bool) -> str:
    """Make `path` this run's, with a current `config.json` and without `DONE`.

    What a run before has left goes with `overwrite`, or where it came to nothing. Returns what there is to say of that.
    """
    with writing(f"run directory {path}"):
        said = delete_run(path) if overwrite and is_run(path) or _is_untrained(path) else ""
        path.mkdir(parents=True, exist_ok=True)
        (path / "DONE").unlink(missing_ok=True)
        write_json(path / NAME, config)
    return said


def restore(path: Path, config: dict[str, Any]) -> str:
    """Make a directory that was deleted, and that a save under way has made again, a run's again.

    Returns what there is to say of that; "" where it is not there, or another run's.
    """
    if not path.exists() or lock.is_locked(path) or is_run(path):
        return ""
    write_json(path / NAME, config)
    return f"{path} has come back by a save that was under way: --resume {path} goes on with what is in it"


def write_json(path: Path, value: Any) -> None:
    """Replace `path` in one step."""
    with in_one_step(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2) + "\n")


def _check_name(given: str, path: Path) -> None:
    """Raise UsageError where checkpoints cannot be saved under this name."""
    if "://" in given:
        raise UsageError(f"--run-dir {given} is no folder of this machine: mount that storage, and name a folder in it")
    try:
        str(path.absolute()).encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"--run-dir {path.absolute()} is not UTF-8: checkpoints cannot be saved there") from error


def _check_unoccupied(path: Path, overwrite: bool) -> None:
    if not _content(path) or _is_untrained(path):
        return
    if not is_run(path):
        raise UsageError(f"{path} exists already and is no run directory, for it has no config.json: name another one")
    if not overwrite:
        raise UsageError(f"{path} exists already: continue it with --resume {path}, or replace it with --overwrite")
    if not is_of_kit(path):
        raise UsageError(f"{path} has a config.json that no run of {KIT} has written: name another one to --overwrite")
    check_contents(path)


def _compare(args: Any, stored: dict[str, Any], config: dict[str, Any], path: Path) -> list[str]:
    if stored["algorithm"] != config["algorithm"]:
        raise UsageError(f"{path} was made by {stored['algorithm']}, not by {config['algorithm']}")
    check_members(path, stored)
    if stored.get("steps_per_update") != config["steps_per_update"]:
        flags = differences(stored["args"], config["args"], [name for name in BATCH if name in config["args"]])
        raise UsageError(
            f"a resumed run keeps its batch: {stored.get('steps_per_update')} steps per update in {path}, "
            f"{config['steps_per_update']} with {'; '.join(flags) or 'these flags'}"
        )
    made = defaults_of(type(args)) | stored["args"]  # also flags that came later
    for name in args.fixed:
        then, now = made.get(name), config["args"][name]
        if differences({name: then}, {name: now}, [name]):
            then, now = (" ".join(x) or "nothing" if isinstance(x, list | tuple) else x for x in (then, now))
            raise UsageError(
                f"a resumed run keeps its --{name.replace('_', '-')}: {then} in {path}, {now} with these flags"
            )
    changes = differences(made, config["args"], [name for name in config["args"] if name not in ONE_TIME])
    for name in sorted(stored["args"].keys() - config["args"].keys()):
        changes.append(f"--{name.replace('_', '-')}: {stored['args'][name]} then, no flag of this file now")
    for suite, now in suite_version(args.env).items():
        if (then := stored.get("versions", {}).get(suite)) not in (None, now):
            changes.append(f"{suite} is {now}, it was {then}: the same name may be another task")
    if stored.get("script_sha256") != config["script_sha256"]:
        changes.append(f"{config['script']} itself: it is not the file that the run was made with")
    return changes


def differences(then: dict[str, Any], now: dict[str, Any], names: Iterable[str]) -> list[str]:
    """Which of the flags `names` differ between two runs, in words."""
    then, now = (json.loads(json.dumps(x)) for x in (then, now))  # tuples are lists there
    changed = [name for name in names if now[name] != then.get(name)]
    return [f"--{name.replace('_', '-')}: {then.get(name)} then, {now[name]} now" for name in changed]


def _is_untrained(path: Path) -> bool:
    """Whether a run has begun in `path`, and nothing else is there, and ended before it had trained anything."""
    checkpoints, metrics = path / "checkpoints", path / "metrics.jsonl"
    if not is_run(path) or not is_of_kit(path):
        return False
    if not all(name == checkpoints.name or is_of_run(name) for name in _content(path)):
        return False
    check_contents(path)
    trained = checkpoints.exists() and any(checkpoints.iterdir()) or metrics.exists() and metrics.stat().st_size
    return not trained


def _content(path: Path) -> list[str]:
    """What is in a run directory beside its lock, and what a process that was killed while it began has left."""
    names = [inside.name for inside in path.iterdir()] if path.exists() else []
    return [name for name in names if name != lock.NAME and (name == NAME or final_name(name) != NAME)]


def _name(seed: int, config: dict[str, Any]) -> str:
    env, stamp = config["args"]["env"].replace(":", ".").replace("/", "."), time.strftime("%Y%m%d-%H%M%S")
    return f"{env}__{config['algorithm']}__{seed}__{stamp}"


def _free(path: Path) -> Path:
    """`path`, or with a number behind it where a run started within the same second has it."""
    candidates = (path.with_name(f"{path.name}-{i}") if i else path for i in range(1000))
    return next(candidate for candidate in candidates if not candidate.exists())


def git_hash(checkout: Path) -> str | None:
    try:
        command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


FILES = NAME, "metrics.jsonl", "curve.png", "policy.gif", "result.json", "wandb_id", "DONE"
FILES += "population.jsonl", "population.png", "elo.json", "teams.json"
EVENTS = "events.out.tfevents."  # what the names of TensorBoard's files begin with
KINDS = dict.fromkeys((*FILES, lock.NAME), "file") | {FOLDER: "folder"}


def check_contents(run_dir: Path) -> None:
    """Raise UsageError where something in there would make a run write, delete or wait elsewhere."""
    for folder, folders, files in os.walk(run_dir):
        for name in (*folders, *files):
            with suppress(FileNotFoundError):  # it is gone by now
                _check(Path(folder, name), run_dir)
        if "wandb" in folders:
            folders.remove("wandb")  # it keeps links of its own there, and nothing of ours is


def delete_run(run_dir: Path) -> str:
    """Delete what a run has written there, by its name; of that `config.json` is left, for the next run to replace.

    Returns lines that say what was deleted, and what else is there and stays.
    """
    folder = run_dir / FOLDER
    inside = sorted(path.name for path in run_dir.iterdir() if path.name not in (NAME, FOLDER, lock.NAME))
    saved = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    of_run = [*filter(is_of_run, inside)]
    if "wandb" in of_run and not read_config(run_dir)["args"].get("wandb"):
        of_run.remove("wandb")
    checkpoints = [name for name in saved if step_of(name) is not None or is_checkpoint(name)]
    for path in (*(run_dir / name for name in of_run), *(folder / name for name in checkpoints)):  # DONE first
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    with suppress(OSError):  # it is not there, or has something else in it
        folder.rmdir()
    names = [NAME, *of_run, *[f"{len(checkpoints)} checkpoints"] * bool(checkpoints)]
    left = [name for name in inside if name not in of_run]
    left += [f"{FOLDER}/{name}" for name in saved if name not in checkpoints]
    stays = f"\nleft     {', '.join(left)} in {run_dir}: no run has written that" if left else ""
    return f"deleted  the run in {run_dir}: {', '.join(names)}{stays}"


def is_of_run(name: str) -> bool:
    """Whether a run writes a file or folder of this name into its directory."""
    return final_name(name) in FILES or name.startswith(EVENTS) or name == "wandb"


def _check(path: Path, run_dir: Path) -> None:
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        raise UsageError(f"{path} is a link: a run writes and deletes in its own directory only, put a copy there")
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise UsageError(f"{path} is neither a file nor a folder: a run directory has nothing else")
    kind = "folder" if stat.S_ISDIR(mode) else "file"
    wanted = KINDS.get(str(path.relative_to(run_dir)), kind)
    if kind != wanted:
        raise UsageError(f"{path} is a {kind}, and a run has a {wanted} of this name")
