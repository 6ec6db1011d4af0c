"""Rows of metrics: one for every chunk of updates, in `metrics.jsonl` and on the console; exchanges of PBT beside them.

A chunk's report is read once the next chunk is under way, so that the devices never wait for the host.
"""

import json
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from common.cli.errors import TrainingError
from common.envs.masks import LEGAL
from common.runs.console import Console
from common.runs.metrics import EXCHANGES, Metrics, drop_after, jsonable

BEFORE, AFTER = "pbt/before/", "hyper/"


def write_exchange(run_dir: Path, step: int, metrics: dict[str, np.ndarray]) -> None:
    """Write what the metrics of a chunk say of an exchange at its end, if there was one."""
    if np.any(metrics["pbt/due"]):
        row = {"env_steps": step, "objective": jsonable(metrics["pbt/objective"]), "members": _changes(metrics)}
        with (run_dir / EXCHANGES).open("a") as file:
            file.write(json.dumps(row) + "\n")


def _changes(metrics: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """What became of those members to which something happened."""
    names = [name.removeprefix(AFTER) for name in metrics if name.startswith(AFTER)]
    rows = []
    for member, source in enumerate(np.ravel(metrics["pbt/source"]).tolist()):
        old, new = (
            {name: jsonable(np.ravel(metrics[f"{x}{name}"])[member]) for name in names} for x in (BEFORE, AFTER)
        )
        row = {"member": member}
        if source != member:
            theirs, own = (jsonable(np.ravel(metrics["pbt/objective"])[x]) for x in (source, member))
            row |= {"from": source, "why": "broken" if own is None else f"{own} against {theirs}"}
        changed = {name: [old[name], new[name]] for name in names if old[name] != new[name]}
        if changed or source != member:
            rows.append(row | {"changed": changed})
    return rows


class Clock:
    """Runs from its making on; training begins and ends when it is told so."""

    def __init__(self):
        self.seconds = dict.fromkeys(("compile", "eval", "checkpoint", "host"), 0.0)
        self._made = self._began = time.perf_counter()
        self._lap = 0.0  # seconds of training at the last one
        self._ended: float | None = None  # seconds of training in the end

    def begin(self) -> None:
        self._began = time.perf_counter()

    def end(self) -> None:
        self._ended = self.trained

    @property
    def wall(self) -> float:
        """Seconds since the clock was made."""
        return time.perf_counter() - self._made

    @property
    def since_begin(self) -> float:
        """Seconds since training began, with all that interrupts it."""
        return time.perf_counter() - self._began

    @property
    def trained(self) -> float:
        """Seconds of training, without evaluation and saving."""
        if self._ended is not None:
            return self._ended
        return self.since_begin - self.seconds["eval"] - self.seconds["checkpoint"]

    def lap(self) -> float:
        """Seconds of training since the last call, or since it began."""
        before, self._lap = self._lap, self.trained
        return self._lap - before

    @contextmanager
    def timed(self, name: str):
        """Add the time inside to one of `seconds`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - began


Report = tuple[dict[str, np.ndarray], dict[str, np.ndarray]]
"""Metrics by name, and for some of them the index of the chunk's first update in which each seed's was not finite, or
-1; [S] each.
"""

Callback = Callable[[dict[str, Any]], Any]
"""Called with every row of metrics, once it is written; where it returns True, the run ends."""


@dataclass
class Chunk:
    """Updates that are dispatched, and how to learn what they report."""

    first_step: int
    last_step: int
    read: Callable[[], Report]

    @cached_property
    def report(self) -> Report:
        """Waits for the updates."""
        return self.read()

    @cached_property
    def broken(self) -> dict[int, tuple[int, str]]:
        """By agent, update and metric of its first number that was not finite."""
        _, broken = self.report
        found = [(agent, int(index), name) for name, x in broken.items() for agent, index in enumerate(x) if index >= 0]
        return {agent: tuple(first) for agent, *first in sorted(found, reverse=True)}


class Recorder:
    """Holds back the row of the newest chunk until it is asked to write it."""

    def __init__(
        self,
        run_dir: Path | None,
        args: Any,
        config: dict[str, Any],
        first_step: int,
        clock: Clock,
        console: Console,
        last_good: Callable[[], str],
        callback: Callback | None,
    ):
        """The run begins at `first_step`; without `run_dir` the console alone shows rows. `last_good` says, where
        metrics are not finite, from what the run could go on.
        """
        self.told_to_stop = False  # by the callback
        self._run_dir, self._args, self._first_step = run_dir, args, first_step
        self._env_name = config["env_spec"]["name"]
        self._clock, self._console, self._last_good, self._callback = clock, console, last_good, callback
        self._metrics = Metrics(run_dir, args, config, resume_at=first_step) if run_dir else None
        if run_dir and args.exchange_interval:
            drop_after(run_dir / EXCHANGES, first_step)
        self._broken: set[int] = set()  # members of a population that are given up
        self._chunk: Chunk | None = None
        self._evaluation: dict[str, Any] = {}  # for the row of the chunk

    def hold(self, chunk: Chunk) -> None:
        """Take the newest chunk; the one before has to be written by then."""
        self._chunk, self._evaluation = chunk, {}

    def wait(self) -> None:
        """Until the newest chunk is done. Writes its row already where something in it is not finite, and raises."""
        if self._chunk and self._fails(self._chunk):
            self.write()

    def add_evaluation(self, step: int, evaluation: dict[str, list[float]], moment: dict[str, float]) -> None:
        """Into the row of that step, or as a row of its own, of that `moment`, where that is written."""
        values = {name: jsonable(value) for name, value in evaluation.items()}
        if self._chunk and self._chunk.last_step == step:
            self._evaluation = values
        else:
            self._emit({"env_steps": step} | values | {name: jsonable(value) for name, value in moment.items()})

    def write(self) -> None:
        """Write the row that is held back, if there is one. Raises TrainingError where a metric was not finite."""
        if self._chunk is None:
            return
        chunk, self._chunk = self._chunk, None
        metrics, _ = chunk.report
        if self._args.exchange_interval:
            if self._run_dir:
                write_exchange(self._run_dir, chunk.last_step, metrics)
            metrics = {name: x for name, x in metrics.items() if name != "pbt/due" and not name.startswith(BEFORE)}
        seconds = self._clock.lap()
        with self._clock.timed("host"):
            row = {"env_steps": chunk.last_step, "updates": chunk.last_step // self._args.steps_per_update}
            row |= {name: jsonable(value) for name, value in metrics.items()}
            row |= self._evaluation | self._times(chunk, seconds)
            fails = self._fails(chunk)
            self._emit(row, whole=not fails)
            if fails:  # the error is all that there is to show
                raise self._error(chunk)
            self._console.update(chunk.last_step, row)
            self._give_up(chunk)

    def close(self) -> None:
        if self._metrics:
            self._metrics.close()

    def _fails(self, chunk: Chunk) -> bool:
        """Whether the run cannot go on: an agent is broken, or every member of a population is."""
        illegal = any(name == LEGAL for _, name in chunk.broken.values())
        return illegal or len(chunk.broken) >= (self._args.num_agents if self._args.is_population else 1)

    def _error(self, chunk: Chunk) -> TrainingError:
        """What was not finite, of which agent, and since when."""
        (index, name), agent = min((first, agent) for agent, first in chunk.broken.items())
        step, seed = chunk.first_step + (index + 1) * self._args.steps_per_update, self._args.members.seed[agent]
        what = f"{name} is not finite"
        advice = "look at the environment's rewards and observations, or take smaller steps"
        if name == LEGAL:
            what, advice = f"{self._env_name} has a state without any legal action", "look at its action_mask"
        return TrainingError(f"{what} at step {step} (seed {seed}); {self._last_good()}; {advice}")

    def _give_up(self, chunk: Chunk) -> None:
        """Say which members have broken in this chunk; the others go on."""
        new, self._broken = sorted(chunk.broken.keys() - self._broken), set(chunk.broken)
        if new:
            members = ", ".join(map(str, new[:10])) + (f" and {len(new) - 10} more" if len(new) > 10 else "")
            left, metric = self._args.num_agents - len(self._broken), chunk.broken[new[0]][1]
            what = f"{metric} of member{'s' * (len(new) > 1)} {members} is not finite"
            self._console.warn(f"by step {chunk.last_step:,} {what}; {left} go on")

    def _emit(self, row: dict[str, Any], whole: bool = True) -> None:
        if self._metrics:
            self._metrics.write(row)
        if whole and self._callback and self._callback(dict(row)):
            self.told_to_stop = True

    def _times(self, chunk: Chunk, seconds: float) -> dict[str, float]:
        clock, done = self._clock, chunk.last_step - self._first_step
        times = {
            "sps": (chunk.last_step - chunk.first_step) / max(seconds, 1e-9),
            "sps_total": done / max(clock.trained, 1e-9),
            "sps_wall": done / max(clock.since_begin, 1e-9),
            "update": clock.trained - clock.seconds["host"],
            "wall": clock.wall,
        }
        return {f"time/{name}": jsonable(value) for name, value in (times | clock.seconds).items()}
