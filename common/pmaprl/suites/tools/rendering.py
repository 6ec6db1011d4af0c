"""Pictures of environments without a display.

Processes of environments import this, so it imports nothing slow.
"""

import importlib
import os
import sys
from typing import Any

import numpy as np

FRAMES = {"render_mode": "rgb_array"}  # arguments of gymnasium.make

FRAME_SIZE = 480, 640  # height and width, in pixels; the largest of a model that names none


def draw_without_display() -> None:
    """Let pygame draw into memory, and MuJoCo by EGL, if there is no display.

    Variables of the environment that the user has set stay as they are.
    """
    if not sys.platform.startswith("linux") or os.environ.get("DISPLAY"):
        return
    for name in ("SDL_VIDEODRIVER", "SDL_AUDIODRIVER"):
        os.environ.setdefault(name, "dummy")
    if "mujoco" in sys.modules and "MUJOCO_GL" not in os.environ:
        # Only after mujoco is imported: without EGL the import would fail, even if nothing is drawn
        os.environ["MUJOCO_GL"] = "egl"
        importlib.reload(importlib.import_module("mujoco.rendering.classic.gl_context"))


def mujoco_frame(model: Any, qpos: Any, qvel: Any) -> np.ndarray:
    """Draw MuJoCo's `model` at these positions and speeds, by its first camera."""
    mujoco = importlib.import_module("mujoco")
    draw_without_display()
    data = mujoco.MjData(model)
    data.qpos = qpos
    data.qvel = qvel
    mujoco.mj_forward(model, data)
    most = model.vis.global_.offheight, model.vis.global_.offwidth
    height, width = map(min, FRAME_SIZE, most)
    with mujoco.Renderer(model, height, width) as renderer:
        renderer.update_scene(data, camera=0 if model.ncam else -1)
        return renderer.render()
