"""gymnax's own environments: `CartPole-v1`, or `gymnax:CartPole-v1`."""

import importlib
import sys
from types import ModuleType
from typing import Any

from common.envs.custom import adapt
from common.envs.environment import Env
from common.envs.suite_tools import check_known


def ids() -> list[str]:
    return list(_import_gymnax().registered_envs)


def make(name: str, env_id: str, env_params: dict[str, Any]) -> Env:
    check_known(name, env_id, ids())
    env = adapt(name, *_import_gymnax().make(env_id), env_params)
    env.cheap_reset = True
    return env


class _OnFirstUse(ModuleType):
    """Stands in for a module and imports it when one of its attributes is used."""

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self.__name__), attribute)


def _import_gymnax() -> ModuleType:
    """Import gymnax without the modules that it needs for pictures only: they take most of the time."""
    for name in {"seaborn", "matplotlib.pyplot"} - sys.modules.keys():
        sys.modules[name] = _OnFirstUse(name)
    try:
        return importlib.import_module("gymnax")
    finally:
        for name in [name for name, module in sys.modules.items() if isinstance(module, _OnFirstUse)]:
            del sys.modules[name]
