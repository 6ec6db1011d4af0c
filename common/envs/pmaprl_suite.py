"""Environments of this kit: `pmaprl:PartialCartPole-v1`, `pmaprl:ConnectFour-v0`."""

from typing import Any

from common.envs import partly_observed
from common.envs.connect_four import ConnectFour
from common.envs.environment import Env
from common.envs.usage import changed_params, check_known


def ids() -> list[str]:
    return [*partly_observed.PARTIAL, "ConnectFour-v0"]


trainable = ids


def make(name: str, env_id: str, env_params: dict[str, Any]) -> Env:
    check_known(name, env_id, ids())
    if env_id in partly_observed.PARTIAL:
        return partly_observed.make(name, env_id, env_params)
    return ConnectFour(name, **changed_params(name, {"show_mask": True}, env_params))
