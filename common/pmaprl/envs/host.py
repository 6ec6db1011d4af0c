"""Environments that step on the host, several together, and the contract of their suites.

A suite's class has the methods of `HostEnvs`. Suites reset their environments by themselves, in one
of two ways:

- Within the step that ended an episode (`resets_in_step`): `obs` is the next episode's first
  observation, and `final_obs` has the last one of the old. Every step is valid.
- In a step of its own, which ignores the action: `obs` is always the true next observation, and
  `final_obs` None. The step after an end is not `valid`; its `obs` is the next episode's first, its
  reward and ends mean nothing.

Ends are as in `environment.py`; time limits are the suite's. Arrays that `step` and `reset` return
are the caller's: a suite that writes into them again has to return copies. Images have their
channels last, and actions come from the policy as it gives them:
`common/pmaprl/suites/tools/conversion.py` does both from the suite's spaces. If `step` or `reset`
raises an error, the actor makes new environments: FailedEnvError means that something hangs and can
be ended, any other error that it broke. `common/pmaprl/suites/envpool.py` shows both ways.
"""

import json
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from pmaprl.cli.env_flags import read_params
from pmaprl.envs.spaces import EnvSpec
from pmaprl.envs.suite_params import is_number


class HostOptions(NamedTuple):
    """Options for creating host environments.

    Suites that vectorize themselves ignore `vectorization`.
    """

    num_envs: int
    seed: int
    env_params: dict[str, Any]  # arguments for the suite's own function that makes environments
    # A process for each environment, all in this thread, or the suite's own way
    vectorization: Literal["async", "sync", "vector"] = "async"
    # Seconds after which processes that do not answer raise FailedEnvError
    reset_timeout: float | None = None
    step_timeout: float | None = None
    frames: bool = False  # True: `frame` will be called
    resets_in_step: bool = False  # True: reset within the step that ends an episode


class HostStep(NamedTuple):
    """One step of N environments."""

    obs: Any  # [N, ...] input of the next action: an array, or a dictionary or tuple of arrays
    reward: np.ndarray  # [N] float32
    terminated: np.ndarray  # [N] bool: the episode is over, nothing follows
    truncated: np.ndarray  # [N] bool: a time limit, the episode would go on
    # [N] bool: False where the environment only reset itself and ignored the action
    valid: np.ndarray
    # [N, ...] the true next observation; None if that is `obs`, as without resets
    final_obs: Any
    # As in gymnasium: entries [N] that count where _ENTRY is true; final_info has those of ends
    info: Mapping[str, Any] = {}

    def numbers(self, entry: str) -> np.ndarray:
        """The finite values of `entry` in the infos of valid steps (at most N)."""
        goes_on = self._numbers_in(self.info, entry, ~self.ended)
        at_end = self._numbers_in(self.info.get("final_info", self.info), entry, self.ended)
        return np.array(goes_on + at_end, float)

    def _numbers_in(self, info: Any, entry: str, counts: np.ndarray) -> list[Any]:
        """The finite values of `entry` in an info, of valid steps for which it `counts` [N]."""
        values = info.get(entry, ()) if isinstance(info, Mapping) else ()
        if np.shape(values)[:1] != np.shape(counts):
            return []  # no environment has the entry, or it is not of each environment
        counts = self.valid & counts & info.get(f"_{entry}", True)
        numbers = [x for x, is_set in zip(values, counts, strict=True) if is_set and is_number(x)]
        return [number for number in numbers if np.isfinite(number)]

    @property
    def ended(self) -> np.ndarray:
        """[N] bool: an episode has ended."""
        return (self.terminated | self.truncated) & self.valid


def begins(step: Any) -> Any:
    """Mark where the next step is the first of an episode.

    A suite that resets in a step of its own, which is not valid, shows the last observation once
    more before it.

    Args:
        step: a `HostStep` [N], or a rollout [T, N], which has the same fields.
    """
    if step.final_obs is None:
        return ~step.valid
    return step.terminated | step.truncated


class SteppedEnvs(Protocol):
    """N environments of one kind, as far as a worker needs them to play episodes."""

    spec: EnvSpec
    num_envs: int
    # An episode's end and the next one's start come in the same step, with `final_obs`
    resets_in_step: bool

    def reset(self) -> Any:
        """Begin new episodes everywhere. Only the first call uses the seed.

        Returns:
            The first observations [N, ...].
        """
        raise NotImplementedError

    def step(self, action: np.ndarray) -> HostStep:
        """Step all environments.

        Args:
            action: actions [N, ...] as the policy gives them; those of a Box are clipped here.
        """
        raise NotImplementedError

    def close(self) -> None:
        """End threads and processes, also those that hang."""

    def kill(self) -> None:
        """End processes at once, if there are any.

        Another thread may call it while one of the other methods is under way.
        """


class HostEnvs(SteppedEnvs, Protocol):
    """Environments of a suite; the text of the module has the contract."""

    def reseed(self, seed: int) -> bool:
        """Let the next reset begin as that of environments made with this `seed`.

        Returns:
            False if only new environments begin so.
        """
        raise NotImplementedError

    def frame(self) -> np.ndarray:
        """Draw the first environment, [H, W, 3] in bytes. A suite may lack it, or raise errors."""
        raise NotImplementedError

    @property
    def obs_names(self) -> tuple[str, ...]:
        """Names of an observation's numbers, or of a map's channels. A suite may lack it."""
        raise NotImplementedError


# Envpool's and ALE's names of parameters that make learning Atari easier, and can be off
ATARI_AIDS = ("reward_clip", "reward_clipping", "episodic_life")


def evaluation_params(flags: Mapping[str, Any]) -> str:
    """Parameters of the environments in evaluations of a run with these `flags`, a JSON object.

    Parameters that make learning Atari easier are off: scores are those of whole games, with
    unclipped rewards. --eval-env-params has priority.

    Raises:
        UsageError: flags are no JSON objects.
    """
    trained = read_params(flags.get("env_params", ""))
    aids = {aid for aid in ATARI_AIDS if aid in trained}
    if flags.get("vectorization") == "vector" and "ALE/" in flags["env"]:
        aids.add("reward_clipping")  # on by default
    changed = read_params(flags.get("eval_env_params", ""), flag="--eval-env-params")
    params = trained | dict.fromkeys(sorted(aids), False) | changed
    if params == trained:
        return flags.get("env_params", "")
    return json.dumps(params)
