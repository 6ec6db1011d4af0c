"""What a learner and its actors measure: throughput, lag, queues, where the time goes, and episodes."""

import math
import time
from collections import defaultdict, deque
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import numpy as np

from common.actors.pool import ActorPool
from common.actors.queues import Collected
from common.device import multihost
from common.device.statistics import WINDOW, Tally, kind_of

SPEED_WINDOWS = (10, 60, 300)  # seconds over which speeds are measured


class UpdateMetrics:
    """The metrics of a chunk's updates, each read when the update after it is under way."""

    def __init__(self):
        self.updates = 0
        self.leaving = False  # whether a process wanted to stop when one of the updates began, all but the newest
        self.broken: dict[str, np.ndarray] = {}  # by metric, the index of the first update in which it was not finite
        self._reports: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self._gauges: dict[str, float] = {}  # of the newest update
        self._newest = Tally({}, {}), {}, ()

    def add(self, tally: Tally, gauges: dict[str, jax.Array], leaving: Any) -> None:
        """Take the metrics of an update that was just dispatched; waits for the one before it.

        `leaving` is whether a process wanted to stop when it began, () where that is not asked.
        """
        self._read_newest()
        self._newest = tally, gauges, leaving
        self.updates += 1

    def read(self, more: dict[str, Any]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """What the metrics of the updates come to, with `more` behind them, and what was not finite."""
        self._read_newest()
        metrics = {name: np.float32(_value_of(name, reports)) for name, reports in self._reports.items()}
        return metrics | self._gauges | more, self.broken

    def _read_newest(self) -> None:
        newest, self._gauges, leaving = jax.device_get(self._newest)
        self._newest = Tally({}, {}), self._gauges, ()
        self.leaving |= bool(np.any(leaving))
        for name, value in newest.value.items():
            self._reports[name].append((float(value), float(newest.count[name])))
            if not math.isfinite(value):
                self.broken.setdefault(name, np.array([self.updates - 1]))


class Part(NamedTuple):
    """What a process has measured, or all have together: since the last row, and from `counts` on since the start."""

    episodes: list[tuple[float, int]]
    lags: list[np.ndarray]  # of valid steps, by rollout
    queue_sizes: list[int]
    info: list[tuple[str, float, int]]  # as in `Collected`
    steps: dict[str, int]  # that were learned from: "all", those that are "valid", those that are "too_old"
    speeds: dict[str, float]  # as in a row
    counts: dict[str, int]  # as in a row
    seconds: dict[str, float]  # as in a row, of the mean process

    @classmethod
    def joined(cls, parts: list["Part"]) -> "Part":
        """That of all processes, from those of each."""
        whole = cls(*(_together(values) for values in zip(*parts, strict=True)))
        return whole._replace(seconds={name: value / len(parts) for name, value in whole.seconds.items()})


def _together(values: tuple) -> Any:
    """Several lists as one, several dictionaries of numbers as one of their sums."""
    if isinstance(values[0], list):
        return [x for value in values for x in value]
    return {name: sum(value[name] for value in values) for name in values[0]}


def _value_of(name: str, reports: list[tuple[float, float]]) -> float:
    """A metric from its reports, each a value and of how many parts that is, of a mean their sum; NaN without any."""
    values, counts = np.array([report for report in reports if report[1]] or [(np.nan, 1)]).T
    kinds = {"mean": values.sum() / counts.sum(), "last": values[-1]}
    return kinds[kind] if (kind := kind_of(name)) in kinds else getattr(values, kind)()


class Meters:
    """Collects while a run goes on; `row` says how it went since the last row, in all processes."""

    def __init__(self, actor_pool: ActorPool, steps_per_rollout: int, max_policy_lag: int, envs_flag: str):
        self._actor_pool, self._per_rollout, self._max_lag = actor_pool, steps_per_rollout, max_policy_lag
        self._envs_flag = envs_flag
        self.seconds = dict.fromkeys(("wait_get", "transfer", "update", "publish"), 0.0)
        self._began = time.monotonic()
        counts = actor_pool.queues.counts
        start = self._began, counts["produced"], counts["trained"]  # time, rollouts made and learned from
        self._samples: deque[tuple[float, int, int]] = deque([start])
        self._recent: deque[tuple[float, int]] = deque(maxlen=WINDOW)
        self._restarts = actor_pool.restarts.count  # before this start
        self.shares: tuple[float, float, float] | None = None
        self._begin_row()

    @contextmanager
    def timed(self, name: str):
        """Add the time inside to one of the learner's accounts."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] += time.monotonic() - began

    def take(self, collected: Collected, version: int) -> None:
        """Note a rollout that is learned from now, with `version` updates done."""
        rollout = collected.rollout
        lag = version - rollout.version[rollout.valid]
        self._lags.append(lag)
        self._steps["all"] += rollout.valid.size
        self._steps["valid"] += lag.size
        self._steps["too_old"] += int(np.sum(lag > self._max_lag)) if self._max_lag else 0
        self._episodes += zip(collected.returns, collected.lengths, strict=True)
        self._info += collected.info
        counts, now = self._actor_pool.queues.counts, time.monotonic()
        self._queue_sizes.append(counts["waiting"])
        if now - self._samples[-1][0] >= 0.1:
            self._samples.append((now, counts["produced"], counts["trained"]))
            while now - self._samples[1][0] > max(SPEED_WINDOWS):
                self._samples.popleft()

    def row(self) -> dict[str, Any]:
        """The metrics since the last call. All processes call at the same time."""
        part = self._part_of_all()
        self._begin_row()
        self._recent.extend(part.episodes)
        row = self._episode_metrics(part.episodes) | part.speeds
        for metric in self._actor_pool.actors[0].logged:
            row[f"env/{metric}"] = _value_of(metric, [report for name, *report in part.info if name == metric])
        if part.lags:
            lag = np.concatenate(part.lags) if any(map(len, part.lags)) else np.zeros(1)
            row |= {"lag/min": lag.min(), "lag/mean": lag.mean(), "lag/max": lag.max()}
            low, middle, high = np.percentile(part.queue_sizes, (10, 50, 90))
            row |= {"queue/p10": low, "queue/p50": middle, "queue/p90": high}
            row |= {f"batch/{name}": part.steps[name] / part.steps["all"] for name in ("valid", "too_old")}
        self.shares = self._share(part)
        return row | part.counts | part.seconds

    def figures(self, alone: bool) -> dict[str, float]:
        """Counts and seconds so far, of this process `alone`, or of all, which call at the same time."""
        part = self._part() if alone else self._part_of_all()
        return part.counts | part.seconds

    def bottleneck(self) -> str:
        """In words, which side the other one waited for, up to the last row."""
        learner, actors, dropped = self.shares
        again = self._actor_pool.restarts.count - self._restarts
        text = f"the learner waited for rollouts {learner:.0%} of the time, the actors for the learner {actors:.0%}"
        text += f"; actors failed and began anew {'once' if again == 1 else f'{again} times'}" if again else ""
        if dropped:
            return f"speed    the bottleneck is the learner: {dropped:.0%} of the rollouts were dropped; {text}"
        if abs(learner - actors) < 0.1:
            return f"speed    balanced: {text}"
        if learner < actors:
            advice = "fewer gradient steps, a smaller network or more --learner-devices would help"
            return f"speed    the bottleneck is the learner: {text}; {advice}"
        seconds = self._seconds()
        steps = seconds["time/actor_env_step"] > seconds["time/actor_act"]
        advice = "faster environments" if steps else f"a smaller network or more {self._envs_flag}"
        return f"speed    the bottleneck is the actors: {text}; {advice} would help"

    def _part(self) -> Part:
        counts = {f"rollouts/{name}": count for name, count in self._actor_pool.queues.counts.items()}
        counts |= {"actors/restarts": self._actor_pool.restarts.count}
        since = self._episodes, self._lags, self._queue_sizes, self._info, self._steps
        return Part(*since, self._speeds(), counts, self._seconds())

    def _part_of_all(self) -> Part:
        parts = [Part(*part) for part in multihost.allgather(self._part())]
        return Part.joined([part._replace(lags=[np.asarray(lags, int) for lags in part.lags]) for part in parts])

    def _seconds(self) -> dict[str, float]:
        """Those so far of this process's mean actor, and of its learner."""
        actors = self._actor_pool.actors
        seconds = {f"actor_{name}": np.mean([actor.seconds[name] for actor in actors]) for name in actors[0].seconds}
        seconds |= {f"learner_{name}": value for name, value in self.seconds.items()}
        return {f"time/{name}": float(value) for name, value in seconds.items()}

    def _share(self, part: Part) -> tuple[float, float, float] | None:
        """Of the time so far: waiting of the learner and of the mean actor; and of the rollouts: those dropped."""
        counts, seconds, wall = part.counts, part.seconds, time.monotonic() - self._began
        if not counts["rollouts/trained"]:
            return None
        actors = seconds["time/actor_wait_put"] + seconds["time/actor_wait_params"]
        dropped = counts["rollouts/dropped"] / counts["rollouts/produced"]
        return seconds["time/learner_wait_get"] / wall, actors / wall, dropped

    def _begin_row(self) -> None:
        self._lags: list[np.ndarray] = []
        self._queue_sizes: list[int] = []
        self._info: list[tuple[str, float, int]] = []
        self._episodes: list[tuple[float, int]] = []
        self._steps = dict.fromkeys(("all", "valid", "too_old"), 0)

    def _speeds(self) -> dict[str, float]:
        now, counts = time.monotonic(), self._actor_pool.queues.counts
        row = {}
        for span in SPEED_WINDOWS:
            before = [sample for sample in self._samples if sample[0] <= now - span]
            then, made, learned = before[-1] if before else self._samples[0]
            elapsed = max(now - then, 1e-9)
            row[f"time/sps_actors_{span}s"] = (counts["produced"] - made) * self._per_rollout / elapsed
            row[f"time/sps_learner_{span}s"] = (counts["trained"] - learned) * self._per_rollout / elapsed
        return row

    def _episode_metrics(self, new: list[tuple[float, int]]) -> dict[str, float]:
        row = {"episode/count": float(len(new))}
        for index, name in enumerate(("return", "length")):
            for episodes, when in ((new, ""), (self._recent, f"_last{WINDOW}")):
                values = [episode[index] for episode in episodes] or [np.nan]
                for ending, function in (("", np.mean), ("_min", np.min), ("_max", np.max)):
                    row[f"episode/{name}{ending}{when}"] = function(values)
        return row
