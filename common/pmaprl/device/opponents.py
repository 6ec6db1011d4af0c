"""Who else acts in an environment: past policies in self-play, other members of a population as
opponents or teammates.

An opponent is a part of the environment, see `Env.against`; a teammate chooses some components of
every action.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pmaprl.device.agents import acting_part, with_acting_part
from pmaprl.device.interface import RunState
from pmaprl.device.sharding import MEMBERS
from pmaprl.envs.environment import select

PAST = 8  # policies that self-play draws from


def init_pool(args: Any, learner: Any) -> Any:
    """The past policies [P, ...] before the first update; () where there is no self-play."""
    part = acting_part(learner) if args.opponent == "self" else ()
    return jax.tree.map(lambda x: jnp.stack([x] * PAST), part)


def update_pool(args: Any, run: RunState, learner: Any) -> Any:
    """The past policies [P, ...]; every --opponent-interval updates that of now is the newest of
    them.
    """
    if args.opponent != "self":
        return ()
    turn, late = jnp.divmod(run.updates, args.opponent_interval)
    # All of them at first
    replaced = (jnp.arange(PAST) == turn % PAST) & (late == 0) | (run.updates == 0)
    return jax.vmap(select, (0, None, 0))(replaced, acting_part(learner), run.opponent_pool)


def sample_opponent(args: Any, run: RunState, learner: Any, key: jax.Array) -> Any:
    """Who else acts in this update, as a learner: another member, or in self-play a past policy;
    None is nobody.
    """
    if args.opponent == "random":
        return None
    if args.opponent == "members":
        part = of_other_member(key, acting_part(learner))
    else:
        chosen = jax.random.randint(key, (), 0, PAST)
        part = jax.tree.map(lambda x: x[chosen], run.opponent_pool)
    return with_acting_part(learner, part)


def of_other_member(key: jax.Array, own: Any) -> Any:
    """What another member has in the place of its `own`, arrays of any shape; called for one of
    `MEMBERS`.

    Everyone gets that of the member so many places further on, the same number for all: nobody gets
    its own, and nobody is given to two. All numbers are equally likely, by the `key` of the first
    member.
    """
    count = jax.lax.axis_size(MEMBERS)
    step = jax.lax.all_gather(jax.random.randint(key, (), 1, count), MEMBERS)[0]
    other = (jax.lax.axis_index(MEMBERS) + step) % count
    return jax.tree.map(lambda x: jax.lax.all_gather(x, MEMBERS)[other], own)


def draw_own_components(keys: jax.Array, agents: tuple[int, ...]) -> jax.Array:
    """Which components of actions [N, A] a member chooses itself, bool: those of half of the
    agents, rounded up.

    Which agents these are is drawn for each environment by its own of `keys` [N]. `agents` is
    `Env.agents`.
    """
    count = max(agents) + 1
    order = jax.vmap(jax.random.permutation, (0, None))(keys, count)  # [N, agents]
    return (order < (count + 1) // 2)[:, np.array(agents)]
