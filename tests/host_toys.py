"""Gymnasium environments for tests: `--env gymnasium:host_toys:Toy-v0`, with arguments that make
them misbehave.
"""

import collections
import multiprocessing
import os
import re
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

import gymnasium
import numpy as np
from gymnasium import spaces


class OddError(Exception):
    """Cannot be sent to another process, nor made of one word."""

    def __init__(self, kind: str, what: str):
        super().__init__(f"{kind} {what}")
        self.later = lambda: what


class Toy(gymnasium.Env):
    """Observes (episode, step); truncated after `limit` steps, or terminated where `terminates`;
    reward is the action.

    `trouble` is what happens at a step counted over all episodes, or with `hang_in_close` at the
    end; only to one environment, where `once` names a file to remember it. `simulator` names a file
    for the number of a process that this starts, in a process of its own.
    """

    action_space = spaces.Discrete(3)
    observation_space = spaces.Box(
        low=-np.inf,
        high=np.inf,
        shape=(2,),
        dtype=np.float32,
    )

    def __init__(self, limit=7, terminates=False, sleep=0.0, once="", simulator="", **trouble: int):
        self.limit = limit
        self.terminates = terminates
        self.sleep = sleep
        self.once = once
        self.trouble = trouble
        self.total = self.episode = 0
        if simulator and multiprocessing.parent_process():
            Path(simulator).write_text(str(subprocess.Popen(["sleep", "1e6"]).pid))

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.episode = 100 * (seed % 10_000)
        self.time = 0
        self.episode += 1
        return self._observe(), {}

    def step(self, action):
        self.total += 1
        self.time += 1
        if self._happens("raise_at"):
            raise RuntimeError("the toy was told to fail")
        if self._happens("raise_odd_at"):
            raise OddError("odd", "trouble")
        if self._happens("exit_at"):
            os._exit(7)
        if self._happens("spin_at"):
            # For ages, without a moment for other threads of the interpreter
            re.match("(a+)+b", "a" * 99)
        time.sleep(1e6 if self._happens("hang_at") else self.sleep)
        obs = self._observe()
        if self._happens("nan_at"):
            obs = obs * np.nan
        reward = np.nan if self._happens("nan_reward_at") else float(action)
        over = self.time >= self.limit
        return obs, reward, over and self.terminates, over and not self.terminates, {}

    def close(self):
        self.total = 1
        time.sleep(1e6 if self._happens("hang_in_close") else 0)

    def _observe(self):
        return np.array([self.episode, self.time], np.float32)

    def _happens(self, what: str) -> bool:
        if self.trouble.get(what) != self.total:
            return False
        with suppress(FileExistsError):
            if self.once:
                Path(self.once).touch(exist_ok=False)
            return True
        return False


class OneArrayToy(Toy):
    """Writes every observation into the same array."""

    def __init__(self, **options):
        super().__init__(**options)
        self.array = np.zeros(2, np.float32)

    def _observe(self):
        self.array[:] = super()._observe()
        return self.array


class DrawnToy(Toy):
    """Draws itself in a shade of grey that is the time."""

    metadata = {"render_modes": ["rgb_array"]}

    def __init__(self, render_mode: str | None = None, **arguments):
        super().__init__(**arguments)
        self.render_mode = render_mode

    def render(self):
        return np.full((30, 40, 3), self.time % 256, np.uint8) if self.render_mode else None


class PromisingToy(Toy):
    """Says that it draws itself, and cannot be told to."""

    metadata = {"render_modes": ["rgb_array"]}
    obs_names = ("episode", "step")

    def __init__(self):
        super().__init__()


class BoxToy(Toy):
    """Actions in a Box [2, 2] of -2 .. 1, as 64 bit numbers; the reward is their sum, NaN where
    that does not fit.
    """

    action_space = spaces.Box(
        low=-2.0,
        high=1.0,
        shape=(2, 2),
        dtype=np.float64,
    )

    def step(self, action):
        obs, _, *rest = super().step(0)
        is_inside = self.action_space.contains(action)
        return obs, float(action.sum()) if is_inside else np.nan, *rest


class MultiToy(Toy):
    """MultiDiscrete actions and observations."""

    action_space = spaces.MultiDiscrete([2, 3])
    observation_space = spaces.MultiDiscrete([4, 5])

    def step(self, action):
        obs, _, *rest = super().step(0)
        return obs, float(action[0] + 10 * action[1]), *rest

    def _observe(self):
        return np.array([self.episode % 4, self.time % 5])


