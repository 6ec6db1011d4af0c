"""Environments of this kit: `pmaprl:PartialCartPole-v1`, `pmaprl:ConnectFour-v0`."""

from typing import Any

from common.envs import partial
from common.envs.connect_four import ConnectFour
from common.envs.environment import Env
from common.envs.usage import check_known


def ids() -> list[str]:
    return [*partial.PARTIAL, "ConnectFour-v0"]


trainable = ids


def make(name: str, env_id: str, env_params: dict[str, Any]) -> Env:
    check_known(name, env_id, ids())
    if env_id in partial.PARTIAL:
        return partial.make(name, env_id, env_params)
    return ConnectFour(name, **env_params)
