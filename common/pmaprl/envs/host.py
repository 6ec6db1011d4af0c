"""Environments that step on the host, several together. A suite's class has the methods of
`HostEnvs`, as said here.

Suites reset their environments by themselves, in one of two ways:

- Within the step that ended an episode (`resets_in_step`): `obs` is the next episode's first
  observation, and `final_obs` has the last one of the old. Every step is valid.
- In a step of its own, which ignores the action: `obs` is the true next observation, always, and
  `final_obs` None. The step after an end is not `valid`; its `obs` is the next episode's first, its
  reward and ends mean nothing.

Ends are as in `environment.py`; time limits are the suite's. Arrays that `step` and `reset` return
are the caller's: a suite that writes into them again has to return copies. Images have their
channels last, and actions come from the policy as it gives them:
`common/pmaprl/suites/tools/conversion.py` does both from the suite's spaces. Where `step` or
`reset` raises, the actor makes new environments: FailedEnvError where something hangs and can be
ended, anything else where it broke. `common/pmaprl/suites/envpool.py` is an example of both ways.
"""

import json
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from pmaprl.cli.env_flags import read_params
from pmaprl.envs.spaces import EnvSpec
from pmaprl.envs.suite_tools import is_number


class HostOptions(NamedTuple):
    """What a suite is asked for. One that steps several in its own way ignores what says how."""

    num_envs: int
    seed: int
    env_params: dict[str, Any]  # arguments for the suite's own function that makes environments
    # A process each, all in this thread, the suite's own
    vectorization: Literal["async", "sync", "vector"] = "async"
    # Seconds after which processes that do not answer raise FailedEnvError
    reset_timeout: float | None = None
    step_timeout: float | None = None
    frames: bool = False  # whether `frame` will be asked for
    resets_in_step: bool = False  # whether they have to reset within a step that ends an episode


class HostStep(NamedTuple):
    """What one step of N environments returns."""

    obs: Any  # [N, ...] what to act on next: an array, or a dictionary or tuple of such
    reward: np.ndarray  # [N] float32
    terminated: np.ndarray  # [N] bool: the episode is over, nothing follows
    truncated: np.ndarray  # [N] bool: a time limit, the episode would go on
    # [N] bool: False where the environment only reset itself and ignored the action
    valid: np.ndarray
    # [N, ...] the true next observation; None where that is `obs`, as without resets
    final_obs: Any
    # As gymnasium's: entries [N], where _ENTRY is true; final_info has those of an end
    info: Mapping[str, Any] = {}

    def numbers(self, entry: str) -> np.ndarray:
        """Those that are finite and that the info of a valid step has as this entry: at most N."""
        found = []
        for info, where in (
            (self.info, ~self.ended),
            (self.info.get("final_info", self.info), self.ended),
        ):
            values = info.get(entry, ()) if isinstance(info, Mapping) else ()
            # Nobody has told it, or it is not of each environment
            if np.shape(where) != np.shape(values)[:1]:
                continue
            there = self.valid & where & info.get(f"_{entry}", True)
            found += [x for x, told in zip(values, there, strict=True) if told and is_number(x)]
        return np.array([x for x in found if np.isfinite(x)], float)

    @property
    def ended(self) -> np.ndarray:
        """[N] bool: an episode has ended."""
        return (self.terminated | self.truncated) & self.valid


def begins(step: Any) -> Any:
    """Where the next step is the first of an episode: [N] of a `HostStep`, [T, N] of a rollout,
    which has its fields.

    A suite that resets in a step of its own, which is not valid, shows the last observation once
    more in that.
    """
    return ~step.valid if step.final_obs is None else step.terminated | step.truncated


class HostEnvs(Protocol):
    """N environments of one kind, see the module's text."""

    spec: EnvSpec
    num_envs: int
    # An episode's end and the next one's start come in the same step, with `final_obs`
    resets_in_step: bool

    def reset(self) -> Any:
        """Begin new episodes everywhere; returns the first observations [N, ...]. Only the first
        call uses the seed.
        """

    def reseed(self, seed: int) -> bool:
        """Let the next reset begin as that of environments made with this `seed`; False where only
        making them does.
        """

    def step(self, action: np.ndarray) -> HostStep:
        """Act everywhere, with actions [N, ...] as the policy gives them; those of a Box are
        clipped here.
        """

    def frame(self) -> np.ndarray:
        """A picture [H, W, 3], in bytes, of the first environment. A suite may lack it, or raise
        any error.
        """

    @property
    def obs_names(self) -> tuple[str, ...]:
        """Names of the numbers of an observation, or of a map's channels, for pictures. A suite may
        lack it.
        """

    def close(self) -> None:
        """End threads and processes, also those that hang."""

    def kill(self) -> None:
        """End processes at once, from another thread while one of the above may go on. Does nothing
        without any.
        """


# Envpool's names and ALE's, all of which can be off
ATARI_AIDS = ("reward_clip", "reward_clipping", "episodic_life")


def evaluation_params(flags: Mapping[str, Any]) -> str:
    """The arguments of a suite's `make`, a JSON object, in evaluations of a run with these `flags`.

    What makes learning Atari easier is off: scores are those of whole games, with rewards as they
    are. What --eval-env-params says comes before that. Raises UsageError where flags are no JSON
    objects.
    """
    trained = read_params(flags.get("env_params", ""))
    aids = {aid for aid in ATARI_AIDS if aid in trained}
    if flags.get("vectorization") == "vector" and "ALE/" in flags["env"]:
        aids.add("reward_clipping")  # which is on where nothing is said
    changed = read_params(flags.get("eval_env_params", ""), flag="--eval-env-params")
    params = trained | dict.fromkeys(sorted(aids), False) | changed
    return flags.get("env_params", "") if params == trained else json.dumps(params)
