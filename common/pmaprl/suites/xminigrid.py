"""xminigrid's worlds: `xminigrid:MiniGrid-DoorKey-6x6`.

XLand's worlds need a file of rules, which xminigrid downloads.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pmaprl.cli.errors import UsageError
from pmaprl.envs.environment import Env, Step
from pmaprl.envs.foreign_code import import_package, readable_errors
from pmaprl.envs.spaces import Discrete, MultiDiscrete
from pmaprl.envs.suite_params import changed_params
from pmaprl.suites.tools.planes import planes, space_of_planes

COUNTS = 13, 12  # numbers of codes for things, and for colours
ENCODINGS = 16  # number of codes in goals and rules
NUMBERS = "max_steps", "view_size", "height", "width"  # parameters that are numbers


def ids() -> list[str]:
    return list(import_package("xminigrid").registered_environments())


class SuiteEnv(Env):
    """One of xminigrid's worlds, whose states are its time steps.

    In XLand every episode has other rules, which are observed.
    """

    def __init__(self, name: str, env_id: str, env_params: dict[str, Any]):
        xminigrid = import_package("xminigrid")
        needs_rules = env_id.startswith("XLand")
        inner, params = xminigrid.make(env_id)
        known = {number: getattr(params, number) for number in NUMBERS}
        if needs_rules:
            known["benchmark"] = ""
        changes = changed_params(name, known, env_params)
        self._rules: Any = None  # of XLand's worlds
        if needs_rules:
            self._rules = _rules(name, changes.pop("benchmark", ""))
        defaults = xminigrid.registration._REGISTRY[env_id].kwargs
        # Made anew, because the time limit follows from the size
        params = inner.default_params(**defaults | changes)
        self.params = params
        smallest = min(params.view_size, params.height - 2, params.width - 2)
        if params.view_size % 2 == 0 or smallest < 3:
            raise UsageError(
                f"{name} needs an odd view_size of at least 3, and a height and width of at least 5"
            )
        observations = space_of_planes(inner.observation_shape(params), COUNTS)
        if self._rules is not None:
            observations = {
                "goal": _space_of_codes(self._rules.goals[0]),
                "rules": _space_of_codes(self._rules.rules[0]),
                "view": observations,
            }
        actions = Discrete(inner.num_actions(params))
        super().__init__(name, inner, observations, actions, params.max_steps)

    def begin(self, key: jax.Array) -> tuple[Any, Any]:
        params = self.params
        if self._rules is not None:
            key, rules_key = jax.random.split(key)
            params = params.replace(ruleset=self._rules.sample_ruleset(rules_key))
        step = self.inner.reset(params, key)
        return self._observed(step), step

    def advance(self, key: jax.Array, state: Any, action: jax.Array) -> Step:
        step = self.inner.step(self.params, state, action)
        terminated = step.last() & (step.discount == 0)
        return Step(
            obs=self._observed(step),
            state=step,
            reward=step.reward,
            terminated=terminated,
            truncated=step.last() & ~terminated,
        )

    def frame(self, state: Any) -> np.ndarray:
        return np.asarray(self.inner.render(self.params, state))

    def _observed(self, step: Any) -> Any:
        view = planes(step.observation, COUNTS)
        if self._rules is None:
            return view
        goal = jnp.ravel(step.state.goal_encoding).astype(jnp.int32)
        rules = jnp.ravel(step.state.rule_encoding).astype(jnp.int32)
        return {"goal": goal, "rules": rules, "view": view}


def _space_of_codes(encoding: Any) -> MultiDiscrete:
    """The space of an encoded goal, or of encoded rules."""
    return MultiDiscrete((ENCODINGS,) * int(encoding.size))


def _rules(name: str, benchmark: str) -> Any:
    """Read the rules of a `benchmark` from its file, or download them."""
    module = import_package("xminigrid").benchmarks
    known = module.registered_benchmarks()
    where = f"huggingface.co/datasets/{module.HF_REPO_ID} to {module.DATA_PATH}"
    if benchmark not in known:
        alternatives = ", ".join(known[1:])
        raise UsageError(
            f'{name} needs rules: --env-params \'{{"benchmark": "{known[0]}"}}\', or '
            f"{alternatives}; they are downloaded from {where}. MiniGrid ids need nothing"
        )
    with readable_errors(f"{name} cannot get the rules {benchmark} from {where}"):
        return jax.tree.map(np.asarray, module.load_benchmark(benchmark))
