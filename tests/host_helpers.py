"""Helpers of tests of environments on the host: small runs, and updates from rollouts that are made
up.
"""

from typing import Any

import host_toys  # noqa: F401  (registers the toys)
import jax
import numpy as np
from helpers import metric_rows

from pmaprl.actors.actor import inspect_env
from pmaprl.actors.host_drivers import host_driver
from pmaprl.actors.threads import HostRollout
from pmaprl.device.sharding import AXIS
from pmaprl.device.state import to_host
from pmaprl.runs.run import Run

TOYS = "gymnasium:host_toys:"
TOY = f"{TOYS}Toy-v0"
BOX = f"{TOYS}BoxToy-v0"
SMALL = {
    "env": TOY,
    "vectorization": "sync",
    "num_steps": 8,
    "hidden_sizes": (8,),
    "eval_episodes": 4,
    "eval_interval": 0,
    "checkpoint_interval": 0,
    "quiet": True,
}


class Lab:
    """The functions of a run of an algorithm in an environment."""

    def __init__(self, module: Any, args: Any):
        self.args = args
        self.spec = inspect_env(args).spec
        self.driver = host_driver(module.make_algorithm(args, self.spec), args, self.spec)
        self.step = jax.jit(jax.vmap(self.driver.update, axis_name=AXIS))  # of [D, ...]


def made_up(seed: int, obs: np.ndarray, valid: float = 0.9, **fields: Any) -> HostRollout:
    """A rollout with `obs` [T + 1, N, ...] and these `fields`; everything else is random."""
    rng = np.random.default_rng(seed)
    shape = (len(obs) - 1, obs.shape[1])
    terminated, truncated = rng.random((2, *shape)) < 0.2
    reward = rng.normal(size=shape).astype(np.float32)
    version = np.zeros(shape, np.int32)
    ends = {
        "terminated": terminated,
        "truncated": truncated,
        "valid": rng.random(shape) < valid,
    }
    ends |= {"first": np.zeros((1, shape[1]), bool)}
    others = {
        "obs": obs.astype(np.float32),
        "reward": reward,
        "version": version,
        "final_obs": None,
        "memory": (),
    }
    return HostRollout(**ends | others | fields)


def rows_with(name: str, run_dir: Any) -> list[dict[str, Any]]:
    """The rows of a run that have a metric of that name."""
    return [row for row in metric_rows(run_dir) if name in row]


def states_of(monkeypatch: Any, method: str) -> list[Any]:
    """The states that `Run.start` returns, on the host, or that `Run.finish` gets, from now on."""
    found = []
    original = getattr(Run, method)

    def watched(run, *args):
        result = original(run, *args)
        found.append(to_host(result[0]) if method == "start" else args[0])
        return result

    monkeypatch.setattr(Run, method, watched)
    return found
