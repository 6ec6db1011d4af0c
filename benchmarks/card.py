"""Measure the programs on an accelerator in one script of a few minutes: speeds, options of XLA, a
profile.

    python -m benchmarks.card --source ~/purejaxrl ~/purejaxql
    python -m benchmarks.card --parts options profile --minutes 4

Each part has a share of the time, and a line of JSON is written as soon as it is known, so that the
script may be stopped at any time. What is compared takes turns: every program lives in a process of
its own, all compile at the same time, and then one at a time is measured.
"""

import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from benchmarks.jobs import ROOT, UNCACHED, ends_with_us, imports_of, last_of, make_folder
from benchmarks.kernels import PEERS, PROGRAMS, Program, parts_of_run
from benchmarks.peers.__main__ import TRAINERS, checkouts_of
from benchmarks.records import machine_class
from benchmarks.trace import newest_trace, summary_of
from pmaprl.cli.checks import Count, Timeout, check_flags
from pmaprl.cli.command import main, parse
from pmaprl.cli.errors import TrainingError
from pmaprl.runs.directory import git_hash

Row = dict[str, Any]
Part = Literal["beside", "calls", "options", "profile", "others", "resume", "compiling"]
SHARES: dict[Part, float] = {
    "beside": 0.25,
    "calls": 0.05,
    "options": 0.35,
    "profile": 0.1,
    "others": 0.1,
    "resume": 0.1,
    "compiling": 0.05,
}
"""Parts, and what each may take of the time; what one leaves over the others have."""
CALLS = 1, 10, 100  # updates of one call
COMMAND_BUFFERS = "--xla_gpu_enable_command_buffer"
OPTIONS = {  # of XLA, each beside its defaults
    "no graphs": f"{COMMAND_BUFFERS}=",
    "graphs of loops": f"{COMMAND_BUFFERS}=+WHILE,+CONDITIONAL",
    "unrolled loops": f"{COMMAND_BUFFERS}=+WHILE,+CONDITIONAL "
    "--xla_gpu_command_buffer_unroll_loops=true",
    "small graphs": "--xla_gpu_graph_min_graph_size=1",
    "large graphs": "--xla_gpu_graph_min_graph_size=50",
    "concurrent regions": "--xla_gpu_graph_enable_concurrent_region=true",
    "no updates of graphs": "--xla_gpu_command_buffer_update_mode=NEVER_UPDATE",
    "concurrent graphs": "--xla_gpu_command_buffer_scheduling_mode=CONCURRENT",
}
WORTH = 1.02  # times as fast as with XLA's defaults is an option that belongs to the best ones
BUILDING = 150.0  # seconds that a process may take until its programs are compiled
MEASURING = 60.0  # likewise for one measurement


@dataclass(kw_only=True)
class Args:
    """Measure what an accelerator makes of the programs."""

    minutes: Timeout = 9.0
    """When to end; what no time is left for is named."""
    parts: tuple[Part, ...] = tuple(SHARES)
    """Parts to measure: speeds beside peers, updates per call, XLA's options, a profile, other
    algorithms, exact resume, and compiling.
    """
    num_envs: tuple[Count, ...] = (1_024, 8_192, 65_536)
    """Environments of the parts that are measured in several sizes; the others take the first."""
    num_steps: Count = 128
    """Steps of a rollout."""
    seconds: Timeout = 1.0
    """Training time of one measurement, about."""
    rounds: Count = 3
    """Measurements of each program, whose median counts."""
    at_once: Count = 8
    """Programs that compile at the same time."""
    source: tuple[str, ...] = ()
    """Checkouts of PureJaxRL and purejaxql to measure beside."""
    peer_python: str = sys.executable
    """Python that has the packages of those."""
    out: str = ""
    """File for the lines (default: card.jsonl in benchmarks/results, in the folder for this class
    of machine).
    """

    def __post_init__(self):
        check_flags(self)
        checkouts_of(self.source)  # raises

    @property
    def checkouts(self) -> dict[str, str]:
        """Paths of the checkouts, by peer."""
        return checkouts_of(self.source)


