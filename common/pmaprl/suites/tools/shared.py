"""Parts that several suites share: pictures without a display, and names of observations.

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
    with mujoco.Renderer(model, *FRAME_SIZE) as renderer:
        renderer.update_scene(data, camera=0 if model.ncam else -1)
        return renderer.render()


# Indices of the numbers that are observed without velocities, by the id of an environment
WITHOUT_VELOCITIES = {"CartPole-v1": (0, 2), "Pendulum-v1": (0, 1)}
_CAR = "position", "velocity"
_LANDER = "x", "y", "x velocity", "y velocity", "angle", "angular velocity", "left leg", "right leg"
_ACROBOT = (
    "cos(angle 1)",
    "sin(angle 1)",
    "cos(angle 2)",
    "sin(angle 2)",
    "velocity 1",
    "velocity 2",
)
_SEAQUEST = (
    "submarine",
    "its back",
    "own bullet",
    "trail",
    "enemy bullet",
    "enemy fish",
    "enemy submarine",
)
_FREEWAY = "chicken", "car", "speed 1", "speed 2", "speed 3", "speed 4", "speed 5"
OBS_NAMES = {
    "CartPole-v0": ("cart position", "cart velocity", "pole angle", "pole velocity"),
    "CartPole-v1": ("cart position", "cart velocity", "pole angle", "pole velocity"),
    "Pendulum-v1": ("cos(angle)", "sin(angle)", "angular velocity"),
    "MountainCar-v0": _CAR,
    "MountainCarContinuous-v0": _CAR,
    "Acrobot-v1": _ACROBOT,
    "LunarLander-v3": _LANDER,
    "LunarLanderContinuous-v3": _LANDER,
    "Asterix-MinAtar": ("player", "enemy", "trail", "gold"),
    "Breakout-MinAtar": ("paddle", "ball", "trail", "brick"),
    "Freeway-MinAtar": _FREEWAY,
    "Seaquest-MinAtar": (*_SEAQUEST, "oxygen", "divers aboard", "diver"),
    "SpaceInvaders-MinAtar": (
        "cannon",
        "alien",
        "moving left",
        "moving right",
        "own bullet",
        "enemy bullet",
    ),
}
"""Names of an observation's numbers, or of a map's channels, by the id of an environment."""
PARTIAL = "Partial"  # beginning of the ids of environments without velocities
