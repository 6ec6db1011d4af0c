"""One actor: environments on the host, stepped with a policy on a device, one rollout at a time.

Independent of the algorithm: `act` decides what it does with the parameters, and what it notes of its actions.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from common.actors.parameters import ParameterSlots, Slot
from common.actors.rollouts import Collected, HostRollout
from common.actors.watching import Worker
from common.cli.errors import FailedEnvError
from common.device.reductions import kind_of
from common.envs.host import HostEnvs
from common.envs.masks import check_legal


class Actor(Worker):
    """N environments, stepped one rollout at a time. Used by one thread."""

    def __init__(
        self,
        index: int,
        make_envs: Callable[[int], HostEnvs],
        act: Callable,
        device: jax.Device,
        slots: ParameterSlots,
        num_steps: int,
        seed: tuple[int, ...],
        memory: Any = (),
        first: int = 0,
        logged: dict[str, str] | None = None,
    ):
        """`index` is its place in this process, whose `first` actor has this number among those of all processes.

        `make_envs` takes a seed. `act` takes parameters, memory, key data, a step's number and observations
        [N, ...], and returns actions [N, ...], extras, and the new memory. `logged`: see `HostEnvKind`.
        """
        super().__init__(f"actor {first + index}", ("env_step", "act", "wait_params", "wait_put"))
        self.index, self.device, self._number = index, device, first + index
        self.rollouts, self.logged = 0, logged or {}
        self._make_envs, self._act, self._slots = make_envs, act, slots
        self._num_steps, self._seed, self._first_memory = num_steps, seed, memory

    def start(self) -> None:
        """Make the environments, other ones after every restart, and begin their episodes."""
        seeds = np.random.SeedSequence([*self._seed, self._number, self.restarts]).generate_state(2) >> 1
        with self.doing("make"):
            self.envs = self._make_envs(int(seeds[0]))
        with self.doing("reset"):
            obs = self.envs.reset()
        self._obs = self._checked(obs)
        check_legal(self._obs, np.ones(self.envs.num_envs, bool), self.envs.spec)
        self._key = np.asarray(jax.random.key_data(jax.random.key(int(seeds[1]))))
        self._steps = np.uint32(0)
        self._memory = self._first_memory
        self._return = np.zeros(self.envs.num_envs)
        self._length = np.zeros(self.envs.num_envs, int)

    def collect(self, choose: Callable[[Slot | None], Slot]) -> Collected:
        """Step `num_steps` times; `choose` gets the parameters in use and returns those for the next step."""
        memory = jax.tree.map(lambda x: np.asarray(x)[None], self._memory)
        steps, returns, lengths, info = [], [], [], []
        slot = None
        for _ in range(self._num_steps):
            with self.doing("wait for parameters", "wait_params"):
                slot = choose(slot)
            steps.append(self._step(slot, returns, lengths, info))
        # Fresh memory for every rollout: the transfer of the last one may still be going on.
        rollout = jax.tree.map(lambda *leaves: np.stack(leaves), *steps)
        obs = jax.tree.map(lambda *x: np.stack(x), *(step.obs for step in steps), self._obs)
        self.rollouts += 1
        return Collected(self.index, rollout._replace(obs=obs, memory=memory), returns, lengths, info)

    def _step(self, slot: Slot, returns: list[float], lengths: list[int], info: list[tuple]) -> HostRollout:
        """One step, [N, ...]; the results of episodes that it ended, and what is logged of it, go into the lists."""
        obs = self._obs
        with self.doing("act", "act"):
            action, extras, self._memory = self._act(slot.params, self._memory, self._key, self._steps, obs)
            action, extras = jax.device_get((action, extras))
        self._steps += np.uint32(1)
        with self.doing("step", "env_step"):
            out = self.envs.step(action)
        self._obs = self._checked(out.obs)
        self._check_finite(out.reward, "reward")
        final_obs = self._checked(out.final_obs) if self.envs.resets_in_step else None
        over = (out.terminated | out.truncated) & out.valid
        check_legal(self._obs, ~over | self.envs.resets_in_step, self.envs.spec)
        # A suite that resets in a step of its own shows the end of the episode once more in that
        self._forget(over if self.envs.resets_in_step else ~out.valid)
        self._account(out.reward, over, out.valid, returns, lengths)
        for metric, entry in self.logged.items():
            if len(numbers := out.numbers(entry)):
                together = {"max": np.max, "min": np.min, "last": np.mean}.get(kind_of(metric), np.sum)
                info.append((metric, float(together(numbers)), len(numbers)))
        version = np.full(len(over), slot.version, np.int32)
        outcome = out.reward, out.terminated, out.truncated, out.valid
        return HostRollout(obs, action, extras, *outcome, version, final_obs, ())

    def _forget(self, begins: np.ndarray) -> None:
        """Start the memory of environments anew whose next step is the first of an episode."""
        if not begins.any():
            return

        def forget(memory, first):
            return np.where(begins.reshape(-1, *[1] * (np.ndim(memory) - 1)), first, memory)

        self._memory = jax.tree.map(forget, self._memory, self._first_memory)

    def _account(self, reward, done, valid, returns: list[float], lengths: list[int]) -> None:
        """Add up episodes."""
        self._return += np.where(valid, reward, 0.0)
        self._length += valid
        if done.any():
            returns.extend(self._return[done].tolist())
            lengths.extend(self._length[done].tolist())
            self._return[done] = 0.0
            self._length[done] = 0

    def _checked(self, obs: Any) -> Any:
        """Observations [N, ...] in the networks' types. Raises FailedEnvError where they cannot be used."""
        return jax.tree.map(self._checked_part, self.envs.spec.obs_like, obs)

    def _checked_part(self, like: Any, obs: np.ndarray) -> np.ndarray:
        wanted = self.envs.num_envs, *like.shape
        if obs.shape != wanted:
            raise FailedEnvError(f"the observations of {self.name} have shape {obs.shape} instead of {wanted}")
        obs = obs.astype(like.dtype, copy=False)
        self._check_finite(obs, "observation")
        return obs

    def _check_finite(self, values: np.ndarray, what: str) -> None:
        if values.dtype.kind != "f" or np.isfinite(values).all():
            return
        finite = np.isfinite(values.reshape(len(values), -1)).all(axis=1)
        raise FailedEnvError(f"the {what} of environment {np.flatnonzero(~finite)[0]} of {self.name} is not finite")
