"""Scenes of gymnax's classic control: carts, poles and a car on a hill."""

import math

import numpy as np
from PIL import Image

from common.drawing.canvas import BLUE, GREEN, GREY, INK, LIGHT, ORANGE, PURPLE, RED, Canvas, Paint
from common.drawing.scene import Episode, Scene

UP = math.pi / 2


def cartpole(episode: Episode) -> Paint:
    limit, half_pole = episode.params.x_threshold, episode.params.length
    reach = 1.15 * limit
    ground = Canvas((-reach, -0.45, reach, 2 * half_pole + 0.5), 360)
    ground.line([(-reach, 0), (reach, 0)], GREY, 1.5)
    for end in (-limit, limit):
        ground.line([(end, -0.12), (end, 0.12)], GREY, 1.5)

    def paint(step: int) -> Image.Image:
        x, angle = float(episode.states.x[step]), float(episode.states.theta[step])
        canvas = ground.copy()
        canvas.rectangle((x - 0.3, -0.05, x + 0.3, 0.25), INK)
        for wheel in (-0.17, 0.17):
            canvas.disc((x + wheel, -0.05), 0.08, GREY)
        tip = x + 2 * half_pole * math.sin(angle), 0.25 + 2 * half_pole * math.cos(angle)
        canvas.line([(x, 0.25), tip], ORANGE, 8)
        canvas.disc((x, 0.25), 0.05, BLUE)
        _push_arrow(canvas, (x, 0.1), 0.35, episode.push(step, 0.5, 0.5))
        return canvas.picture()

    return paint


def pendulum(episode: Episode) -> Paint:
    length = episode.params.l
    reach = 1.3 * length
    ground = Canvas((-reach, -reach, reach, reach), 280)
    ground.ring((0, 0), length, LIGHT, 1.5)
    ground.line([(0, 0.95 * length), (0, 1.05 * length)], GREEN, 3)

    def paint(step: int) -> Image.Image:
        angle = float(episode.states.theta[step])  # 0 is up, counter-clockwise
        canvas = ground.copy()
        canvas.line([(0, 0), (-length * math.sin(angle), length * math.cos(angle))], ORANGE, 16)
        canvas.disc((0, 0), 0.05 * length, INK)
        torque = episode.push(step, episode.params.max_torque)
        canvas.turn((0, 0), 0.45 * length, UP, 2.2 * torque, BLUE)
        return canvas.picture()

    return paint


def acrobot(episode: Episode) -> Paint:
    ground = Canvas((-2.3, -2.3, 2.3, 2.3), 280)
    for left in np.arange(-2.2, 2.2, 0.2):
        ground.line([(left, 1), (left + 0.1, 1)], GREEN, 2)  # the tip has to get over this line

    def paint(step: int) -> Image.Image:
        first = float(episode.states.joint_angle1[step])  # 0 is down, counter-clockwise
        second = first + float(episode.states.joint_angle2[step])
        elbow = math.sin(first), -math.cos(first)
        tip = elbow[0] + math.sin(second), elbow[1] - math.cos(second)
        canvas = ground.copy()
        canvas.line([(0, 0), elbow], BLUE, 11)
        canvas.line([elbow, tip], ORANGE, 11)
        for joint in ((0, 0), elbow):
            canvas.disc(joint, 0.06, INK)
        canvas.turn(elbow, 0.35, second - UP - math.pi, 1.2 * episode.push(step, 1, 1), PURPLE)
        return canvas.picture()

    return paint


def mountain_car(episode: Episode) -> Paint:
    params, positions = episode.params, episode.states.position
    continuous = hasattr(params, "max_action")
    left, right = params.min_position, params.max_position
    ground = Canvas((left - 0.1, -0.05, right + 0.1, 1.3), 360)
    xs = np.linspace(left - 0.1, right + 0.1, 150)
    hill = [(x, _height(x)) for x in xs]
    ground.fill([(left - 0.1, -0.05), *hill, (right + 0.1, -0.05)], LIGHT)
    ground.line(hill, GREY, 1.5)
    goal = params.goal_position, _height(params.goal_position)
    ground.line([goal, (goal[0], goal[1] + 0.25)], INK, 1.5)
    ground.fill([(goal[0], goal[1] + y) for y in (0.25, 0.15)] + [(goal[0] + 0.1, goal[1] + 0.2)], GREEN)

    def paint(step: int) -> Image.Image:
        x = float(positions[step])
        slope = math.atan(3 * 0.45 * math.cos(3 * x))
        along, up = (math.cos(slope), math.sin(slope)), (-math.sin(slope), math.cos(slope))

        def on_car(forward: float, above: float) -> tuple[float, float]:
            return x + forward * along[0] + above * up[0], _height(x) + forward * along[1] + above * up[1]

        canvas = ground.copy()
        canvas.fill([on_car(*corner) for corner in ((-0.1, 0.03), (0.1, 0.03), (0.1, 0.08), (-0.1, 0.08))], RED)
        canvas.fill([on_car(*corner) for corner in ((-0.06, 0.08), (0.05, 0.08), (0.03, 0.13), (-0.05, 0.13))], RED)
        for wheel in (-0.06, 0.06):
            canvas.disc(on_car(wheel, 0.028), 0.028, INK)
        _push_arrow(canvas, on_car(0, 0.19), 0.1, episode.push(step, 1, 0 if continuous else 1))
        return canvas.picture()

    return paint


def _push_arrow(canvas: Canvas, start: tuple[float, float], length: float, push: float) -> None:
    """A horizontal arrow for a force of -1 .. 1."""
    if abs(push) > 0.05:  # too short for its head
        x, y = start
        side = math.copysign(length, push)
        canvas.arrow([(x + side, y), (x + side * (1 + abs(push)), y)], BLUE, 3)


def _height(x: float) -> float:
    """Of the mountain car's road."""
    return 0.45 * math.sin(3 * x) + 0.55


SCENES = {
    "CartPole": Scene(cartpole, ("x", "theta"), 0.02),
    "Pendulum": Scene(pendulum, ("theta",), 0.05),
    "Acrobot": Scene(acrobot, ("joint_angle1", "joint_angle2"), 0.07),  # 0.2 s in the physics: too slow to watch
    "MountainCar": Scene(mountain_car, ("position",), 0.03),
    "ContinuousMountainCar": Scene(mountain_car, ("position",), 0.03),
}
"""By the name of the environment's class."""