class ImageToy(Toy):
    """Bytes as images."""

    observation_space = spaces.Box(
        low=0,
        high=255,
        shape=(12, 12, 3),
        dtype=np.uint8,
    )

    def _observe(self):
        return np.full((12, 12, 3), self.time, np.uint8)


class DictToy(Toy):
    """Observes frames that come first, numbers, and which actions are legal; any other one is worth
    -100.
    """

    observation_space = spaces.Dict(
        {
            "numbers": spaces.Tuple((Toy.observation_space, spaces.Discrete(7))),
            "frames": spaces.Box(low=0, high=255, shape=(2, 12, 12), dtype=np.uint8),
            "action_mask": spaces.MultiBinary(3),
        }
    )

    def step(self, action):
        legal = self._observe()["action_mask"][action]
        obs, reward, *rest = super().step(action)
        return obs, reward if legal else -100.0, *rest

    def _observe(self):
        numbers = super()._observe()
        frames = np.full((2, 12, 12), self.time, np.uint8)
        frames[1] = 9
        legal = [self.time % 2, 1 - self.time % 2, self.time % 3 == 0]
        mask = np.array(legal, np.int8)
        mask *= not (self.time and self._happens("no_action_at"))
        return {
            "numbers": (numbers, self.time % 7),
            "frames": frames,
            "action_mask": mask,
        }


class HybridToy(Toy):
    """Actions of a choice and a vector within bounds; the reward is all of them together."""

    action_space = spaces.Tuple(
        (spaces.Discrete(3), spaces.Box(low=-1.0, high=0.5, shape=(2,), dtype=np.float32))
    )

    def step(self, action):
        obs, _, *rest = super().step(0)
        is_inside = self.action_space.contains(action)
        return (
            obs,
            float(action[0] + action[1].sum()) if is_inside else np.nan,
            *rest,
        )


class SecretiveToy(Toy):
    """Only critics see which action pays."""

    observation_space = spaces.Dict(
        {
            "numbers": Toy.observation_space,
            "privileged_state": spaces.Box(low=0, high=1, shape=(3,), dtype=np.float32),
        }
    )

    def step(self, action):
        paid = self._observe()["privileged_state"][action] > 0
        obs, _, *rest = super().step(action)
        return obs, float(paid), *rest

    def _observe(self):
        secret = np.random.default_rng((self.episode, self.time)).integers(3)
        numbers = np.array([0, self.time], np.float32)
        return {"numbers": numbers, "privileged_state": np.eye(3, dtype=np.float32)[secret]}


class TellingToy(Toy):
    """Says in its info which actions are legal: at first not the first, later not the second;
    nothing at the end.
    """

    def reset(self, seed=None, options=None):
        obs, _ = super().reset(seed=seed)
        return obs, {"action_mask": np.array([0, 1, 1], np.int8)}

    def step(self, action):
        *outputs, _ = super().step(action)
        silent = self._happens("tells_nothing_at") or self.time == self.limit
        return *outputs, {"action_mask": None if silent else np.array([1, 0, 1], np.int8)}


