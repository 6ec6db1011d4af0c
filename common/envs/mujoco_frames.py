"""Pictures of MuJoCo's worlds without a display."""

import importlib
import os
import sys
from typing import Any

import numpy as np

SIZE = 240, 320  # height and width, in pixels


def has_display() -> bool:
    return not sys.platform.startswith("linux") or bool(os.environ.get("DISPLAY"))


def do_without_display() -> None:
    """Let MuJoCo draw by EGL, unless the user has named something else."""
    if not has_display() and "MUJOCO_GL" not in os.environ:
        # Not before mujoco is imported: without EGL that would fail, and training needs no pictures
        import mujoco  # noqa: F401

        os.environ["MUJOCO_GL"] = "egl"
        importlib.reload(importlib.import_module("mujoco.rendering.classic.gl_context"))


def frame(model: Any, qpos: Any, qvel: Any) -> np.ndarray:
    """A picture of MuJoCo's `model` at these positions and speeds, by its first camera.

    Raises an error of any kind where this machine cannot draw.
    """
    import mujoco

    do_without_display()
    data = mujoco.MjData(model)
    data.qpos, data.qvel = qpos, qvel
    mujoco.mj_forward(model, data)
    with mujoco.Renderer(model, *SIZE) as renderer:
        renderer.update_scene(data, camera=0 if model.ncam else -1)
        return renderer.render()
