"""Pictures of gymnax's classic control, also of an own environment that is derived from one: gymnax
needs pygame there.

No display is needed. Angles and places are those of the states.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

WIDTH = 360  # pixels that a picture fills at most
HEIGHT = 300
SMOOTHING = 3  # pictures are drawn this many times larger, then reduced

# Told apart by colour-blind eyes (Okabe and Ito).
BLUE = "#0072B2"
ORANGE = "#E69F00"
GREEN = "#009E73"
RED = "#D55E00"
INK = "#2B2F36"
GREY = "#8A9099"
LIGHT = "#D9DDE2"
PAPER = "#FFFFFF"

Box = tuple[float, float, float, float]  # left, bottom, right, top; with y up


class Shape(NamedTuple):
    """A line with round ends, which is a disc where it has one point only; a filled polygon where
    it has no width.
    """

    color: str
    points: Sequence[tuple[float, float]]
    width: float = 0.0


def frame(inner: Any, params: Any, state: Any) -> np.ndarray | None:
    """A picture [H, W, 3] of a state of gymnax's environment `inner`, bytes; None where it is none
    of these.
    """
    classes = [
        kind.__name__ for kind in type(inner).__mro__ if kind.__module__.startswith("gymnax.")
    ]
    scene = next((SCENES[name] for name in classes if name in SCENES), None)
    return scene and _drawn(*scene(params, state))


def _drawn(box: Box, shapes: Sequence[Shape]) -> np.ndarray:
    """The part of the plane that is inside the `box`, with shapes from the back to the front."""
    from PIL import Image, ImageDraw

    left, bottom, right, top = box
    unit = SMOOTHING * min(WIDTH / (right - left), HEIGHT / (top - bottom))
    image = Image.new("RGB", (round(unit * (right - left)), round(unit * (top - bottom))), PAPER)
    canvas = ImageDraw.Draw(image)
    for color, points, width in shapes:
        pixels = [(unit * (float(x) - left), unit * (top - float(y))) for x, y in points]
        if not width:
            canvas.polygon(pixels, color)
            continue
        canvas.line(pixels, color, round(unit * width), joint="curve")
        radius = unit * width / 2
        for x, y in (pixels[0], pixels[-1]):
            canvas.ellipse((x - radius, y - radius, x + radius, y + radius), color)
    return np.asarray(image.reduce(SMOOTHING))


def cartpole(params: Any, state: Any) -> tuple[Box, list[Shape]]:
    limit = params.x_threshold
    length = 2 * params.length
    x = state.x  # an angle of 0 is up, clockwise
    angle = state.theta
    reach = 1.15 * limit
    tip = x + length * math.sin(angle), 0.25 + length * math.cos(angle)
    return (-reach, -0.45, reach, length + 0.5), [
        Shape(GREY, [(-reach, 0), (reach, 0)], 0.03),
        *(Shape(GREY, [(end, -0.12), (end, 0.12)], 0.03) for end in (-limit, limit)),
        Shape(INK, [(x - 0.3, -0.05), (x - 0.3, 0.25), (x + 0.3, 0.25), (x + 0.3, -0.05)]),
        *(Shape(GREY, [(x + side, -0.05)], 0.16) for side in (-0.17, 0.17)),
        Shape(ORANGE, [(x, 0.25), tip], 0.12),
        Shape(BLUE, [(x, 0.25)], 0.1),
    ]


def pendulum(params: Any, state: Any) -> tuple[Box, list[Shape]]:
    length = params.l  # 0 is up, counter-clockwise
    angle = state.theta
    tip = (-length * math.sin(angle), length * math.cos(angle))
    reach = 1.3 * length
    return (-reach, -reach, reach, reach), [
        Shape(GREEN, [(0, 1.12 * length), (0, 1.22 * length)], 0.03 * length),  # the goal
        Shape(ORANGE, [(0, 0), tip], 0.15 * length),
        Shape(INK, [(0, 0)], 0.1 * length),
    ]


def acrobot(params: Any, state: Any) -> tuple[Box, list[Shape]]:
    first = state.joint_angle1  # 0 is down, counter-clockwise
    second = state.joint_angle1 + state.joint_angle2
    elbow = math.sin(first), -math.cos(first)
    tip = elbow[0] + math.sin(second), elbow[1] - math.cos(second)
    return (-2.3, -2.3, 2.3, 2.3), [
        Shape(GREEN, [(-2.2, 1), (2.2, 1)], 0.03),  # the tip has to get over this line
        Shape(BLUE, [(0, 0), elbow], 0.18),
        Shape(ORANGE, [elbow, tip], 0.18),
        *(Shape(INK, [joint], 0.12) for joint in ((0, 0), elbow)),
    ]


def mountain_car(params: Any, state: Any) -> tuple[Box, list[Shape]]:
    left = params.min_position - 0.1
    right = params.max_position + 0.1
    goal = params.goal_position

    def above(x: float, height: float = 0.0) -> tuple[float, float]:
        return x, 0.45 * math.sin(3 * x) + 0.55 + height

    return (left, -0.05, right, 1.3), [
        Shape(LIGHT, [(left, -0.05), *map(above, np.linspace(left, right, 150)), (right, -0.05)]),
        Shape(GREEN, [above(goal), above(goal, 0.25)], 0.02),
        Shape(RED, [above(float(state.position), 0.05)], 0.1),
    ]


# By the name of the environment's class
SCENES = {"CartPole": cartpole, "Pendulum": pendulum, "Acrobot": acrobot}
SCENES |= {"MountainCar": mountain_car, "ContinuousMountainCar": mountain_car}
