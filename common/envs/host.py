"""Environments that step on the host, several together. Whoever adds a suite of them gives a `HostEnvs`, as said here.

Suites reset their environments by themselves, in one of two ways:

- Within the step that ended an episode (`resets_in_step`): `obs` is the next episode's first observation, and
  `final_obs` has the last one of the old. Every step is valid.
- In a step of its own, which ignores the action: `obs` is the true next observation, always, and `final_obs` None. The
  step after an end is not `valid`; its `obs` is the next episode's first, its reward and ends mean nothing.

`terminated` says that an episode is over by its own rules: no value is bootstrapped. `truncated` says that a time limit
cut it: the value of the true next observation stands for the rest. Where both are true, it has terminated. Time limits
are the suite's, usually an argument of its `make`.

Arrays that `step` and `reset` return are the caller's: a suite that writes into them again has to return copies.
Observations are numbers, bytes or bools, images have their channels last, and actions come from the policy as it gives
them: `Conversion` in `host_spaces.py` does both from the suite's spaces. What `step` or `reset` raises ends that actor,
which makes new environments: FailedEnvError where something hangs and can be ended, anything else where it broke.

A complete module for a suite called pond, whose environments reset in the step that ends an episode:

    def ids():
        return import_package("pond", extra="pond").registered()

    trainable = ids

    def make(name, env_id, options):
        check_known(name, env_id, ids())
        pond = import_package("pond", extra="pond")
        return PondEnvs(name, pond.create(env_id, options.num_envs, seed=options.seed, **options.env_params))

    class PondEnvs:
        resets_in_step = True

        def __init__(self, name, inner):
            self._inner, self.num_envs = inner, inner.num_envs
            self._conversion = Conversion(name, inner.observation_space, inner.action_space)
            self.spec = self._conversion.spec

        def reset(self):
            return self._conversion.observations(self._inner.reset())

        def step(self, action):
            out, all_valid = self._inner.step(self._conversion.actions(action)), np.ones(self.num_envs, bool)
            obs, final_obs = map(self._conversion.observations, (out.obs, out.last_obs))
            return HostStep(obs, out.reward.astype(np.float32), out.done, out.timeout, all_valid, final_obs)

        def close(self):
            self._inner.close()

        def kill(self):
            self._inner.kill_processes()
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from common.envs.spaces import is_number
from common.envs.spec import EnvSpec

Vectorization = Literal["async", "sync", "vector"]


class HostOptions(NamedTuple):
    """What a suite's `make` is asked for. One that steps several in its own way ignores what says how."""

    num_envs: int
    seed: int
    env_params: dict[str, Any]  # arguments for the suite's own function that makes environments
    vectorization: Vectorization = "async"  # a process for each, all in this thread, or the suite's implementation
    reset_timeout: float | None = None  # seconds after which processes that do not answer raise FailedEnvError
    step_timeout: float | None = None
    frames: bool = False  # whether `frame` will be asked for
    resets_in_step: bool = False  # whether they have to reset within a step that ends an episode


class HostStep(NamedTuple):
    """What one step of N environments returns."""

    obs: Any  # [N, ...] what to act on next: an array, or a dictionary or tuple of such
    reward: np.ndarray  # [N] float32
    terminated: np.ndarray  # [N] bool: the episode is over, nothing follows
    truncated: np.ndarray  # [N] bool: a time limit, the episode would go on
    valid: np.ndarray  # [N] bool: False where the environment only reset itself and ignored the action
    final_obs: Any  # [N, ...] the true next observation; None where that is `obs`, as without resets
    info: Mapping[str, Any] = {}  # as gymnasium's: entries [N], where _ENTRY is true; final_info has those of an end

    def numbers(self, entry: str) -> np.ndarray:
        """Those that are finite and that the info of a valid step has as this entry: at most N."""
        over, final = self.terminated | self.truncated, self.info.get("final_info", self.info)
        found = []
        for info, where in ((self.info, ~over), (final, over)):
            there = self.valid & where & info.get(f"_{entry}", True)
            found += [x for x, told in zip(info.get(entry, ()), there, strict=False) if told and is_number(x)]
        return np.array([x for x in found if np.isfinite(x)], float)


class HostEnvs(Protocol):
    """N environments of one kind, see the module's text."""

    spec: EnvSpec
    num_envs: int
    resets_in_step: bool  # an episode's end and the next one's start come in the same step, with `final_obs`

    def reset(self) -> Any:
        """Begin new episodes everywhere; returns the first observations [N, ...]. Only the first call uses the seed."""

    def step(self, action: np.ndarray) -> HostStep:
        """Act everywhere, with actions [N, ...] as the policy gives them; those of a Box are clipped here."""

    def frame(self) -> np.ndarray:
        """A picture [H, W, 3], in bytes, of the first environment. A suite may lack it, or raise any error."""

    def close(self) -> None:
        """End threads and processes, also those that hang."""

    def kill(self) -> None:
        """End processes at once, from another thread while one of the above may go on. Does nothing without any."""
