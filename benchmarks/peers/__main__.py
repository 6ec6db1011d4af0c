"""Trains other kits on the same tasks, with the flags that their authors publish, for the same
tables.

python -m benchmarks.peers --peer sb3
python -m benchmarks.peers --peer purejaxrl --source ~/purejaxrl

A peer is installed once, into an environment of its own in the user's cache folder. What is done is
skipped, and what was cut short begins again, so it may be stopped at any time. `python -m
benchmarks.report` makes docs/benchmark.md of what it writes.
"""

import dataclasses
import hashlib
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from benchmarks.jobs import Job, ends_with_us, make_folder, parts_of
from benchmarks.learning import (
    EVALUATIONS,
    FIRST_SEED,
    Choice,
    Goal,
    Task,
    chosen,
    goals_of_peer,
    peers,
    run_all,
)
from benchmarks.peers.starts import starts_of
from benchmarks.records import machine_class
from pmaprl.cli.command import main, parse
from pmaprl.cli.device_flags import DeviceEnvArgs
from pmaprl.cli.env_flags import steps_on_host
from pmaprl.cli.errors import TrainingError, UsageError
from pmaprl.cli.files import writing
from pmaprl.cli.host_flags import HostEnvArgs
from pmaprl.cli.run_flags import as_command_line
from pmaprl.device.evaluation import SEED
from pmaprl.device.programs import cache_directory
from pmaprl.runs.directory import git_hash, write_json
from pmaprl.runs.lock import locked

PIP = "-m", "pip", "install", "--quiet"
TRAINERS = Path(__file__).resolve().parent / "trainers"
SOURCES = {"purejaxrl": "purejaxrl/ppo.py", "purejaxql": "purejaxql/pqn_gymnax.py"}
"""Peers that are no packages, each with a file of its checkout."""


def check_source(peer: str, source: str) -> None:
    """Raise UsageError where `source` is no checkout of such a peer."""
    if not is_source(peer, source):
        raise UsageError(
            f"--source {source} has to name a checkout of {peer}, with {SOURCES[peer]} in it"
        )


def is_source(peer: str, source: str) -> bool:
    """Tell whether `source` is a checkout of such a peer."""
    return bool(source) and (Path(source) / SOURCES[peer]).is_file()


def checkouts_of(sources: tuple[str, ...]) -> dict[str, str]:
    """Absolute paths of checkouts, by the peer that each is of. Raises UsageError where one is of
    none.
    """
    found = {}
    for source in sources:
        peers = [peer for peer in SOURCES if is_source(peer, source)]
        if not peers:
            raise UsageError(f"--source {source} is no checkout of {' or '.join(SOURCES)}")
        found |= dict.fromkeys(peers, str(Path(source).resolve()))
    return found


@dataclass(kw_only=True)
class Args(Choice):
    """Train a peer on all tasks for which its authors publish flags; what is done already is
    kept.
    """

    peer: Literal["sb3", "sbx", "rejax", "purejaxrl", "purejaxql"]
    """Stable-Baselines3, SBX, rejax, PureJaxRL or purejaxql."""
    set: Literal["", "classic", "minatar", "bsuite", "memory", "masks", "suites", "host"] = ""
    """Only the environments of this set."""
    source: str = ""
    """A checkout of PureJaxRL or purejaxql, which are no packages."""
    folder: str = "runs/peers"
    """Where the runs lie."""

    def __post_init__(self):
        super().__post_init__()
        if self.peer in SOURCES:
            check_source(self.peer, self.source)
        elif self.source:
            raise UsageError(f"--source is for {' and '.join(SOURCES)}; {self.peer} is installed")


@dataclass(frozen=True)
class Training:
    """A request to a trainer, which reads it from config.json."""

    algorithm: str
    env: str
    total_timesteps: int
    eval_interval: int
    eval_episodes: int
    eval_seed: int
    seed: int
    num_seeds: int
    library: str
    packages: list[str]
    platform: str
    commit: str | None
    flags: dict[str, Any]

    @property
    def num_agents(self) -> int:
        return self.num_seeds


@dataclass(frozen=True)
class PeerJob(Job):
    """One run of a peer. Its directory has what a run of the kit has, as far as a benchmark reads
    it.
    """

    peer: str
    training: Training = field(compare=False)
    peer_command: str = field(compare=False)
    source: str = field(compare=False)

    @cached_property
    def args(self) -> Training:
        return self.training

    @cached_property
    def command(self) -> str:
        return self.peer_command

    def words(self) -> list[str]:
        """The command of its trainer, which reads the config.json that this writes."""
        make_folder(self.run_dir)
        config = {
            "algorithm": self.algorithm,
            "args": dataclasses.asdict(self.args),
            "git": self.args.commit,
        }
        config |= {
            "source": self.source,
            "starts": starts_of(self.algorithm, self.args.env, self.args.eval_episodes),
        }
        write_json(self.run_dir / "config.json", config)
        trainer = TRAINERS / peers()[self.peer]["trainer"]
        return [str(python_of(self.peer, self.args.packages)), str(trainer), str(self.run_dir)]


