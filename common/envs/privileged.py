"""What critics see and policies do not: the entry `privileged_state` of observations that are dictionaries."""

from common.envs.spaces import Dict, Space

PRIVILEGED = "privileged_state"


def has_privileged(space: Space) -> bool:
    return isinstance(space, Dict) and PRIVILEGED in space.parts


def for_policies(space: Space) -> Space:
    """The part of an observation space that policies see."""
    if not has_privileged(space):
        return space
    return Dict({name: part for name, part in space.parts.items() if name != PRIVILEGED})
