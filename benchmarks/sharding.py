"""What training costs under `pmap` and under `shard_map`; prints the rows of a table.

    python benchmarks/sharding.py

Default flags of PPO on CartPole-v1, on one device and on two. The two take turns, so that what else the machine does
slows both.
"""

import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np

from algos.ppo_pmap import Args, make_ppo
from common.device.compilation import compile_together
from common.device.devices import choose_devices
from common.device.programs import Programs, for_seeds, pmapped, shard_mapped
from common.device.seeds import arrays_of
from common.envs.registry import make

WAYS = {"pmap": pmapped, "shard_map": shard_mapped}
COMPILATIONS, CHUNKS, CALLS = 3, 15, 200
UPDATES = 10  # of a chunk


class Training:
    """Training on so many devices in one of `WAYS`, and what it took each time."""

    def __init__(self, way: str, num_devices: int):
        args = Args(num_devices=num_devices)
        env, devices = make(args.env), choose_devices(num_devices, args.num_envs, args.block)
        self.members = arrays_of(args.members, num_devices)
        self.chunk_steps = UPDATES * args.steps_per_update
        self.times: dict[str, list[float]] = {"steps/s": [], "compile, s": [], "dispatch, us": []}
        self._make = lambda: WAYS[way](for_seeds(make_ppo(args, env), env, 1, args.eval_episodes), devices)
        self._programs: Programs | None = None
        self._state: Any = None

    def compile(self) -> None:
        """Afresh; the state begins anew."""
        programs, began = self._make(), time.perf_counter()
        shapes = jax.eval_shape(programs.init, self.members)
        self._programs = compile_together(programs, self.members, shapes, np.int32(0))
        self.times["compile, s"].append(time.perf_counter() - began)
        self._state = jax.block_until_ready(self._programs.init(self.members))

    def update(self) -> None:
        self.times["steps/s"].append(self.chunk_steps / self._call(UPDATES)[1])

    def dispatch(self) -> None:
        """A call of no updates: the time until it comes back."""
        self.times["dispatch, us"].append(1e6 * self._call(0)[0])

    def _call(self, updates: int) -> tuple[float, float]:
        """Seconds until the call returns, and until its results are there."""
        began = time.perf_counter()
        self._state, *_ = self._programs.update(self._state, np.int32(updates))
        returned = time.perf_counter()
        jax.block_until_ready(self._state)
        return returned - began, time.perf_counter() - began


def measure(num_devices: int) -> list[Training]:
    """Both ways, in turns."""
    both = [Training(way, num_devices) for way in WAYS]
    for times, step in (COMPILATIONS, Training.compile), (CHUNKS, Training.update), (CALLS, Training.dispatch):
        for training in both * times:
            step(training)
    return both


def main() -> None:
    choose_devices(2, 2)  # as many are made before JAX starts
    jax.config.update("jax_enable_compilation_cache", False)
    print("devices", "", *WAYS, "ratio", sep=" | ")
    for num_devices in (1, 2):
        old, new = (training.times for training in measure(num_devices))
        for name in old:
            ratio = statistics.median(b / a for a, b in zip(old[name], new[name], strict=True))
            medians = (f"{statistics.median(times[name]):,.4g}" for times in (old, new))
            print(num_devices, name, *medians, f"{ratio:.2f}", sep=" | ")


if __name__ == "__main__":
    main()
