"""Training speed of an algorithm: warm steps/s and seconds of compilation for every environment, as
a table.

    python -m benchmarks.speed ppo_pmap --envs CartPole-v1 Breakout-MinAtar
    python -m benchmarks.speed sac_pmap --envs Pendulum-v1 --against ../before --rounds 5 \\
        -- --num-envs 16
    python -m benchmarks.speed --rows --envs CartPole-v1
    python -m benchmarks.speed ppo_rnn_pmap --envs CartPole-v1 --source ~/purejaxrl -- \\
        --share-torso --activation relu --hidden-sizes 128

Each measurement is a run of the algorithm's own script with `--benchmark`, in a process of its own.
The first run of a row compiles anew and is not counted, the others take their programs from its
cache. With --against another checkout runs the same flags, with --source PureJaxRL or purejaxql
trains with the same sizes. The two take turns, and a ratio is the median over rounds, so that
whatever else the machine does slows both.
"""

import dataclasses
import importlib
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from benchmarks.jobs import ROOT, imports_of, last_line, last_of
from benchmarks.kernels import count_kernels
from benchmarks.peers.__main__ import TRAINERS, check_source, install, packages_for, python_of
from benchmarks.records import machine_class, markdown
from pmaprl.cli.checks import Count, Timeout, check_flags
from pmaprl.cli.command import main, parse
from pmaprl.cli.errors import TrainingError, UsageError
from pmaprl.cli.files import check_target
from pmaprl.cli.run_flags import flag_words
from pmaprl.runs.directory import git_hash, write_json

PEERS = {"ppo_pmap": "purejaxrl", "ppo_rnn_pmap": "purejaxrl", "pqn_pmap": "purejaxql"}
TOTAL = 2_000_000_000  # steps that no measurement reaches
OF_THE_COMMAND = ("algorithm", "command", "env", "total_timesteps")
OF_THE_FIRST = ("compile_seconds", "kernels_per_update", "memory_bytes")  # run, which compiles anew
Row = dict[str, Any]


@dataclass(kw_only=True)
class Args:
    """Measure the training speed of an algorithm. What stands behind `--` are flags of the
    algorithm.
    """

    algorithm: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="ALGO")] = "ppo_pmap"
    """File of algos/, by its name."""
    envs: tuple[str, ...]
    """Environments: a row for each."""
    seconds: Timeout = 5.0
    """Seconds of training in a measurement, about."""
    rounds: Count = 3
    """Measurements of each row, whose median counts."""
    kernels: bool = False
    """Count an update's operations and bytes on a device too; compiling takes longer."""
    against: str = ""
    """Another checkout of the kit to compare with."""
    rows: bool = False
    """Measure instead what a row of the log costs: many calls of one small update against few of a
    hundred.
    """
    source: str = ""
    """Checkout of PureJaxRL (for ppo_*) or purejaxql (for pqn_pmap) to compare with on gymnax."""
    out: str = ""
    """File to write all measurements to, as JSON."""

    def __post_init__(self):
        check_flags(self)
        for checkout in filter(None, (str(ROOT), self.against)):
            if not (Path(checkout) / "algos" / f"{self.algorithm}.py").is_file():
                raise UsageError(f"{checkout} has no algorithm algos/{self.algorithm}.py")
        if not self.envs:
            raise UsageError("--envs needs values behind it, such as CartPole-v1")
        if self.against and self.source:
            raise UsageError("--against and --source: give one of them")
        if self.source and self.algorithm not in PEERS:
            raise UsageError(f"--source is for {', '.join(PEERS)}, not for {self.algorithm}")
        if self.source:
            check_source(PEERS[self.algorithm], self.source)


class Training:
    """An algorithm of a checkout with some flags, as words, run again and again."""

    def __init__(
        self,
        checkout: Path,
        algorithm: str,
        words: list[str],
        seconds: float,
        kernels: bool = False,
    ):
        self._checkout = checkout
        self._command = [
            sys.executable,
            str(checkout / "algos" / f"{algorithm}.py"),
            *_defaults(algorithm, words),
        ]
        self._seconds = seconds
        self._kernels = kernels
        self.steps = 1
        self._cache = tempfile.TemporaryDirectory(prefix="speed-")
        # What the last run has printed, and of the first one the seconds of compiling anew
        self.about: Row = {}

    def measure(self) -> float:
        """Steps per second of a warm run. Raises UsageError for flags that cannot be, TrainingError
        where it fails.
        """
        while True:
            first = not self.about
            line = self._run()
            wanted = min(max(round(self._seconds * line["steps_per_second"]), 1), TOTAL)
            cold = self.about
            self.about = {name: x for name, x in line.items() if name not in OF_THE_COMMAND}
            self.about |= {name: cold[name] for name in OF_THE_FIRST if name in cold}
            if not first and 2 * self.steps >= wanted:
                return line["steps_per_second"]
            self.steps = wanted if first else max(2 * self.steps, wanted)

    def _run(self) -> Row:
        env = imports_of(self._checkout)
        env |= {
            "JAX_COMPILATION_CACHE_DIR": self._cache.name,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
        }
        words = [
            *self._command,
            "--benchmark",
            *flag_words({"total_timesteps": TOTAL, "stop_after": self.steps}),
        ]
        if self.about or not self._kernels:
            return last_line(words, env)
        with tempfile.TemporaryDirectory() as folder:
            env["XLA_FLAGS"] = (
                f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_hlo_as_text --xla_dump_to={folder}"
            )
            return last_line(words, env) | size_of_update(Path(folder))


