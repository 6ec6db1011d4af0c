"""Classic control of gymnax as pictures: what a state looks like, as shapes in the units of the environment."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw

# Told apart by colour-blind eyes (Okabe and Ito).
BLUE, ORANGE, GREEN, SKY = "#0072B2", "#E69F00", "#009E73", "#56B4E9"
RED, PURPLE, YELLOW = "#D55E00", "#CC79A7", "#F0E442"
INK, FLOOR, GREY, LIGHT, PAPER = "#2B2F36", "#3C424C", "#8A9099", "#D9DDE2", "#FFFFFF"
CHANNELS = ORANGE, SKY, GREEN, YELLOW, RED, PURPLE, BLUE, PAPER, GREY  # of a grid, one after the other

WIDTH, HEIGHT = 360, 300  # pixels that a picture fills at most
SMOOTHING = 3  # pictures are drawn this many times larger, then reduced
Point = tuple[float, float]  # with y up


class Shape(NamedTuple):
    """A line with round ends, which is a disc where it has one point only; a filled polygon where it has no width."""

    color: str
    points: Sequence[Point]
    width: float = 0.0


class Scene(NamedTuple):
    """How the states of an environment are drawn."""

    box: tuple[float, float, float, float]  # left, bottom, right, top
    background: list[Shape]
    shapes: Callable[[Any], list[Shape]]  # of a state
    seconds: float  # that a step lasts: close to the physics, or what is pleasant to watch

    def draw(self, state: Any) -> Image.Image:
        left, bottom, right, top = self.box
        unit = SMOOTHING * min(WIDTH / (right - left), HEIGHT / (top - bottom))
        image = Image.new("RGB", (round(unit * (right - left)), round(unit * (top - bottom))), PAPER)
        canvas = ImageDraw.Draw(image)
        for shape in (*self.background, *self.shapes(state)):
            pixels = [(unit * (float(x) - left), unit * (top - float(y))) for x, y in shape.points]
            if not shape.width:
                canvas.polygon(pixels, shape.color)
                continue
            canvas.line(pixels, shape.color, round(unit * shape.width), joint="curve")
            radius = unit * shape.width / 2
            for x, y in (pixels[0], pixels[-1]):
                canvas.ellipse((x - radius, y - radius, x + radius, y + radius), shape.color)
        return image.reduce(SMOOTHING)


def scene_of(env: Any) -> Scene | None:
    """That of an `Env` whose class is one of gymnax's, or derived from it."""
    classes = [kind.__name__ for kind in type(env.inner).__mro__ if kind.__module__.startswith("gymnax.")]
    return next((SCENES[name](env.params) for name in classes if name in SCENES), None)


def cartpole(params: Any) -> Scene:
    limit, length = params.x_threshold, 2 * params.length

    def shapes(state: Any) -> list[Shape]:
        x, angle = state.x, state.theta  # 0 is up, clockwise
        tip = x + length * math.sin(angle), 0.25 + length * math.cos(angle)
        cart = [(x - 0.3, -0.05), (x - 0.3, 0.25), (x + 0.3, 0.25), (x + 0.3, -0.05)]
        wheels = [Shape(GREY, [(x + side, -0.05)], 0.16) for side in (-0.17, 0.17)]
        return [Shape(INK, cart), *wheels, Shape(ORANGE, [(x, 0.25), tip], 0.12), Shape(BLUE, [(x, 0.25)], 0.1)]

    reach = 1.15 * limit
    ends = [Shape(GREY, [(end, -0.12), (end, 0.12)], 0.03) for end in (-limit, limit)]
    track = Shape(GREY, [(-reach, 0), (reach, 0)], 0.03)
    return Scene((-reach, -0.45, reach, length + 0.5), [track, *ends], shapes, 0.02)


def pendulum(params: Any) -> Scene:
    length = params.l

    def shapes(state: Any) -> list[Shape]:
        angle = state.theta  # 0 is up, counter-clockwise
        rod = [(0, 0), (-length * math.sin(angle), length * math.cos(angle))]
        return [Shape(ORANGE, rod, 0.15 * length), Shape(INK, rod[:1], 0.1 * length)]

    reach = 1.3 * length
    goal = Shape(GREEN, [(0, 1.12 * length), (0, 1.22 * length)], 0.03 * length)
    return Scene((-reach, -reach, reach, reach), [goal], shapes, 0.05)


def acrobot(params: Any) -> Scene:
    def shapes(state: Any) -> list[Shape]:
        first = state.joint_angle1  # 0 is down, counter-clockwise
        second = first + state.joint_angle2
        elbow = math.sin(first), -math.cos(first)
        tip = elbow[0] + math.sin(second), elbow[1] - math.cos(second)
        joints = [Shape(INK, [joint], 0.12) for joint in ((0, 0), elbow)]
        return [Shape(BLUE, [(0, 0), elbow], 0.18), Shape(ORANGE, [elbow, tip], 0.18), *joints]

    goal = Shape(GREEN, [(-2.2, 1), (2.2, 1)], 0.03)  # the tip has to get over this line
    return Scene((-2.3, -2.3, 2.3, 2.3), [goal], shapes, 0.07)  # 0.2 s in the physics: too slow to watch


def mountain_car(params: Any) -> Scene:
    def height(x: float) -> float:
        return 0.45 * math.sin(3 * x) + 0.55

    def shapes(state: Any) -> list[Shape]:
        x = float(state.position)
        slope = math.atan(3 * 0.45 * math.cos(3 * x))
        cos, sin = math.cos(slope), math.sin(slope)

        def on_road(forward: float, above: float) -> Point:
            return x + forward * cos - above * sin, height(x) + forward * sin + above * cos

        outline = (-0.1, 0.03), (0.1, 0.03), (0.1, 0.08), (0.05, 0.13), (-0.06, 0.13), (-0.1, 0.08)
        wheels = [Shape(INK, [on_road(side, 0.028)], 0.056) for side in (-0.06, 0.06)]
        return [Shape(RED, [on_road(*corner) for corner in outline]), *wheels]

    left, right, goal = params.min_position - 0.1, params.max_position + 0.1, params.goal_position
    hill = [(x, height(x)) for x in np.linspace(left, right, 150)]
    top = height(goal) + 0.25
    background = [
        Shape(LIGHT, [(left, -0.05), *hill, (right, -0.05)]),
        Shape(INK, [(goal, height(goal)), (goal, top)], 0.01),
        Shape(GREEN, [(goal, top), (goal, top - 0.1), (goal + 0.1, top - 0.05)]),
    ]
    return Scene((left, -0.05, right, 1.3), background, shapes, 0.03)


SCENES = {
    "CartPole": cartpole,
    "Pendulum": pendulum,
    "Acrobot": acrobot,
    "MountainCar": mountain_car,
    "ContinuousMountainCar": mountain_car,
}
"""By the name of the environment's class."""
