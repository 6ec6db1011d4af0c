"""What a learner and its actors measure: metrics of updates, episodes, the lag of policies, and where the time goes."""

import math
import operator
import time
from collections import deque
from functools import reduce
from typing import Any

import jax
import numpy as np

from common.actors.pool import ActorPool
from common.actors.queues import Collected
from common.actors.watchdog import Worker
from common.device import multihost
from common.device.statistics import WINDOW, Report, Tally


class UpdateMetrics:
    """The metrics of a chunk's updates, each read when the update after it is under way."""

    def __init__(self):
        self.updates = 0
        self.leaving = False  # whether a process wanted to stop when one of the updates began, all but the newest
        self.broken: dict[str, np.ndarray] = {}  # by metric, the index of the first update in which it was not finite
        self._tallies: list[Tally] = []
        self._gauges: dict[str, float] = {}  # of the newest update
        self._newest: tuple | None = None

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
        return _metrics_of(self._tallies) | self._gauges | more, self.broken

    def _read_newest(self) -> None:
        if self._newest is None:
            return
        (tally, self._gauges, leaving), self._newest = jax.device_get(self._newest), None
        self._tallies.append(tally)
        self.leaving |= bool(np.any(leaving))
        for name, value in tally.value.items():
            if not math.isfinite(value):
                self.broken.setdefault(name, np.array([self.updates - 1]))


def _metrics_of(tallies: list[Tally]) -> dict[str, Any]:
    with np.errstate(invalid="ignore"):  # of what was never reported
        return reduce(operator.add, tallies).metrics()


class Meters:
    """Collects while a run goes on; `row` says how it went since the last row, in all processes."""

    def __init__(self, actor_pool: ActorPool, learner: Worker, max_policy_lag: int):
        self._actor_pool, self._learner, self._max_lag = actor_pool, learner, max_policy_lag
        self._began = time.monotonic()
        self._tallies: list[Tally] = []  # since the last row, as the episodes
        self._episodes: list[tuple[float, int]] = []
        self._recent: deque[tuple[float, int]] = deque(maxlen=WINDOW)

    def take(self, collected: Collected, version: int) -> None:
        """Note a rollout that is learned from now, with `version` updates done."""
        valid = collected.rollout.valid
        lag = version - collected.rollout.version[valid]
        too_old = np.sum(lag > self._max_lag) if self._max_lag else np.int64(0)
        reports = {"batch/valid": Report(np.sum(valid), valid.size), "batch/too_old": Report(too_old, valid.size)}
        found = {"policy/lag": lag, "episode/return": collected.returns, "episode/length": collected.lengths}
        for name, values in found.items():
            values = np.array(values, float)
            reports[name] = Report(np.sum(values), len(values))
            reports[f"{name}_min"] = Report(np.min(values, initial=np.inf), len(values))
            reports[f"{name}_max"] = Report(np.max(values, initial=-np.inf), len(values))
        info = ({f"env/{name}": x for name, x in numbers.items()} for numbers in vars(collected.info).values())
        self._tallies.append(Tally.of(reports) | Tally(*info))
        self._episodes += zip(collected.returns, collected.lengths, strict=True)

    def row(self) -> dict[str, Any]:
        """The metrics since the last call. All processes call at the same time."""
        tally = reduce(operator.add, self._tallies)
        parts = multihost.allgather((tally.value, tally.count, self._episodes))
        self._tallies, self._episodes = [], []
        tallies = [Tally(*jax.tree.map(np.float64, part[:2])) for part in parts]
        count = sum(part.count["episode/return"] for part in tallies)
        self._recent.extend(episode for *_, episodes in parts for episode in episodes)
        recent = np.array(self._recent or [(np.nan, np.nan)], float).mean(axis=0)
        newest = {f"episode/{name}_last{WINDOW}": x for name, x in zip(("return", "length"), recent, strict=True)}
        return _metrics_of(tallies) | {"episode/count": count} | newest | self.figures()

    def figures(self, alone: bool = False) -> dict[str, float]:
        """Counts and seconds so far, of this process `alone`, or of all, which call at the same time."""
        counts = {f"rollouts/{name}": count for name, count in self._actor_pool.queue.counts.items()}
        counts |= {"actors/restarts": self._actor_pool.restarts}
        parts = [(counts, self._seconds())] if alone else multihost.allgather((counts, self._seconds()))
        total = {name: sum(part[name] for part, _ in parts) for name in counts}
        return total | {name: sum(part[name] for _, part in parts) / len(parts) for name in self._seconds()}

    def bottleneck(self) -> str:
        """In words, which side the other one waited for."""
        seconds, wall = self._seconds(), time.monotonic() - self._began
        learner = seconds["time/learner_wait_get"] / wall
        actors = (seconds["time/actor_wait_put"] + seconds["time/actor_wait_params"]) / wall
        slow = "learner" if learner < actors else "actors"
        what = "balanced" if abs(learner - actors) < 0.1 else f"the bottleneck is the {slow}"
        waits = f"the learner waited for rollouts {learner:.0%} of the time, the actors for the learner {actors:.0%}"
        return f"speed    {what}: {waits}"

    def _seconds(self) -> dict[str, float]:
        """Those so far of this process's mean actor, and of its learner."""
        actors = self._actor_pool.actors
        seconds = {f"actor_{name}": np.mean([actor.seconds[name] for actor in actors]) for name in actors[0].seconds}
        seconds |= {f"learner_{name}": value for name, value in self._learner.seconds.items()}
        return {f"time/{name}": float(value) for name, value in seconds.items()}