class Worker:
    """A process with one program, which compiles it and then measures on request. Any failure is a
    TrainingError.
    """

    def __init__(self, job: Row, options: str = "", cache: str = "", python: str = sys.executable):
        """Start to compile. `options` are added to XLA_FLAGS; without a `cache` folder all is
        compiled anew.
        """
        flags = f"{os.environ.get('XLA_FLAGS', '')} {options}".strip()
        environment = os.environ | imports_of(ROOT) | {"XLA_FLAGS": flags}
        # Several processes share the device
        environment |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        cached = {
            "JAX_COMPILATION_CACHE_DIR": cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        environment |= cached if cache else UNCACHED
        self.about: Row = {}
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the process)
        self._process = subprocess.Popen(
            ends_with_us([python, "-m", "benchmarks.card", "worker", json.dumps(job)]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env=environment,
            cwd=ROOT,
            text=True,
        )
        assert self._process.stdin and self._process.stdout, "both are pipes"
        self._requests = self._process.stdin
        self._answers = self._process.stdout

    def built(self, timeout: float = BUILDING) -> "Worker":
        """Wait until it is compiled; `about` then has the seconds which that took."""
        self.about = self.about or self._answer(timeout)
        return self

    def ask(self, **request: Any) -> Row:
        """Ask for a measurement."""
        self.built()
        with contextlib.suppress(OSError):  # it has ended: why is in what it said
            self._requests.write(json.dumps(request) + "\n")
            self._requests.flush()
        return self._answer(MEASURING)

    def _answer(self, timeout: float) -> Row:
        import select

        ready, _, _ = select.select([self._answers], [], [], timeout)
        line = self._answers.readline() if ready else ""
        if line:
            return json.loads(line)
        if not ready:
            self._process.kill()
        code = self._process.wait()
        self._said.seek(0)
        why = f"took over {timeout:.0f} s" if not ready else f"exit code {code}"
        raise TrainingError(f"{last_of(self._said.read())[:200]} ({why})")

    def close(self) -> None:
        """End it."""
        self._requests.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        self._process.kill()
        self._process.wait()
        self._said.close()


class Card:
    """A run of the command: parts one after another, a line of JSON for everything that is
    known.
    """

    def __init__(self, args: Args, path: Path):
        self.args = args
        self._path = path
        self._began = time.monotonic()
        self._end = self._began  # of the part under way
        self.best_options = ""

    @property
    def left(self) -> float:
        """Seconds that the part under way has left."""
        return self._end - time.monotonic()

    def run(self) -> None:
        """All parts."""
        total = sum(SHARES[part] for part in self.args.parts)
        self._path.unlink(missing_ok=True)
        self.write(
            "start", {"machine": machine_class(), "git": git_hash(ROOT), "args": vars(self.args)}
        )
        for part in self.args.parts:
            self._end = (
                max(self._end, time.monotonic()) + 60 * self.args.minutes * SHARES[part] / total
            )
            try:
                getattr(self, part)()
            except TrainingError as error:
                self.write(part, {"failed": str(error)})

    def write(self, part: str, row: Row) -> None:
        """Keep a result at once."""
        line = json.dumps({"part": part, "second": round(time.monotonic() - self._began, 1)} | row)
        print(line, flush=True)
        with self._path.open("a") as file:
            file.write(line + "\n")

    # ----------------------------------------------------------------------------------------------
    # parts

    def beside(self) -> None:
        """Ours and a peer's, by turns, in several sizes."""
        programs: tuple[Program, ...] = "ppo", "pqn"
        for num_envs in self.args.num_envs:
            jobs: dict[str, Row | None] = {name: self.job(name, num_envs) for name in programs}
            for name in programs:
                jobs[f"{name} of {PEERS[name][0]}"] = self.peer_job(name, num_envs)
            with self.workers({name: (job, "") for name, job in jobs.items() if job}) as workers:
                self.compare("beside", workers, {"num_envs": num_envs})

    def calls(self) -> None:
        """The same PPO with more and more updates in one call."""
        with self.workers({"ppo": (self.job("ppo"), "")}) as workers:
            if not workers:
                return
            for updates in CALLS:
                found = self.tried(self.measured, workers["ppo"], updates)
                self.write("calls", {"updates_per_call": updates} | found)

    def options(self) -> None:
        """XLA's options, each alone, then the best together, for ours and for PureJaxRL."""
        names = {"ppo": self.job("ppo"), "ppo of purejaxrl": self.peer_job("ppo")}
        for name, job in names.items():
            if not job:
                continue
            with self.workers(
                {option: (job, flags) for option, flags in ({"": ""} | OPTIONS).items()}
            ) as workers:
                found = self.compare("options", workers, {"program": name})
            faster = [option for option, ratio in found.items() if ratio >= WORTH]
            flags = merged(
                OPTIONS[option] for option in sorted(faster, key=lambda option: found[option])
            )
            if not flags or self.left < 0:
                continue
            with self.workers({"": (job, ""), "best": (job, flags)}) as workers:
                together = self.compare("options", workers, {"program": name, "flags": flags})
            if name == "ppo" and together.get("best", 0.0) >= WORTH:
                self.best_options = flags

    def profile(self) -> None:
        """Kernels of an update of ours and of PureJaxRL."""
        jobs = {
            "ppo": self.job("ppo"),
            "ppo of purejaxrl": self.peer_job("ppo"),
            "sac": self.job("sac"),
        }
        with self.workers({name: (job, "") for name, job in jobs.items() if job}) as workers:
            for name, worker in workers.items():
                self.write("profile", {"program": name} | self.tried(worker.ask, profile=True))

    def others(self) -> None:
        """The speed of other algorithms."""
        with self.workers(
            {name: (self.job(name), "") for name in ("sac", "dqn", "ppo-gru")}
        ) as workers:
            for name, worker in workers.items():
                self.write("others", {"program": name} | self.tried(self.measured, worker))

    def resume(self) -> None:
        """Runs that stop and go on end as others do, to the last bit, also with the options that
        are chosen.
        """
        for options in dict.fromkeys(["", self.best_options]):
            with self.workers({"ppo": (self.job("ppo") | {"kind": "resume"}, options)}) as workers:
                if workers:
                    self.write("resume", {"options": options} | workers["ppo"].about)

    def compiling(self) -> None:
        """Seconds to compile alone, and from the cache."""
        with tempfile.TemporaryDirectory() as cache:
            for name in ("alone", "from the cache"):
                worker = Worker(self.job("ppo"), cache=cache)
                with contextlib.closing(worker):
                    self.write(
                        "compiling",
                        {"how": name} | self.tried(lambda worker=worker: worker.built().about),
                    )

    # ----------------------------------------------------------------------------------------- what
    # they are made of

    def job(self, program: str, num_envs: int = 0) -> Row:
        """One of ours."""
        return {
            "kind": "ours",
            "program": program,
            "num_envs": num_envs or self.args.num_envs[0],
            "num_steps": self.args.num_steps,
        }

    def peer_job(self, program: Program, num_envs: int = 0) -> Row | None:
        """The peer's program for one of ours; None without a checkout of it."""
        peer, file = PEERS[program]
        source = self.args.checkouts.get(peer)
        ours = self.job(program, num_envs)
        return ours | {"kind": "peer", "source": source, "file": file} if source else None

    @contextlib.contextmanager
    def workers(self, jobs: dict[str, tuple[Row, str]]) -> Iterator[dict[str, Worker]]:
        """Inside, there is a process for each job and its options that has compiled; the others are
        named.
        """
        waiting = list(jobs.items())
        started = []
        built = {}
        with contextlib.ExitStack() as stack:
            while waiting or started:
                while waiting and len(started) < self.args.at_once and self.left > 0:
                    name, (job, options) = waiting.pop(0)
                    python = self.args.peer_python if job["kind"] == "peer" else sys.executable
                    started.append(
                        (
                            name,
                            stack.enter_context(
                                contextlib.closing(Worker(job, options, python=python))
                            ),
                        )
                    )
                if not started:
                    self.write("no time", {"left out": [name or "defaults" for name, _ in waiting]})
                    break
                name, worker = started.pop(0)
                try:
                    built[name] = worker.built(min(BUILDING, max(self.left, 5)))
                except TrainingError as error:
                    self.write("failed", {"program": name or "defaults", "failed": str(error)})
            yield built

    def compare(self, part: str, workers: dict[str, Worker], about: Row) -> dict[str, float]:
        """Measure by turns; returns how many times as fast as the first each is."""
        measured: dict[str, list[Row]] = {name: [] for name in workers}
        for turn in range(self.args.rounds):
            if turn and self.left < 0:
                break
            for name in list(workers)[:: -1 if turn % 2 else 1]:
                row = self.tried(
                    partial(workers[name].ask, seconds=self.args.seconds, updates=CALLS[-1])
                )
                measured[name] += [row] * ("failed" not in row)
        rows = {
            name: workers[name].about | median_of(found)
            for name, found in measured.items()
            if found
        }
        first = next(iter(rows.values()), {}).get("steps_per_second", math.nan)
        for name, row in rows.items():
            row["times_the_first"] = round(row["steps_per_second"] / first, 3)
            self.write(part, about | {"name": name or "defaults"} | row)
        return {name: row["times_the_first"] for name, row in rows.items()}

    def measured(self, worker: Worker, updates: int = CALLS[-1]) -> Row:
        """The median speed of a program with so many updates in a call."""
        found = [
            worker.ask(seconds=self.args.seconds, updates=updates) for _ in range(self.args.rounds)
        ]
        return worker.about | median_of(found)

    def tried(self, function: Callable[..., Row], *args: Any, **named: Any) -> Row:
        """Return what a call returns, or why it failed."""
        try:
            return function(*args, **named)
        except TrainingError as error:
            return {"failed": str(error)}


def median_of(measured: list[Row]) -> Row:
    """One row of several measurements."""
    speeds = [row["steps_per_second"] for row in measured]
    return {
        "steps_per_second": round(statistics.median(speeds)),
        "rounds": [round(x) for x in speeds],
    }


def merged(options: Iterator[str]) -> str:
    """The flags of several options, the last of each name."""
    flags = {flag.partition("=")[0]: flag for option in options for flag in option.split()}
    return " ".join(flags.values())


# -------------------------------------------------------------------------------------------- in
# the other processes


def work(job: Row) -> None:
    """Serve as a worker: compile, say so, and answer requests until there are none."""
    answer = sys.stdout
    sys.stdout = sys.stderr  # whatever else is printed
    about, measure = {"ours": ours, "peer": peer, "resume": resumed}[job["kind"]](job)
    print(json.dumps(about), file=answer, flush=True)
    for line in sys.stdin:
        print(json.dumps(measure(**json.loads(line))), file=answer, flush=True)


def ours(job: Row) -> tuple[Row, Callable[..., Row]]:
    """A program of ours: what compiling it took, and the measurement of some calls."""
    import jax
    import numpy as np

    from pmaprl.device.programs import compile_together

    flags = {"num_steps": job["num_steps"]} if "num_steps" in PROGRAMS[job["program"]][1] else {}
    args, programs, members, example = parts_of_run(
        job["program"], job["num_envs"], jax.devices()[:1], flags
    )
    began = time.perf_counter()
    programs = programs._replace(evaluate=None)  # which is not measured
    programs = compile_together(programs, members, jax.eval_shape(programs.init, members), example)
    seconds = time.perf_counter() - began
    state = jax.block_until_ready(programs.init(members))

    def advance(updates: int) -> None:
        nonlocal state
        state, outcome = programs.update(state, np.int32(updates))
        jax.block_until_ready(outcome)

    return {"compile_seconds": round(seconds, 2)}, partial(
        measurement, advance, args.steps_per_update
    )


def peer(job: Row) -> tuple[Row, Callable[..., Row]]:
    """Compile the training of a peer, which is one call, and say how to measure it."""
    sys.path.insert(0, str(TRAINERS))
    import jax
    import train_pure as trainer
    from flax import linen

    linen.GRUCell = trainer.GRUCell
    sizes = {
        name.upper(): PROGRAMS[job["program"]][1][name]
        for name in ("update_epochs", "num_minibatches")
    }
    sizes |= {
        "ENV_NAME": PROGRAMS[job["program"]][1]["env"],
        "NUM_ENVS": job["num_envs"],
        "NUM_STEPS": job["num_steps"],
    }
    steps = job["num_envs"] * job["num_steps"]
    module, config = trainer.trained_by(
        job["source"], job["file"], sizes | {"TOTAL_TIMESTEPS": CALLS[-1] * steps}
    )
    began = time.perf_counter()
    train = jax.jit(module.make_train(config)).lower(jax.random.PRNGKey(0)).compile()
    seconds = time.perf_counter() - began

    def advance(updates: int) -> None:
        jax.block_until_ready(train(jax.random.PRNGKey(0)))  # which always makes as many

    measure = partial(measurement, advance, steps, fixed=CALLS[-1])
    return {"compile_seconds": round(seconds, 2)}, measure


def measurement(
    advance: Callable[[int], None],
    steps: int,
    fixed: int = 0,
    updates: int = 1,
    seconds: float = 1.0,
    profile: bool = False,
) -> Row:
    """Speed of calls of `advance`, or what a trace of one says of an update.

    Args:
        advance: Makes so many updates and waits for them.
        steps: Environment steps of an update.
        fixed: The number of updates that it makes, whatever it is asked for; 0: as many as that.
        updates: Those of one call.
        seconds: To measure for, about.
        profile: Whether to trace.
    """
    updates = fixed or (1 if profile else updates)
    advance(updates)
    if profile:
        import jax

        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder, create_perfetto_trace=False):
                advance(updates)
            return summary_of(newest_trace(Path(folder)), updates)
    began = time.perf_counter()
    calls = 0
    while calls == 0 or time.perf_counter() - began < seconds:
        advance(updates)
        calls += 1
    return {"steps_per_second": calls * updates * steps / (time.perf_counter() - began)}


