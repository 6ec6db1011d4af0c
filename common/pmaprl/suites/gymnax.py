"""gymnax's own environments: `CartPole-v1`, or `gymnax:CartPole-v1`."""

import importlib
import sys
from types import ModuleType
from typing import Any

from pmaprl.envs.custom import GymnaxStyleEnv, has_own_step, replaced
from pmaprl.suites.tools.observed import OBS_NAMES


def ids() -> list[str]:
    return list(_import_gymnax().registered_envs)


class SuiteEnv(GymnaxStyleEnv):
    """One of gymnax's environments."""

    cheap_reset = True

    def __init__(self, name: str, env_id: str, env_params: dict[str, Any]):
        inner, params = _import_gymnax().make(env_id)
        params = replaced(name, params, env_params)
        super().__init__(name, inner, params, resets_itself=has_own_step(inner))
        self.obs_names = OBS_NAMES.get(env_id, ())


class _OnFirstUse(ModuleType):
    """Placeholder of a module, which is imported when one of its attributes is used."""

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self.__name__), attribute)


def _import_gymnax() -> ModuleType:
    """Import gymnax without the modules for pictures, which take most of the time."""
    for name in {"seaborn", "matplotlib.pyplot"} - sys.modules.keys():
        sys.modules[name] = _OnFirstUse(name)
    try:
        return importlib.import_module("gymnax")
    finally:
        for name, module in list(sys.modules.items()):
            if isinstance(module, _OnFirstUse):
                del sys.modules[name]
