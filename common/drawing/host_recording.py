"""An episode of an environment on the host, kept while it is played, to be drawn afterwards."""

from typing import Any

import jax
import numpy as np
from PIL import Image

from common.drawing.pictures import fitting
from common.drawing.recording import Recording, frame_stride
from common.envs.environment import LONGEST_HORIZON
from common.envs.host import HostEnvs, HostStep
from common.envs.usage import reason


class RecordedEnvs:
    """The same environments; the first one's first episode is kept.

    Its pictures are those of its suite, made small. Where there are none, its observations are kept instead.
    """

    def __init__(self, envs: HostEnvs):
        self._envs, self.spec, self.num_envs = envs, envs.spec, envs.num_envs
        self.resets_in_step, self.close, self.kill = envs.resets_in_step, envs.close, envs.kill
        self.without_pictures = ""  # why there are none

    def reset(self) -> Any:
        obs = self._envs.reset()
        self._pictures: dict[int, Image.Image] = {}
        self._obs, self._actions, self._rewards, self._over = [_first(obs)], [], [], False
        try:
            self._keep_picture(self.frame())
            self._obs = []
        except Exception as error:  # no renderer, or one that lacks something here: there is another way to draw it
            self.without_pictures = reason(error)
        return obs

    def step(self, action: Any) -> HostStep:
        out = self._envs.step(action)
        if not self._over:
            self._actions.append(_first(action))
            self._rewards.append(float(out.reward[0]))
            ended = bool(out.terminated[0] | out.truncated[0])
            self._over = ended or len(self._rewards) >= LONGEST_HORIZON
            self._keep_what_it_led_to(out, ended)
        return out

    def frame(self) -> np.ndarray:
        return self._envs.frame()

    def recording(self) -> Recording:
        """The episode. Without pictures `paint` is None, with them `obs` is."""
        obs = _stacked(self._obs) if self._obs else None
        paint = self._pictures.__getitem__ if self._pictures else None
        return Recording(None, obs, _stacked(self._actions), np.array(self._rewards), paint)

    def _keep_what_it_led_to(self, out: HostStep, ended: bool) -> None:
        time, hidden = len(self._rewards), ended and self.resets_in_step  # behind the next episode's first picture
        if not self._pictures:
            self._obs.append(_first(out.obs if out.final_obs is None else out.final_obs))
        elif self._over or time % frame_stride(time) == 0:
            self._keep_picture(None if hidden else self._frame_if_it_works())

    def _frame_if_it_works(self) -> np.ndarray | None:
        """None of a world that is broken by now, say: the episode goes on without."""
        try:
            return self.frame()
        except Exception:
            return None

    def _keep_picture(self, frame: np.ndarray | None) -> None:
        """Add one, without a `frame` the last one again; those go that an episode of this length does without."""
        time, newest = len(self._rewards), self._pictures and self._pictures[max(self._pictures)]
        picture = newest if frame is None else fitting(frame)
        if newest and picture.size != newest.size:  # a GIF has one
            picture = picture.resize(newest.size)
        stride = frame_stride(time)
        self._pictures = {step: old for step, old in self._pictures.items() if step % stride == 0} | {time: picture}


def _first(tree: Any) -> Any:
    """The part of the first environment."""
    return jax.tree.map(lambda x: np.array(x[0]), tree)


def _stacked(steps: list[Any]) -> Any:
    return jax.tree.map(lambda *parts: np.stack(parts), *steps)
