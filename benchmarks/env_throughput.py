"""Steps per second of environments on one device, by random actions and without learning; prints one line of JSON.

    python benchmarks/env_throughput.py --env craftax:Craftax-Classic-Symbolic-v1

Resets of those alone whose episodes ended stand beside a reset of every environment in every step.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import tyro

from common.device.sampling import split_keys
from common.device.stepping import reset_envs, step_envs
from common.envs.environment import Env
from common.envs.masks import legal_actions, sample_legal
from common.envs.registry import make
from common.runs.directory import suite_version, versions


@dataclass
class What:
    env: str
    """Environment, such as brax:ant."""
    env_params: str = ""
    """Environment parameters to change, as a JSON object."""
    num_envs: int = 64
    """Parallel environments."""
    seconds: float = 3.0
    """How long to measure each, at least."""


def rollout(env: Env, step: Callable, num_envs: int, num_steps: int) -> Callable:
    """A program of `num_steps` steps from observations and states; counts the episodes that end, and the rewards."""

    def random_action(key, obs):
        return sample_legal(key, env.action_space, legal_actions(obs))

    def one(carry, key):
        action_keys, step_keys = split_keys(jax.random.split(key, num_envs), 2)
        obs, states = carry
        out = step(step_keys, states, jax.vmap(random_action)(action_keys, obs))
        return (out.obs, out.state), (jnp.sum(out.terminated | out.truncated), jnp.sum(out.reward))

    def run(carry, key):
        carry, counts = jax.lax.scan(one, carry, jax.random.split(key, num_steps))
        return carry, jax.tree.map(jnp.sum, counts)

    return jax.jit(run, donate_argnums=0)


def measured(what: What, env: Env, step: Callable) -> dict[str, Any]:
    """Steps per second, warm, after the seconds that compiling took."""
    keys, num_steps = jax.random.split(jax.random.key(0), what.num_envs), 64
    run = rollout(env, step, what.num_envs, num_steps)
    carry = jax.block_until_ready(jax.jit(lambda keys: reset_envs(env, keys))(keys))
    began = time.perf_counter()
    run = run.lower(carry, jax.random.key(0)).compile()
    compiled = time.perf_counter() - began
    carry, _ = jax.block_until_ready(run(carry, jax.random.key(0)))
    began, calls, ended, earned = time.perf_counter(), 0, 0, 0.0
    while (took := time.perf_counter() - began) < what.seconds:
        calls += 1
        carry, (finished, rewards) = jax.block_until_ready(run(carry, jax.random.key(calls)))
        ended, earned = ended + int(finished), earned + float(rewards)
    steps = calls * num_steps * what.num_envs
    return {
        "steps_per_second": round(steps / took),
        "compile_seconds": round(compiled, 1),
        "steps_per_episode": round(steps / ended) if ended else None,
        "reward_per_episode": round(earned / ended, 3) if ended else None,
    }


def main(what: What) -> None:
    env = make(what.env, what.env_params)
    record = {
        "benchmark": "env_throughput",
        "versions": versions() | suite_version(what.env),
        "device": str(jax.devices()[0]),
        "env": what.env,
        "num_envs": what.num_envs,
        "state_bytes": env.state_bytes,
        **measured(what, env, lambda *inputs: step_envs(env, *inputs)),
        "with_resets_in_every_step": measured(what, env, jax.vmap(env.step)),
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main(tyro.cli(What))
