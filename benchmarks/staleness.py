"""How old the memories are with which segments begin, in PPO with memory; prints one line of JSON.

    python benchmarks/staleness.py --bptt-length 16
    python benchmarks/staleness.py --env MemoryChain-bsuite --bptt-length 32

With --bptt-length a segment learns from the memory that the actor had at its start: by the parameters of the rollout,
and at the rollout's own start by those of the one before. After some training this acts through several rollouts with
one policy and through one more with the next, and then lets the policy after that go through the segments of the last
rollout twice: from the memories that were kept, and from those that it would have had itself. That is how things stand
at the end of an update. All numbers are means over seeds.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np

from algos.ppo_rnn_pmap import Actor, Args, make_ppo_rnn
from common.cli.checks import Bounds, Count, check_flags
from common.cli.command import main, parse
from common.device.memory import Seen, at_start
from common.device.programs import Algorithm
from common.device.sampling import in_segments, side_by_side
from common.device.sharding import AXIS
from common.device.update_loop import repeat
from common.envs.environment import Env
from common.envs.registry import make
from common.nets.normalizers import normalize
from common.nets.recurrent import Inputs
from common.runs.directory import versions

BURN_IN = 4  # rollouts before the one that is looked at
ENVS = 256  # that act in them


@dataclass
class Sizes:
    """What to measure."""

    env: str = "pmaprl:PartialCartPole-v1"
    bptt_length: int = 16
    num_steps: int = 128
    learning_rate: float = Args.learning_rate
    rnn: Literal["gru", "lstm"] = "gru"
    updates: Annotated[int, Bounds(at_least=2)] = 20
    """Updates before the measure, two at least."""
    seeds: Count = 5

    def __post_init__(self):
        check_flags(self)


def measure(sizes: Sizes) -> dict[str, Any]:
    """The record of these sizes."""
    flags = {name: value for name, value in vars(sizes).items() if name not in ("updates", "seeds")}
    args = Args(**flags, total_timesteps=10**9)  # so long that the learning rate stays
    env = make(args.env)
    algorithm = make_ppo_rnn(args, env)
    train, compare_all = alone(partial(three_learners, algorithm)), jax.jit(partial(compare, args, env, algorithm))
    found = [jax.device_get(compare_all(*train(seed, sizes.updates))) for seed in range(sizes.seeds)]
    return {
        "benchmark": "staleness",
        "versions": versions(),
        "sizes": vars(sizes),
        **{name: float(f"{np.mean([one[name] for one in found]):.3g}") for name in found[0]},
    }


def alone(function: Callable) -> Callable:
    """The function on one device, which has nobody to share with."""

    def of_one(*inputs):
        inputs = jax.tree.map(lambda x: jnp.asarray(x)[None], inputs)
        return jax.tree.map(lambda x: x[0], jax.vmap(function, axis_name=AXIS)(*inputs))

    return jax.jit(of_one)


def three_learners(algorithm: Algorithm, seed: jax.Array, updates: jax.Array) -> list[Any]:
    """The learner before the last but one of these updates, before the last one, and after it."""
    states = [repeat(algorithm.update, algorithm.init(seed), updates - 2)[0]]
    for _ in range(2):
        states.append(repeat(algorithm.update, states[-1], 1)[0])
    return [state.learner for state in states]


def compare(args: Args, env: Env, algorithm: Algorithm, older: Any, old: Any, new: Any) -> dict[str, jax.Array]:
    """What the learner `new` makes of memories that `old` left, and `older` before, beside what it makes of its own."""
    actor, steps = Actor(args, env.observation_space, env.action_space), args.num_steps
    obs, env_state = jax.vmap(env.reset)(jax.random.split(jax.random.key(1), ENVS))
    start = env_state, at_start(obs), algorithm.initial_memory(ENVS)
    keys = jax.random.split(jax.random.key(2), (BURN_IN + 1, steps))
    middle, (inputs_before, *_) = act(env, algorithm, older, start, keys[:-1].reshape(-1))
    _, (inputs, kept, action) = act(env, algorithm, old, middle, keys[-1])

    of_new = partial(actor.apply, new.params.actor)
    _, _, burnt_in = of_new(inputs_before, start[2].actor)
    own_start = jax.tree.map(lambda x: x[-1], burnt_in)
    policy, _, memory = of_new(inputs, own_start)
    own = jax.tree.map(lambda first, x: jnp.concatenate([first[None], x[:-1]]), own_start, memory)  # before each step

    def by_segment(tree):
        return side_by_side(in_segments(tree, steps // args.segment))  # [K, S * N, ...]

    at_starts = jax.tree.map(lambda x: x[:: args.segment].reshape(-1, *x.shape[2:]), kept)
    from_kept, *_ = of_new(by_segment(inputs), at_starts)
    log_prob = by_segment(policy.log_prob(action))
    difference = jnp.abs(from_kept.log_prob(by_segment(action)) - log_prob)
    before, *_ = actor.apply(old.params.actor, inputs, middle[2].actor)
    return {
        "distance_of_memories": distance(kept, own),
        "log_ratio_of_the_update": jnp.mean(jnp.abs(log_prob - by_segment(before.log_prob(action)))),
        "log_ratio_of_staleness": jnp.mean(difference),
        "log_ratio_at_first_step": jnp.mean(difference[0]),
        "log_ratio_at_last_step": jnp.mean(difference[-1]),
    }


def act(env: Env, algorithm: Algorithm, learner: Any, start: tuple, keys: jax.Array) -> tuple[tuple, tuple]:
    """Where the environments come to, and what the actor got, remembered and did at each step [T, N, ...]."""

    def step(carry, key):
        env_state, seen, memory = carry
        act_key, env_key = jax.random.split(key)
        action, left = algorithm.act(learner, seen, memory, act_key)
        out = jax.vmap(env.step)(jax.random.split(env_key, ENVS), env_state, action)
        inputs = Inputs.of(seen, memory.action, normalize(learner.obs_stats, seen.obs))
        seen = Seen(out.obs, out.terminated | out.truncated, out.reward)
        return (out.state, seen, left), (inputs, memory.actor, action)

    return jax.lax.scan(step, start, keys)


def distance(kept: Any, own: Any) -> jax.Array:
    """Of memories [T, N, H], relative to the length of the new policy's own."""
    kept, own = (jnp.concatenate(jax.tree.leaves(memory), axis=-1) for memory in (kept, own))
    return jnp.mean(jnp.linalg.norm(kept - own, axis=-1)) / jnp.mean(jnp.linalg.norm(own, axis=-1))


if __name__ == "__main__":
    sys.exit(main(lambda sizes: print(json.dumps(measure(sizes))), parse(Sizes)))