def tasks_of(args: Args, platform: str) -> list[Task]:
    """List what is to be trained, on a "cpu" or a "gpu". Raises UsageError where nothing is."""
    there = [goal for goal in goals_of_peer(args.peer) if args.set in ("", goal.set)]
    if not there:
        raise UsageError(
            f"--set {args.set} has nothing for which flags of {args.peer} are published"
        )
    return [task_of(args, platform, goal) for goal in chosen(there, args.algos, args.envs)]


def task_of(args: Args, platform: str, goal: Goal) -> Task:
    """An environment: one job for all seeds where the peer can train them at once, else one for
    each.
    """
    about = peers()[args.peer]
    steps = args.total_timesteps or goal.steps
    on_host = steps_on_host(goal.env)
    source = args.source and str(Path(args.source).resolve())
    given = {
        "peer": args.peer,
        "algos": (goal.algorithm,),
        "envs": (goal.env,),
        "seeds": args.seeds,
    }
    more = {
        "total_timesteps": args.total_timesteps,
        "source": source and f"path/to/{Path(source).name}",
    }
    given |= {name: value for name, value in more.items() if value}
    command = f"python -m benchmarks.peers {as_command_line(given)}"
    at_once = (goal.seeds_at_once or args.seeds) if about["seeds_at_once"] else 1
    jobs = []
    for seeds in parts_of(range(FIRST_SEED, FIRST_SEED + args.seeds), at_once):
        training = Training(
            algorithm=goal.algorithm.removeprefix(f"{args.peer}_").partition(" (")[0],
            env=goal.env.partition(" (")[0],
            total_timesteps=steps,
            eval_interval=max(steps // EVALUATIONS, 1),
            # As ours
            eval_episodes=goal.eval_episodes
            or (HostEnvArgs if on_host else DeviceEnvArgs).eval_episodes,
            eval_seed=SEED,
            seed=seeds.start,
            num_seeds=len(seeds),
            library=about.get("library", ""),
            packages=packages_for(args.peer, platform),
            platform=platform,
            commit=git_hash(Path(source)) if source else None,
            flags=goal.flags,
        )
        words = goal.env, str(seeds), str(steps)
        jobs.append(
            PeerJob(goal.algorithm, words, Path(args.folder), args.peer, training, command, source)
        )
    return Task(
        algorithm=goal.algorithm, env=goal.env, steps=steps, threshold=goal.threshold, jobs=jobs
    )


def train(args: Args) -> None:
    """Run the command. Raises UsageError, or TrainingError where a peer cannot be installed or a
    run fails.
    """
    machine = machine_class()
    platform = "cpu" if machine.startswith("cpu-") else "gpu"
    tasks = tasks_of(args, platform)
    install(args.peer, packages_for(args.peer, platform))
    run_all(tasks, Path(args.results) / machine)


def packages_for(peer: str, platform: str) -> list[str]:
    """List what to install: where the kit has a GPU, JAX with CUDA."""
    jax = "jax[cuda12]==" if platform == "gpu" else "jax=="
    return [name.replace("jax==", jax) for name in peers()[peer]["packages"]]


def python_of(peer: str, packages: list[str]) -> Path:
    """The interpreter of a peer's environment, which has its own: peers want other versions than
    the kit has.
    """
    digest = hashlib.sha256(" ".join([sys.version, *packages]).encode()).hexdigest()[:8]
    folder = cache_directory() / "peers" / f"{peer}-{digest}"
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def install(peer: str, packages: list[str]) -> None:
    """Install the packages, unless they are.

    Raises TrainingError where that fails, UsageError where another process is installing them.
    """
    python = python_of(peer, packages)
    folder = python.parents[1]
    if (folder / "COMPLETE").exists():
        return
    print(f"installing {peer} into {folder}, some minutes: {' '.join(packages)}", flush=True)
    with locked(folder.with_name(f"{folder.name}-installing")):
        with writing(f"folder {folder}"):
            shutil.rmtree(folder, ignore_errors=True)  # what an interrupted installation left
            folder.parent.mkdir(parents=True, exist_ok=True)
        for words in [sys.executable, "-m", "venv", str(folder)], [str(python), *PIP, *packages]:
            if code := subprocess.run(ends_with_us(words)).returncode:
                raise TrainingError(
                    f"{peer} is not installed: {' '.join(words[:4])} ... ended with {code}, "
                    "see above"
                )
        (folder / "COMPLETE").touch()


if __name__ == "__main__":
    main(train, parse(Args))
