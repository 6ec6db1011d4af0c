"""An episode of an environment on the host, kept while it is played, to be drawn afterwards."""

from typing import Any

import jax
import numpy as np
from PIL import Image

from common.drawing.pictures import fitting
from common.drawing.recording import Recording, frame_stride
from common.envs.environment import LONGEST_HORIZON
from common.envs.host import HostEnvs, HostStep


class Recorded:
    """The same environments; the first one's first episode is kept.

    Its pictures are those of its suite, made small. Where there are none, its observations are kept instead.
    """

    def __init__(self, envs: HostEnvs):
        self._envs, self.spec, self.num_envs = envs, envs.spec, envs.num_envs
        self.resets_in_step, self.close, self.kill = envs.resets_in_step, envs.close, envs.kill
        self._pictures: dict[int, Image.Image] = {}
        self._obs: list[Any] = []
        self._actions: list[Any] = []
        self._rewards: list[float] = []

    def reset(self) -> Any:
        obs = self._envs.reset()
        self._over = False
        try:
            self._keep_picture()
        except Exception:  # no renderer, or one that lacks something here: there is another way to draw it
            self._obs.append(_first(obs))
        return obs

    def step(self, action: Any) -> HostStep:
        out = self._envs.step(action)
        if not self._over:
            self._actions.append(_first(action))
            self._rewards.append(float(out.reward[0]))
            self._over = bool(out.terminated[0] | out.truncated[0]) or len(self._rewards) >= LONGEST_HORIZON
            self._look(out)
        return out

    def recording(self) -> Recording:
        """The episode. Without pictures `paint` is None, with them `obs` is."""
        together = lambda steps: jax.tree.map(lambda *parts: np.stack(parts), *steps)  # noqa: E731
        obs = together(self._obs) if self._obs else None
        paint = self._pictures.__getitem__ if self._pictures else None
        return Recording(None, obs, together(self._actions), np.array(self._rewards), paint)

    def _look(self, out: HostStep) -> None:
        """Keep what the step has led to."""
        if not self._pictures:
            self._obs.append(_first(out.obs if out.final_obs is None else out.final_obs))
        elif self._over and self.resets_in_step:  # it would be a picture of the next episode
            self._pictures[len(self._rewards)] = self._pictures[max(self._pictures)]
        elif self._over or len(self._rewards) % frame_stride(len(self._rewards)) == 0:
            self._keep_picture()

    def _keep_picture(self) -> None:
        """Add one, and let those go that an episode of this length does without."""
        picture, time = fitting(self._envs.frame()), len(self._rewards)
        kept = {step: old for step, old in self._pictures.items() if step % frame_stride(time) == 0}
        self._pictures = kept | {time: picture}


def _first(tree: Any) -> Any:
    """The part of the first environment."""
    return jax.tree.map(lambda x: np.array(x[0]), tree)
