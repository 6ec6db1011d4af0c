"""The agents that are trained together."""

from typing import Any, NamedTuple


class Members(NamedTuple):
    """What agents begin from, an entry for each."""

    seed: Any  # list or array of whole numbers
    hyper: dict[str, Any]  # lists or arrays of the flags in which they differ
