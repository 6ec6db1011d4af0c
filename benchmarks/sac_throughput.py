"""Training speed of SAC, and the shares of two floors that it reaches; prints one line of JSON.

    python benchmarks/sac_throughput.py
    python benchmarks/sac_throughput.py --num-envs 16 --num-devices 2

One floor is what the networks alone cost, in the same process and at the same batch size; the other is the machine's
rate of matrix products. For that the multiplications and additions of one gradient update are counted: policy and
target Q functions forward at the next observations; Q functions forward and backward; policy and Q functions forward
and backward for the policy's gradient, which leaves out the Q functions' weights.
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

from algos.sac_pmap import ENVS_PER_CPU_DEVICE, Actor, Args, Critics, make_sac
from benchmarks.timing import Cost, matmul_rate, median_seconds, record, time_training
from common.cli.command import main, parse
from common.device.devices import choose_devices
from common.device.sampling import action_noise
from common.device.sharding import AXIS
from common.envs.environment import Env
from common.envs.registry import make
from common.envs.spaces import Discrete


@dataclass
class Sizes:
    """What to measure."""

    env: str = "Pendulum-v1"
    num_envs: int = 1
    batch_size: int = 256
    utd_ratio: float = 1.0
    hidden_sizes: tuple[int, ...] = (256, 256)
    num_devices: int = 0
    """0 is what training would choose."""
    steps: int = 1_000
    """Environment steps per measurement."""


def measure(sizes: Sizes) -> dict[str, Any]:
    """The record of these sizes."""
    flags = {name: value for name, value in vars(sizes).items() if name != "steps"}
    args = Args(**flags, total_timesteps=10**7)
    devices = choose_devices(args.num_devices, args.num_envs, args.block, ENVS_PER_CPU_DEVICE)
    env = make(args.env)
    updates, skip = (-(-steps // args.num_envs) for steps in (sizes.steps, args.learning_starts))
    before = matmul_rate()
    timing = time_training(make_sac(args, env), env, devices, updates, skip)
    acting, learning = time_networks(args, env, devices, updates)
    rate = (before + matmul_rate()) / 2
    flops = flops_per_gradient_update(args, env)
    steps_per_second = args.num_envs / timing.update_seconds
    cost = Cost(args.num_envs, timing, floor=acting + args.num_envs * args.utd_ratio * learning)
    return record("sac_throughput", devices, flags, cost, rate) | {
        "gradient_updates_per_second": round(steps_per_second * args.utd_ratio, 1),
        "mflop_per_gradient_update": round(flops / 1e6, 1),
        "gflops": round(flops * steps_per_second * args.utd_ratio / 1e9, 1),
        "share_of_matmul_rate": round(flops * steps_per_second * args.utd_ratio / 1e9 / rate, 3),
    }


def time_networks(args: Args, env: Env, devices: list, updates: int) -> tuple[float, float]:
    """Seconds of what the networks alone do to act once in all environments, and in one gradient update."""
    space, obs_space = env.action_space, env.observation_space
    actor, critics = Actor(args, obs_space, space), Critics(args, obs_space, space)
    size, num_envs = args.batch_size // len(devices), args.num_envs // len(devices)  # of each device
    random = np.random.default_rng(0)
    obs, seen = (
        random.normal(size=(len(devices), count, *obs_space.shape)).astype(env.obs_dtype) for count in (size, num_envs)
    )
    noise = action_noise(jax.random.key(0), space, (size,))
    params = make_sac(args, env).new_learner(jax.random.key(1), jax.random.key(2)).params
    params = jax.tree.map(lambda x: np.broadcast_to(x, (len(devices), *x.shape)), params)

    def q_of(critic_params, obs, action):
        return jnp.sum(critics.apply(critic_params, obs, action))

    def value(actor_params, critic_params, obs):
        policy = actor.apply(actor_params, obs)
        if isinstance(space, Discrete):
            return jnp.sum(jax.nn.softmax(policy.logits) * critics.apply(critic_params, obs))
        action, log_prob = policy.sample(noise)
        return q_of(critic_params, obs, action) - jnp.sum(log_prob)

    def descend(params, grads):
        return jax.tree.map(lambda x, g: x - 1e-6 * g, params, grads)

    # Each pass depends on the one before it, so that none can be left out or moved out of the loop.
    def act(params, obs):
        chosen = actor.apply(params.actor, obs)
        changed = 1e-9 * sum(map(jnp.sum, jax.tree.leaves(chosen)))
        return params._replace(log_alpha=params.log_alpha + changed), (obs + changed).astype(obs.dtype)

    def gradient_update(params, obs):
        target = value(params.actor, params.targets, obs)
        action = None if isinstance(space, Discrete) else noise
        obs = (obs + 1e-9 * target).astype(obs.dtype)
        learned = descend(params.critics, jax.grad(q_of)(params.critics, obs, action))
        actor_params = descend(params.actor, jax.grad(value)(params.actor, learned, obs))
        return params._replace(actor=actor_params, critics=learned, targets=learned), obs

    def seconds(step, obs):
        mapped = jax.pmap(
            lambda params, obs: jax.lax.fori_loop(0, updates, lambda _, x: step(*x), (params, obs)),
            axis_name=AXIS,
            devices=devices,
        )
        return median_seconds(partial(mapped, params, obs)) / updates

    return seconds(act, seen), seconds(gradient_update, obs)


def flops_per_gradient_update(args: Args, env: Env) -> float:
    """Of all matrix products, from the shapes of the kernels; layers are counted as if they read a vector."""
    init = jax.vmap(make_sac(args, env).init, axis_name=AXIS)
    params = jax.eval_shape(init, jax.numpy.zeros(1, int)).learner.params  # kernels are [1, in, out]
    actor, critics = (
        sum(2 * x.size for x in jax.tree.leaves(tree) if x.ndim >= 3) for tree in (params.actor, params.critics)
    )
    forward = actor + critics  # policy and targets at the next observations
    learn_q = 3 * critics
    learn_policy = 3 * actor + 2 * critics
    return args.batch_size * (forward + learn_q + learn_policy)


if __name__ == "__main__":
    sys.exit(main(lambda sizes: print(json.dumps(measure(sizes))), parse(Sizes)))