class LateToy(TellingToy):
    """Its info says which actions are legal after steps only, or from its second reset on."""

    def __init__(self, at_resets=False, **options):
        super().__init__(**options)
        self.at_resets = at_resets
        self.resets = 0

    def reset(self, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        self.resets += 1
        return obs, info if self.resets > 2 and self.at_resets else {"action_mask": None}

    def step(self, action):
        *outputs, info = super().step(action)
        return *outputs, {} if self.at_resets else info


class SpacedToy(Toy):
    """Has other spaces where its argument says so."""

    def __init__(self, high=5, dtype="uint8", reach=1.0, acts="float32", **options):
        super().__init__(**options)
        self.observation_space = spaces.Box(0, high, (2,), np.dtype(dtype).type)
        self.action_space = spaces.Box(-reach, reach, (2,), np.dtype(acts).type)

    def step(self, action):
        return super().step(action.sum())

    def _observe(self):
        return np.array([self.time % 5, 1], self.observation_space.dtype)


class ChoosingToy(SpacedToy):
    """The same with choices."""

    def __init__(self, count=3, **options):
        super().__init__(**options)
        self.action_space = spaces.Discrete(count)


class TellingGoalToy(Toy):
    """Two parts in an order that is not their space's, beside one that no space speaks of; a mask
    per component.
    """

    action_space = MultiToy.action_space
    observation_space = spaces.Dict(
        {"achieved": Toy.observation_space, "desired": Toy.observation_space}
    )

    def reset(self, seed=None, options=None):
        obs = super().reset(seed=seed)[0]
        return obs, {"action_mask": (np.ones(2), np.array([0, 1, 0]))}

    def step(self, action):
        *outputs, _ = super().step(0)
        return *outputs, {
            "action_mask": None
            if self.time == self.limit
            else (np.array([1, 0]), np.array([0, 0, 1]))
        }

    def _observe(self):
        return collections.OrderedDict(
            other=3,
            desired=-super()._observe(),
            achieved=super()._observe(),
        )


class ChattyToy(Toy):
    """Says the step in its info, and whether that is even; at the end of an episode also ten times
    the step.
    """

    def reset(self, seed=None, options=None):
        return super().reset(seed=seed)[0], {"time": 100}

    def step(self, action):
        obs, *rest, _ = super().step(action)
        info = {
            "time": self.time,
            "even": np.bool_(self.time % 2 == 0),
            "all": obs,
            "text": "no number",
        }
        return obs, *rest, info | ({"end": 10.0 * self.time} if self.time == self.limit else {})


class OddToy(Toy):
    """Gives what it is told to in place of its own outputs: the last `outputs` of a step, a reset
    without info.
    """

    def __init__(self, outputs: int = 5, old_reset: bool = False, **given):
        super().__init__()
        self.outputs = outputs
        self.old_reset = old_reset
        self.given = given

    def reset(self, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        return obs if self.old_reset else (obs, info)

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        own = {
            "obs": obs,
            "reward": reward,
            "terminated": terminated,
            "truncated": truncated,
            "info": info,
        }
        return tuple((own | self.given).values())[-self.outputs :]


class StubbornToy(Toy):
    """Counts its episodes from its making on, whatever seeds its resets get."""

    def reset(self, seed=None, options=None):
        obs, info = super().reset()
        return obs, info


class RaggedToy(Toy):
    """Has arrays of any length, locks, and numbers of other types in its info."""

    def step(self, action):
        *outputs, _ = super().step(action)
        odd = (1 + self.episode // 100) % 2  # of every other seed
        path = np.arange(1 + self.time % 3 + odd)
        number = 0.5 if odd else 1
        info = {
            "path": path,
            "deep": {"path": path},
            "lock": threading.Lock(),
            "number": number,
            "_number": 0,
        }
        return *outputs, info | {"final_obs": 7.0, "huge": 10**400, 3: 4}


class TextToy(Toy):
    observation_space = spaces.Text(5)


TOYS = (
    Toy,
    DrawnToy,
    PromisingToy,
    BoxToy,
    MultiToy,
    ImageToy,
    DictToy,
    HybridToy,
    TextToy,
    ChattyToy,
    SecretiveToy,
)
TOYS += LateToy, SpacedToy, ChoosingToy
for toy in (*TOYS, OneArrayToy, OddToy, RaggedToy, StubbornToy, TellingToy, TellingGoalToy):
    gymnasium.register(f"{toy.__name__}-v0", toy, disable_env_checker=True)


class ReusingToys(gymnasium.vector.VectorEnv):
    """Two, vectorized by themselves, with arrays that every step overwrites; their episodes have 3
    and 5 steps.

    They observe the step, and 100 at the end. The reward is 1, and 50 in a step that only resets.
    """

    metadata = {"autoreset_mode": gymnasium.vector.AutoresetMode.NEXT_STEP}
    single_observation_space = spaces.Box(
        low=-np.inf,
        high=np.inf,
        shape=(1,),
        dtype=np.float32,
    )
    single_action_space = spaces.Discrete(2)

    def __init__(self, num_envs, **_):
        self._time = np.zeros(2, int)
        self._over = np.zeros(2, bool)
        self._obs = np.zeros((2, 1), np.float32)

    def reset(self, *, seed=None, options=None):
        return self._obs, {}

    def step(self, actions):
        resets = self._over.copy()
        self._time = np.where(resets, 0, self._time + 1)
        self._over[:] = self._time == [3, 5]
        self._obs[:, 0] = np.where(self._over, 100, self._time)
        rewards = np.where(resets, 50.0, 1.0)
        return self._obs, rewards, self._over, np.zeros(2, bool), {}


gymnasium.register("ReusingToys-v0", vector_entry_point=ReusingToys)


class TellingToys(ReusingToys):
    """They have masks in their infos, after steps, or after resets too."""

    def __init__(self, num_envs, at_resets=False):
        super().__init__(num_envs)
        self.info = {"action_mask": np.ones((2, 2), np.int8)}
        self.at_resets = at_resets

    def reset(self, *, seed=None, options=None):
        return self._obs, self.info if self.at_resets else {}

    def step(self, actions):
        *outputs, _ = super().step(actions)
        return *outputs, self.info


gymnasium.register("TellingToys-v0", vector_entry_point=TellingToys)
