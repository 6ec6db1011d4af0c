"""Members that play games against each other while they train."""

from typing import Any

import jax

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
