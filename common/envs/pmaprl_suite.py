"""Environments of this kit: `pmaprl:PartialCartPole-v1`, `pmaprl:Reversi-v0`."""

from typing import Any

from common.envs import partly_observed
from common.envs.environment import Env
from common.envs.reversi import Reversi
from common.envs.usage import changed_params, check_known


def ids() -> list[str]:
    return [*partly_observed.IDS, "Reversi-v0"]


trainable = ids


def make(name: str, env_id: str, env_params: dict[str, Any]) -> Env:
    check_known(name, env_id, ids())
    if env_id in partly_observed.IDS:
        return partly_observed.make(name, env_id, env_params)
    return Reversi(name, **changed_params(name, {"show_mask": True}, env_params))
