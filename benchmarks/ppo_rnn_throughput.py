"""Training speed of PPO with memory, and the share of the networks' own floor that it reaches; prints one line of JSON.

    python benchmarks/ppo_rnn_throughput.py
    python benchmarks/ppo_rnn_throughput.py --unroll 4

The floor is what the networks alone cost per update, in the same process, at the same batch sizes and on the same
devices: actor and critic step by step through a rollout, and per epoch one forward-and-backward pass through time over
it, in minibatches of sequences.
"""

import json
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np

import common.nets.recurrent
from algos.ppo_rnn_pmap import Actor, Args, Critic, make_ppo_rnn
from benchmarks.timing import Cost, matmul_rate, median_seconds, record, time_training
from common.cli.command import main, parse
from common.device.devices import choose_devices
from common.device.sharding import AXIS
from common.envs.environment import Env
from common.envs.registry import make
from common.envs.spaces import flat_size
from common.nets.recurrent import Inputs, initial_memory


@dataclass
class Sizes:
    """What to measure."""

    env: str = "CartPole-v1"
    num_envs: int = 64
    num_steps: int = 128
    update_epochs: int = 4
    num_minibatches: int = 4
    bptt_length: int = 0
    share_torso: bool = False
    rnn: Literal["gru", "lstm"] = "gru"
    rnn_size: int = 128
    num_devices: int = 0
    """0 is what training would choose."""
    updates: int = 10
    """Updates per measurement."""
    unroll: int = common.nets.recurrent.UNROLL
    """Steps in one turn of the loop over time."""


def measure(sizes: Sizes) -> dict[str, Any]:
    """The record of these sizes."""
    common.nets.recurrent.UNROLL = sizes.unroll
    flags = {name: value for name, value in vars(sizes).items() if name not in ("updates", "unroll")}
    args = Args(**flags, total_timesteps=10**9)
    devices = choose_devices(args.num_devices, args.num_envs, args.block)
    env = make(args.env)
    timing = time_training(make_ppo_rnn(args, env), env, devices, sizes.updates)
    acting, learning = time_networks(args, env, devices, sizes.updates)
    cost = Cost(args.steps_per_update, timing, floor=acting + args.update_epochs * learning)
    found = record("ppo_rnn_throughput", devices, flags | {"unroll": sizes.unroll}, cost, matmul_rate())
    return found | {"acting_ms": round(1e3 * acting, 2), "learning_ms_per_epoch": round(1e3 * learning, 2)}


def time_networks(args: Args, env: Env, devices: list, updates: int) -> tuple[float, float]:
    """Seconds for acting through a rollout, and for one forward-and-backward pass over it in minibatches."""
    envs = args.num_envs // len(devices)
    actor, critic = Actor(args, env.observation_space, env.action_space), Critic(args, env.observation_space)
    random = np.random.default_rng(0)
    obs = random.normal(size=(len(devices), args.num_steps, envs, *env.observation_space.shape)).astype(env.obs_dtype)
    first = random.random(obs.shape[1:3]) < 0.02
    previous = np.zeros((*obs.shape[1:3], flat_size(env.action_space) + 1), np.float32)
    inputs = Inputs(obs, *(np.broadcast_to(x, (len(devices), *x.shape)) for x in (first, previous)))
    memory = (initial_memory(args.rnn, args.rnn_size, args.rnn_layers, envs),) * 2
    one = jax.tree.map(lambda x: x[0, :1, :1], inputs), jax.tree.map(lambda x: x[:1], memory[0])
    (_, features, _), actor_params = actor.init_with_output(jax.random.key(0), *one)
    params = actor_params, critic.init(jax.random.key(1), features if args.share_torso else one[0], one[1])
    params = jax.tree.map(lambda x: np.broadcast_to(x, (len(devices), *x.shape)), params)

    def outputs(params, inputs, memory):
        policy, features, of_actor = actor.apply(params[0], inputs, memory[0])
        value, of_critic = critic.apply(params[1], features if args.share_torso else inputs, memory[1])
        total = sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(policy)) + jnp.sum(value)
        return total, (of_actor, memory[1] if args.share_torso else of_critic)

    def act(params, inputs):
        def step(carry, inputs):
            memory, total = carry
            one = jax.tree.map(lambda x: x[None], inputs)._replace(obs=inputs.obs[None] + 1e-9 * total)
            more, left = outputs(params, one, memory)
            return (jax.tree.map(lambda x, old: x.reshape(old.shape), left, memory), total + more), None

        def rollout(_, total):
            return jax.lax.scan(step, (memory, total), inputs)[0][1]

        return jax.lax.fori_loop(0, updates, rollout, 0.0)

    def learn(params, inputs):
        size, segments = envs // args.num_minibatches, args.num_steps // args.segment

        def minibatch(index, params):
            def part(x):
                x = jax.lax.dynamic_slice_in_dim(x, index % args.num_minibatches * size, size, axis=1)
                x = jnp.swapaxes(x.reshape(segments, args.segment, *x.shape[1:]), 0, 1)
                return x.reshape(args.segment, segments * size, *x.shape[3:])

            start = jax.tree.map(lambda x: jnp.zeros((segments * size, *x.shape[1:])), memory)
            grads = jax.grad(lambda params: outputs(params, jax.tree.map(part, inputs), start)[0])(params)
            return jax.tree.map(lambda x, g: x - 1e-6 * g, params, grads)

        return jax.lax.fori_loop(0, updates * args.num_minibatches, minibatch, params)

    mapped = (jax.pmap(function, axis_name=AXIS, devices=devices) for function in (act, learn))
    acting, learning = (median_seconds(partial(function, params, inputs)) / updates for function in mapped)
    return acting, learning


if __name__ == "__main__":
    sys.exit(main(lambda sizes: print(json.dumps(measure(sizes))), parse(Sizes)))