def resumed(job: Row) -> tuple[Row, Callable[..., Row]]:
    """Compare a run with one that stops in the middle and goes on."""
    import importlib

    name, flags = PROGRAMS[job["program"]]
    module = importlib.import_module(f"pmaprl.algos.{name}")
    sizes = {"num_envs": job["num_envs"], "num_steps": job["num_steps"]}
    total = 8 * job["num_envs"] * job["num_steps"]
    flags = (
        flags
        | sizes
        | {"total_timesteps": total, "quiet": True, "num_devices": 1, "eval_episodes": 8}
    )
    with tempfile.TemporaryDirectory() as folder:
        whole = module.train(module.Args(**flags, run_dir=f"{folder}/whole"))
        part = module.train(module.Args(**flags, run_dir=f"{folder}/part", stop_after=total // 2))
        end = module.train(module.Args.from_run(part.run_dir, quiet=True))
    return {"is_exact": end.state_sha256 == whole.state_sha256, "stopped": part.status}, dict


def measure(args: Args) -> None:
    """Run the command."""
    path = (
        Path(args.out)
        if args.out
        else ROOT / "benchmarks" / "results" / machine_class() / "card.jsonl"
    )
    make_folder(path.parent)
    Card(args, path).run()
    print(f"wrote {path}")


if __name__ == "__main__" and sys.argv[1:2] == ["worker"]:
    work(json.loads(sys.argv[2]))
elif __name__ == "__main__":
    main(measure, parse(Args))
