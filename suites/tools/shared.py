"""What several suites share: pictures without a display, and which environments show no velocities.

Processes of environments import this, so it needs nothing that is slow.
"""

import importlib
import os
import sys
from typing import Any

import numpy as np

FRAMES = {"render_mode": "rgb_array"}  # arguments of gymnasium.make
FRAME_SIZE = 240, 320  # height and width, in pixels


def draw_without_display() -> None:
    """Let pygame draw into memory and MuJoCo by EGL where there is no display, unless the user has named others."""
    if not sys.platform.startswith("linux") or os.environ.get("DISPLAY"):
        return
    for name in ("SDL_VIDEODRIVER", "SDL_AUDIODRIVER"):
        os.environ.setdefault(name, "dummy")
    if "mujoco" in sys.modules and "MUJOCO_GL" not in os.environ:
        # Not before mujoco is imported: without EGL that would fail, and training needs no pictures
        os.environ["MUJOCO_GL"] = "egl"
        importlib.reload(importlib.import_module("mujoco.rendering.classic.gl_context"))


def mujoco_frame(model: Any, qpos: Any, qvel: Any) -> np.ndarray:
    """A picture of MuJoCo's `model` at these positions and speeds, by its first camera."""
    import mujoco

    draw_without_display()
    data = mujoco.MjData(model)
    data.qpos, data.qvel = qpos, qvel
    mujoco.mj_forward(model, data)
    with mujoco.Renderer(model, *FRAME_SIZE) as renderer:
        renderer.update_scene(data, camera=0 if model.ncam else -1)
        return renderer.render()


WITHOUT_VELOCITIES = {"CartPole-v1": (0, 2), "Pendulum-v1": (0, 1)}
PARTIAL = "Partial"  # of the ids of the environments that show no more
