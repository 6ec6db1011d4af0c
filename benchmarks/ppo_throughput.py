"""Training speed of PPO, and the share of the networks' own floor that it reaches; prints one line of JSON.

    python benchmarks/ppo_throughput.py
    python benchmarks/ppo_throughput.py --num-devices 1

The floor is what the networks alone cost per update, in the same process, at the same batch sizes and on the same
devices: one forward pass of actor and critic over the rollout, and per epoch one forward-and-backward pass over it.
"""

import json
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np

from algos.ppo_pmap import Actor, Args, Critic, make_ppo
from benchmarks.timing import Cost, matmul_rate, median_seconds, record, time_training
from common.cli.command import main, parse
from common.device.devices import choose_devices
from common.device.sharding import AXIS
from common.envs.environment import Env
from common.envs.registry import make


@dataclass
class Sizes:
    """What to measure; the defaults are PureJaxRL's."""

    env: str = "CartPole-v1"
    num_envs: int = 64
    num_steps: int = 128
    update_epochs: int = 4
    num_minibatches: int = 4
    share_torso: bool = False
    num_devices: int = 0
    """0 is what training would choose."""
    updates: int = 40
    """Updates per measurement."""


def measure(sizes: Sizes) -> dict[str, Any]:
    """The record of these sizes."""
    flags = {name: value for name, value in vars(sizes).items() if name != "updates"}
    args = Args(**flags, total_timesteps=10**9)
    devices = choose_devices(args.num_devices, args.num_envs, args.block)
    env = make(args.env)
    timing = time_training(make_ppo(args, env), env, devices, sizes.updates)
    forward, backward = time_networks(args, env, devices, sizes.updates)
    cost = Cost(args.steps_per_update, timing, floor=forward + args.update_epochs * backward)
    return record("ppo_throughput", devices, flags, cost, matmul_rate())


def time_networks(args: Args, env: Env, devices: list, updates: int) -> tuple[float, float]:
    """Seconds for one forward pass over a rollout, and for one forward-and-backward pass in minibatches."""
    samples = args.steps_per_update // len(devices)
    size = samples // args.num_minibatches
    actor, critic = Actor(args, env.observation_space, env.action_space), Critic(args, env.observation_space)
    obs = np.random.default_rng(0).normal(size=(len(devices), samples, *env.observation_space.shape))
    obs = obs.astype(env.obs_dtype)
    (_, features), actor_params = actor.init_with_output(jax.random.key(0), obs[0])
    params = actor_params, critic.init(jax.random.key(1), features if args.share_torso else obs[0])
    params = jax.tree.map(lambda x: np.broadcast_to(x, (len(devices), *x.shape)), params)

    def outputs(params, obs):
        policy, features = actor.apply(params[0], obs)
        value = critic.apply(params[1], features if args.share_torso else obs)
        return sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(policy)) + jnp.sum(value)

    def descend(params, obs):
        return jax.tree.map(lambda x, g: x - 1e-6 * g, params, jax.grad(outputs)(params, obs))

    # Each pass depends on the one before it, so that none can be left out or moved out of the loop.
    def forward(params, obs):
        return jax.lax.fori_loop(0, updates, lambda _, x: outputs(params, obs + (1e-9 * x).astype(obs.dtype)), 0.0)

    def backward(params, obs):
        def minibatch(index, params):
            return descend(params, jax.lax.dynamic_slice_in_dim(obs, index % args.num_minibatches * size, size))

        return jax.lax.fori_loop(0, updates * args.num_minibatches, minibatch, params)

    mapped = (jax.pmap(function, axis_name=AXIS, devices=devices) for function in (forward, backward))
    forward_seconds, backward_seconds = (
        median_seconds(partial(function, params, obs)) / updates for function in mapped
    )
    return forward_seconds, backward_seconds


if __name__ == "__main__":
    sys.exit(main(lambda sizes: print(json.dumps(measure(sizes))), parse(Sizes)))
