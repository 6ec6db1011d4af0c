"""Members that play games against each other, or the agents of an environment together, while they train."""

from typing import Any

import jax
import numpy as np

from common.device.seeds import MEMBERS


def of_another_member(key: jax.Array, own: Any) -> Any:
    """What another member has in the place of its `own`, arrays of any shape; called for one of `MEMBERS`.

    Everyone gets that of the member so many places further on, the same number for all: nobody gets its own, and nobody
    is given to two. All numbers are equally likely, by the `key` of the first member.
    """
    count = jax.lax.axis_size(MEMBERS)
    step = jax.lax.all_gather(jax.random.randint(key, (), 1, count), MEMBERS)[0]
    other = (jax.lax.axis_index(MEMBERS) + step) % count
    return jax.tree.map(lambda x: jax.lax.all_gather(x, MEMBERS)[other], own)


def dealt(keys: jax.Array, agents: tuple[int, ...]) -> jax.Array:
    """Which components of actions [N, A] a member chooses itself, bool: those of half of the agents, rounded up.

    Which agents these are is drawn for each environment by its own of `keys` [N]. `agents` is `Env.agents`.
    """
    count = max(agents) + 1

    def own(key: jax.Array) -> jax.Array:
        return (jax.random.permutation(key, count) < (count + 1) // 2)[np.array(agents)]

    return jax.vmap(own)(keys)
