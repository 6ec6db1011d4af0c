"""Other policies that act in an environment: past ones in self-play, members of a population.

An opponent is a part of the environment, see `Env.against`. A teammate chooses some components of
every action.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pmaprl.device.agents import acting_part, with_acting_part
from pmaprl.device.interface import RunState
from pmaprl.device.sharding import MEMBERS
from pmaprl.envs.environment import select

PAST = 8  # policies that self-play draws from


def init_pool(args: Any, learner: Any) -> Any:
    """Make the opponent pool [P, ...] before the first update; () without self-play."""
    part = acting_part(learner) if args.opponent == "self" else ()
    return jax.tree.map(lambda x: jnp.stack([x] * PAST), part)


def update_pool(
    args: Any,
    run: RunState,
    learner: Any,
) -> Any:
    """Replace the oldest policy of the opponent pool by the current one, if it is time.

    It is time every --opponent-interval updates. Before the first update the current policy
    replaces all.

    Args:
        args: flags.
        run: has the opponent pool [P, ...] and the number of updates.
        learner: the current learner.

    Returns:
        The opponent pool [P, ...]; () without self-play.
    """
    if args.opponent != "self":
        return ()
    turn, remainder = jnp.divmod(run.updates, args.opponent_interval)
    is_oldest = jnp.arange(PAST) == turn % PAST
    replaced = is_oldest & (remainder == 0) | (run.updates == 0)
    choose = jax.vmap(select, (0, None, 0))
    return choose(replaced, acting_part(learner), run.opponent_pool)


def sample_opponent(
    args: Any,
    run: RunState,
    learner: Any,
    key: Array,
) -> Any:
    """Draw the opponent or teammate of this update.

    Returns:
        A learner: that of another member, or in self-play one with a past policy. None: nobody.
    """
    if args.opponent == "random":
        return None
    part = acting_part(learner)
    if args.opponent == "members":
        part = of_other_member(key, part)
    else:
        chosen = jax.random.randint(key, (), 0, PAST)
        part = jax.tree.map(lambda x: x[chosen], run.opponent_pool)
    return with_acting_part(learner, part)


def of_other_member(key: Array, value: Any) -> Any:
    """Take the value of another member, inside `over_seeds`.

    Members are paired by one random cyclic shift, drawn by the `key` of the first member. So nobody
    meets itself, and each is met once.

    Args:
        key: random key of this member.
        value: this member's value, a tree of arrays.

    Returns:
        The other member's value.
    """
    count = jax.lax.axis_size(MEMBERS)
    drawn = jax.random.randint(key, (), 1, count)
    shift = jax.lax.all_gather(drawn, MEMBERS)[0]
    other = (jax.lax.axis_index(MEMBERS) + shift) % count
    return jax.tree.map(lambda x: jax.lax.all_gather(x, MEMBERS)[other], value)


def deal_components(keys: Array, agents: tuple[int, ...]) -> Array:
    """Draw the components of actions that a member chooses itself in a team.

    It chooses for half of the agents, rounded up, which are drawn for each environment.

    Args:
        keys: [N] keys, one for each environment.
        agents: [A] the agent that owns each component, `Env.agents`.

    Returns:
        [N, A] bool.
    """
    count = max(agents) + 1
    order = jax.vmap(jax.random.permutation, (0, None))(keys, count)  # [N, agents]
    is_own = order < (count + 1) // 2
    return is_own[:, np.array(agents)]