def _defaults(algorithm: str, words: list[str]) -> list[str]:
    """The words, in front of them: no tuned flags, no warm-up without learning."""
    known = {
        field.name
        for field in dataclasses.fields(importlib.import_module(f"pmaprl.algos.{algorithm}").Args)
    }
    given = {
        word.split("=")[0].removeprefix("--").removeprefix("no-").replace("-", "_")
        for word in words
    }
    flags = {"tuned": False, "learning_starts": 0}
    return [
        *flag_words({name: value for name, value in flags.items() if name in known - given}),
        *words,
    ]


def size_of_update(folder: Path) -> dict[str, int | None]:
    """Kernels and bytes of the largest program that XLA has written there, which is the update."""
    programs = sorted(folder.glob("*after_optimizations.txt"), key=lambda path: path.stat().st_size)
    if not programs:
        return {"kernels_per_update": None, "memory_bytes": None}
    report = programs[-1].with_name(f"{programs[-1].stem}-memory-usage-report.txt")
    memory = re.findall(
        r"^Total bytes[^:]*: (\d+)", report.read_text() if report.exists() else "", re.MULTILINE
    )
    kernels = count_kernels(programs[-1].read_text())
    return {
        "kernels_per_update": kernels,
        "memory_bytes": sum(map(int, memory)) if memory else None,
    }


class PeerTraining:
    """A peer's training function with the sizes of ours, of a checkout."""

    def __init__(self, args: Args, words: list[str], beside: Training):
        peer = PEERS[args.algorithm]
        packages = packages_for(peer, "cpu" if machine_class().startswith("cpu-") else "gpu")
        install(peer, packages)
        ours = parse(
            importlib.import_module(f"pmaprl.algos.{args.algorithm}").Args,
            _defaults(args.algorithm, words),
        )
        names = "num_envs", "num_steps", "update_epochs", "num_minibatches"
        self._sizes = {name.upper(): getattr(ours, name) for name in names} | {"ENV_NAME": ours.env}
        self._beside = beside
        kind = args.algorithm.removesuffix("_pmap")
        self._words = [
            str(python_of(peer, packages)),
            str(TRAINERS / "train_pure.py"),
            args.source,
            kind,
        ]
        self.about: Row = {"commit": git_hash(Path(args.source)), "packages": packages}

    def measure(self) -> float:
        """Steps per second of a warm run of about as many steps as ours. Raises TrainingError where
        it fails.
        """
        line = last_line(
            [*self._words, json.dumps(self._sizes | {"TOTAL_TIMESTEPS": self._beside.steps})]
        )
        self.about = line | self.about
        return line["steps_per_second"]


def rows_of(args: Args, words: list[str]) -> list[Row]:
    """A row for each environment, printed as soon as it is measured."""
    rows = []
    for env in args.envs:
        rows.append({"env": env} | row_of(args, [*words, "--env", env]))
        print("\n".join(table(rows).splitlines()[-1 if rows[1:] else 0 :]), flush=True)
    return rows


def row_of(args: Args, words: list[str]) -> Row:
    """Measure one size, beside another checkout or a peer where that is asked for."""
    checkouts = [ROOT, *([Path(args.against).resolve()] if args.against else [])]
    sides: list[Any] = [
        Training(
            checkout=checkout,
            algorithm=args.algorithm,
            words=words,
            seconds=args.seconds,
            kernels=args.kernels,
        )
        for checkout in checkouts
    ]
    if args.source:
        sides.append(PeerTraining(args, words, sides[0]))
    speeds: dict[Any, list[float]] = {side: [] for side in sides}
    for turn in range(args.rounds):
        for side in sides[:: -1 if turn % 2 else 1]:
            speeds[side].append(side.measure())
    costs = [
        {"steps_per_second": round(statistics.median(x), 1), "rounds": x} for x in speeds.values()
    ]
    row, *other = (side.about | cost for side, cost in zip(sides, costs, strict=True))
    if other:
        ratios = [round(a / b, 3) for a, b in zip(*speeds.values(), strict=True)]
        row |= {"other": other[0], "ratios": ratios, "ratio": round(statistics.median(ratios), 3)}
    return row


