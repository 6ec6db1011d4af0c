"""How far rounding takes runs apart that draw the same random numbers; prints the rows of a table.

    python benchmarks/rounding.py

Default flags, three seeds of CartPole-v1: each by itself on one device, each on two, and all of them together.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np

from algos.ppo_pmap import Args, make_ppo
from common.device.compilation import compile_together
from common.device.devices import choose_devices
from common.device.evaluation import SEED
from common.device.programs import for_seeds, pmapped
from common.device.sharding import to_host
from common.envs.registry import make

SEEDS = 0, 1, 2
UPDATES = 5, 10, 20, 30, 100, Args().num_updates


class Agent(NamedTuple):
    params: np.ndarray  # all of them in one row
    ret: float  # mean of the greedy episodes


def train(seeds: tuple[int, ...], num_devices: int) -> Iterator[list[Agent]]:
    """The agents [S] after each of `UPDATES`."""
    args = Args(num_devices=num_devices, num_seeds=len(seeds))
    devices, env = choose_devices(num_devices, args.num_envs, args.block), make(args.env)
    programs = pmapped(for_seeds(make_ppo(args, env), env, args.num_agents, args.eval_episodes), devices)
    start = np.tile(np.int32(seeds), (num_devices, 1))
    programs = compile_together(programs, start, jax.eval_shape(programs.init, start), np.int32(0))
    state = programs.init(start)
    for before, updates in zip((0, *UPDATES), UPDATES, strict=False):
        state, *_ = programs.update(state, np.int32(updates - before))
        leaves = jax.tree.leaves(to_host(state).learner.params)
        params = np.concatenate([leaf.reshape(len(seeds), -1) for leaf in leaves], axis=1)
        returns = np.mean(programs.evaluate(state, np.int32(SEED)).ret, axis=(0, 2))
        yield [Agent(*agent) for agent in zip(params, returns, strict=True)]


def alone(num_devices: int) -> list[tuple[Agent, ...]]:
    """The agents of all seeds after each of `UPDATES`, trained one after another."""
    runs = [[agent for (agent,) in train((seed,), num_devices)] for seed in SEEDS]
    return list(zip(*runs, strict=True))


def difference(agents: tuple[Agent, ...], others: list[Agent]) -> str:
    """The largest one between two parameters in the same place."""
    return f"{max(np.abs(a.params - b.params).max() for a, b in zip(agents, others, strict=True)):.0e}"


def main() -> None:
    choose_devices(2, 2)  # as many are made before JAX starts
    print("updates", "devices differ by", "seeds differ by", "returns on one", "on two", "together", sep=" | ")
    for updates, one, two, together in zip(UPDATES, alone(1), alone(2), train(SEEDS, 1), strict=True):
        returns = (", ".join(f"{agent.ret:.0f}" for agent in agents) for agents in (one, two, together))
        print(updates, difference(one, two), difference(one, together), *returns, sep=" | ")


if __name__ == "__main__":
    main()
