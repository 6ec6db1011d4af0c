"""Pictures of gymnax's classic control, and of environments that are derived from it.

They need no display, and no pygame as gymnax's own pictures do. Angles and places are taken from
the states.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

WIDTH = 360  # most pixels of a picture
HEIGHT = 300
SMOOTHING = 3  # pictures are drawn this many times larger, then reduced

# Colours that colour-blind eyes tell apart (Okabe and Ito)
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
    """A line with round ends; a disc if it has one point only, a polygon if it has no width."""

    color: str
    points: Sequence[tuple[float, float]]
    width: float = 0.0


def frame(inner: Any, params: Any, state: Any) -> np.ndarray | None:
    """Draw a state of gymnax's environment `inner`, [H, W, 3] in bytes; None if it has no scene."""
    for kind in type(inner).__mro__:
        is_gymnax = kind.__module__.startswith("gymnax.")
        if is_gymnax and kind.__name__ in SCENES:
            box, shapes = SCENES[kind.__name__](params, state)
            return _drawn(box, shapes)
    return None


def _drawn(box: Box, shapes: Sequence[Shape]) -> np.ndarray:
    """Draw the part of the plane inside the `box`, with shapes from the back to the front."""
    from PIL import Image, ImageDraw

    left, bottom, right, top = box
    width = right - left
    height = top - bottom
    unit = SMOOTHING * min(WIDTH / width, HEIGHT / height)
    image = Image.new("RGB", (round(unit * width), round(unit * height)), PAPER)
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
    """A cart on a track, with its pole; an angle of 0 is up, and angles grow clockwise."""
    limit = params.x_threshold
    length = 2 * params.length
    reach = 1.15 * limit
    x = state.x
    tip_x = x + length * math.sin(state.theta)
    tip_y = 0.25 + length * math.cos(state.theta)
    cart = [
        (x - 0.3, -0.05),
        (x - 0.3, 0.25),
        (x + 0.3, 0.25),
        (x + 0.3, -0.05),
    ]
    shapes = [
        Shape(GREY, [(-reach, 0), (reach, 0)], 0.03),
        Shape(GREY, [(-limit, -0.12), (-limit, 0.12)], 0.03),
        Shape(GREY, [(limit, -0.12), (limit, 0.12)], 0.03),
        Shape(INK, cart),
        Shape(GREY, [(x - 0.17, -0.05)], 0.16),
        Shape(GREY, [(x + 0.17, -0.05)], 0.16),
        Shape(ORANGE, [(x, 0.25), (tip_x, tip_y)], 0.12),
        Shape(BLUE, [(x, 0.25)], 0.1),
    ]
    return (-reach, -0.45, reach, length + 0.5), shapes


def pendulum(params: Any, state: Any) -> tuple[Box, list[Shape]]:
    """A pendulum; an angle of 0 is up, and angles grow counter-clockwise."""
    length = params.l
    reach = 1.3 * length
    tip_x = -length * math.sin(state.theta)
    tip_y = length * math.cos(state.theta)
    goal = [(0, 1.12 * length), (0, 1.22 * length)]
    shapes = [
        Shape(GREEN, goal, 0.03 * length),
        Shape(ORANGE, [(0, 0), (tip_x, tip_y)], 0.15 * length),
        Shape(INK, [(0, 0)], 0.1 * length),
    ]
    return (-reach, -reach, reach, reach), shapes


def acrobot(params: Any, state: Any) -> tuple[Box, list[Shape]]:
    """Two links; an angle of 0 is down, and angles grow counter-clockwise."""
    first = state.joint_angle1
    second = state.joint_angle1 + state.joint_angle2
    elbow_x = math.sin(first)
    elbow_y = -math.cos(first)
    elbow = elbow_x, elbow_y
    tip = elbow_x + math.sin(second), elbow_y - math.cos(second)
    shapes = [
        Shape(GREEN, [(-2.2, 1), (2.2, 1)], 0.03),  # the tip has to get over this line
        Shape(BLUE, [(0, 0), elbow], 0.18),
        Shape(ORANGE, [elbow, tip], 0.18),
        Shape(INK, [(0, 0)], 0.12),
        Shape(INK, [elbow], 0.12),
    ]
    return (-2.3, -2.3, 2.3, 2.3), shapes


def mountain_car(params: Any, state: Any) -> tuple[Box, list[Shape]]:
    """A car between hills, and the flag of the goal."""
    left = params.min_position - 0.1
    right = params.max_position + 0.1
    goal = params.goal_position

    def above(x: float, height: float = 0.0) -> tuple[float, float]:
        """Point above the ground."""
        return x, 0.45 * math.sin(3 * x) + 0.55 + height

    ground = [above(x) for x in np.linspace(left, right, 150)]
    shapes = [
        Shape(LIGHT, [(left, -0.05), *ground, (right, -0.05)]),
        Shape(GREEN, [above(goal), above(goal, 0.25)], 0.02),
        Shape(RED, [above(float(state.position), 0.05)], 0.1),
    ]
    return (left, -0.05, right, 1.3), shapes


# By the name of the environment's class
SCENES = {
    "CartPole": cartpole,
    "Pendulum": pendulum,
    "Acrobot": acrobot,
    "MountainCar": mountain_car,
    "ContinuousMountainCar": mountain_car,
}