ROWS = 5_000  # of one small update each, against as many updates in rows of a hundred
SMALL = {
    "num_envs": 4,
    "num_steps": 8,
    "num_minibatches": 1,
    "update_epochs": 1,
    "hidden_sizes": (8,),
    "num_devices": 1,
}
SMALL |= {
    "eval_episodes": 1,
    "eval_interval": 0,
    "checkpoint_interval": 0,
    "lr_schedule": "constant",
    "tuned": False,
}


def cost_of_rows(args: Args, words: list[str], count: int = ROWS) -> Row:
    """Milliseconds of a row, by the clock and by the processor, the least of all rounds."""
    steps = SMALL["num_envs"] * SMALL["num_steps"]
    costs = []
    with tempfile.TemporaryDirectory(prefix="rows-") as folder:
        for turn in range(1 + args.rounds):
            seconds = [
                _seconds_of(args, words, Path(folder), steps * count, steps * updates)
                for updates in (1, 100)
            ]
            pairs = zip(*seconds, strict=True)
            costs += [[1e3 * (many - few) / (count - count // 100) for many, few in pairs]] * (
                turn > 0
            )
    wall, processor = map(min, zip(*costs, strict=True))
    return {
        "env": args.envs[0],
        "rows": count,
        "wall_ms": round(wall, 4),
        "processor_ms": round(processor, 4),
    }


def _seconds_of(
    args: Args, words: list[str], folder: Path, total: int, log_interval: int
) -> tuple[float, float]:
    """Seconds of training of a run with that interval, and seconds of processors of its whole
    process.
    """
    flags = SMALL | {"env": args.envs[0], "total_timesteps": total, "log_interval": log_interval}
    run_dir = folder / str(log_interval)
    command = [
        sys.executable,
        str(ROOT / "algos" / f"{args.algorithm}.py"),
        *flag_words(flags),
        *words,
    ]
    env = (
        os.environ
        | imports_of(ROOT)
        | {
            "JAX_COMPILATION_CACHE_DIR": str(folder),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
        }
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with (folder / "said").open("w") as said:
        done = subprocess.run(
            [*command, "--run-dir", str(run_dir), "--overwrite"], env=env, stdout=said, stderr=said
        )
    if done.returncode:
        raise TrainingError(
            f"{last_of((folder / 'said').read_text())[:200]} (exit code {done.returncode})"
        )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = json.loads((run_dir / "result.json").read_text())
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return result["env_steps"] / result["steps_per_second"], processor


def sizes_of(row: Row) -> list[str]:
    """Kernels and megabytes of an update, to be shown; nothing where XLA does not tell."""
    kernels = row["kernels_per_update"]
    memory = row["memory_bytes"]
    return [
        "" if kernels is None else f"{kernels:,}",
        "" if memory is None else f"{memory / 1e6:,.0f} MB",
    ]


def table(rows: list[Row]) -> str:
    """Markdown."""
    heads = ["environment", "steps/s", "compile"]
    heads += ["kernels", "memory"] * ("kernels_per_update" in rows[0])
    heads += ["the other's steps/s", "compile", "ratio", "in all rounds"] * ("ratio" in rows[0])
    lines = []
    for row in rows:
        cells = [row["env"], *_speeds(row)]
        cells += sizes_of(row) if "kernels_per_update" in row else []
        if "other" in row:
            cells += [
                *_speeds(row["other"]),
                f"{row['ratio']:.2f}",
                f"{min(row['ratios'])} to {max(row['ratios'])}",
            ]
        lines.append(cells)
    return markdown(heads, lines)


def _speeds(row: Row) -> list[str]:
    return [f"{row['steps_per_second']:,.0f}", f"{row['compile_seconds']:.1f} s"]


def speed(args: Args, words: list[str]) -> None:
    """Run the command."""
    if args.out:
        check_target(Path(args.out))
    if args.rows:
        rows = [cost_of_rows(args, words)]
        print(json.dumps(rows[0]))
    else:
        rows = rows_of(args, words)
    if args.out:
        record = {
            "benchmark": "speed",
            "algorithm": args.algorithm,
            "machine": machine_class(),
            "flags": words,
        }
        commits = {
            "git": git_hash(ROOT),
            "against": git_hash(Path(args.against)) if args.against else None,
        }
        write_json(Path(args.out), record | commits | {"rows": rows})
        print(f"wrote {args.out}")


if __name__ == "__main__":
    end = [*sys.argv, "--"].index("--")  # of our own flags
    main(lambda args: speed(args, sys.argv[end + 1 :]), parse(Args, sys.argv[1:end]))
