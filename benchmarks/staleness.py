"""How old the memories are with which segments begin, in PPO with memory; prints one line of JSON.

    python benchmarks/staleness.py --bptt-length 16
    python benchmarks/staleness.py --env MemoryChain-bsuite --bptt-length 32

With --bptt-length a segment learns from the memory that the actor had at its start, by the parameters of the rollout.
After some training this acts through rollouts, does one more update, and lets the new policy go through the segments
twice: from the memory that was kept, and from the one that the new parameters would have had there. That is the end of
the update; its first minibatch finds no difference at all.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp

from algos.ppo_rnn_pmap import Actor, Args, make_ppo_rnn
from common.cli.command import main, parse
from common.device.memory import Seen, at_start
from common.device.programs import Algorithm, TrainState
from common.device.sampling import in_segments, side_by_side
from common.device.sharding import AXIS
from common.device.update_loop import repeat
from common.envs.environment import Env
from common.envs.registry import make
from common.nets.normalizers import normalize
from common.nets.recurrent import Inputs
from common.runs.directory import versions

ROLLOUTS = 8  # that the measure looks at, one after another


@dataclass
class Sizes:
    """What to measure."""

    env: str = "pmaprl:PartialCartPole-v1"
    bptt_length: int = 16
    num_steps: int = 128
    num_envs: int = 32
    learning_rate: float = Args.learning_rate
    rnn: Literal["gru", "lstm"] = "gru"
    updates: int = 20
    """Updates before the measure."""
    seed: int = 0


def measure(sizes: Sizes) -> dict[str, Any]:
    """The record of these sizes."""
    flags = {name: value for name, value in vars(sizes).items() if name != "updates"}
    args = Args(**flags, total_timesteps=10**9)  # so long that the step size stays
    env = make(args.env)
    algorithm = make_ppo_rnn(args, env)
    before = alone(partial(trained, algorithm))(args.seed, sizes.updates)
    after, *_ = alone(algorithm.update)(before)
    found = jax.jit(partial(compare, args, env, algorithm))(before.learner, after.learner)
    return {
        "benchmark": "staleness",
        "versions": versions(),
        "sizes": vars(sizes),
        **{name: float(f"{value:.3g}") for name, value in found.items()},
    }


def alone(function: Callable) -> Callable:
    """The function on one device, which has nobody to share with."""

    def of_one(*inputs):
        inputs = jax.tree.map(lambda x: jnp.asarray(x)[None], inputs)
        return jax.tree.map(lambda x: x[0], jax.vmap(function, axis_name=AXIS)(*inputs))

    return jax.jit(of_one)


def trained(algorithm: Algorithm, seed: jax.Array, updates: jax.Array) -> TrainState:
    return repeat(algorithm.update, algorithm.init(seed), updates)[0]


def compare(args: Args, env: Env, algorithm: Algorithm, old: Any, new: Any) -> dict[str, jax.Array]:
    """What the learner `new` makes of memories that `old` left, beside what it makes of its own."""
    start, inputs, kept, action = rollouts(args, env, algorithm, old)
    actor, params = Actor(args, env.observation_space, env.action_space), (old.params.actor, new.params.actor)
    (before, *_), (after, _, memory) = (actor.apply(one, inputs, start) for one in params)
    count = len(inputs.first) // args.segment
    segments = side_by_side(in_segments(inputs, count))
    at_starts = jax.tree.map(lambda x: x[:: args.segment].reshape(-1, *x.shape[2:]), kept)
    from_kept, *_ = actor.apply(new.params.actor, segments, at_starts)

    def by_segment(log_prob):
        return side_by_side(in_segments(log_prob, count))  # [K, S * N]

    own = by_segment(after.log_prob(action))
    difference = jnp.abs(from_kept.log_prob(side_by_side(in_segments(action, count))) - own)
    fresh = jax.tree.map(lambda first, x: jnp.concatenate([first[None], x[:-1]]), start, memory)
    return {
        "distance_of_memories": distance(kept, fresh),
        "log_ratio_of_the_update": jnp.mean(jnp.abs(own - by_segment(before.log_prob(action)))),
        "log_ratio_of_staleness": jnp.mean(difference),
        "log_ratio_at_first_step": jnp.mean(difference[0]),
        "log_ratio_at_last_step": jnp.mean(difference[-1]),
    }


def rollouts(args: Args, env: Env, algorithm: Algorithm, learner: Any) -> tuple[Any, Inputs, Any, jax.Array]:
    """Memories before the first step of several rollouts, what the actor gets [T, N, ...], memories before it, actions.

    Rollouts before them fill the memories.
    """

    def step(carry, key):
        env_state, seen, memory = carry
        act_key, env_key = jax.random.split(key)
        action, left = algorithm.act(learner, seen, memory, act_key)
        out = jax.vmap(env.step)(jax.random.split(env_key, args.num_envs), env_state, action)
        inputs = Inputs.of(seen, memory.action, normalize(learner.obs_stats, seen.obs))
        seen = Seen(out.obs, out.terminated | out.truncated, out.reward)
        return (out.state, seen, left), (inputs, memory.actor, action)

    obs, env_state = jax.vmap(env.reset)(jax.random.split(jax.random.key(1), args.num_envs))
    start = env_state, at_start(obs), algorithm.initial_memory(args.num_envs)
    keys = jax.random.split(jax.random.key(2), (2, ROLLOUTS * args.num_steps))
    start, _ = jax.lax.scan(step, start, keys[0])
    _, (inputs, kept, action) = jax.lax.scan(step, start, keys[1])
    return start[2].actor, inputs, kept, action


def distance(kept: Any, fresh: Any) -> jax.Array:
    """Of memories [T, N, H], relative to the length of the new ones."""
    kept, fresh = (jnp.concatenate(jax.tree.leaves(memory), axis=-1) for memory in (kept, fresh))
    return jnp.mean(jnp.linalg.norm(kept - fresh, axis=-1)) / jnp.mean(jnp.linalg.norm(fresh, axis=-1))


if __name__ == "__main__":
    sys.exit(main(lambda sizes: print(json.dumps(measure(sizes))), parse(Sizes)))
