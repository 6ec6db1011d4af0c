"""Scenes: how the states of gymnax's classes become pictures.

Its function prepares what stays the same in an episode, and returns how to paint one frame.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from common.drawing.pictures import BLUE, GREEN, GREY, INK, LIGHT, ORANGE, PURPLE, RED, SKY, Canvas, Paint


class Episode(NamedTuple):
    """What a scene is drawn from."""

    inner: Any  # the gymnax environment
    params: Any
    states: Any  # the fields that the scene reads, [T + 1, ...], finite
    actions: np.ndarray  # [T, ...] in the environment's shape and bounds, finite

    def push(self, step: int, scale: float, middle: float = 0.0) -> float:
        """The first component of the action chosen after `step` steps, -1 .. 1; 0 where no action follows."""
        return (float(np.ravel(self.actions[step])[0]) - middle) / scale if step < len(self.actions) else 0.0


class Scene(NamedTuple):
    """How the states of one gymnax class are drawn."""

    prepare: Callable[[Episode], Paint]
    fields: tuple[str, ...]  # that it reads from the state
    seconds: float  # that a step lasts: close to the physics, or what is pleasant to watch


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


CLASSIC_CONTROL = {
    "CartPole": Scene(cartpole, ("x", "theta"), 0.02),
    "Pendulum": Scene(pendulum, ("theta",), 0.05),
    "Acrobot": Scene(acrobot, ("joint_angle1", "joint_angle2"), 0.07),  # 0.2 s in the physics: too slow to watch
    "MountainCar": Scene(mountain_car, ("position",), 0.03),
    "ContinuousMountainCar": Scene(mountain_car, ("position",), 0.03),
}
"""By the name of the environment's class."""


def reacher(episode: Episode) -> Paint:
    angles, goals = episode.states.angles, episode.states.goal_xy
    reach = angles.shape[1] * 1.5  # the goal may lie in a corner, where no arm reaches
    ground = Canvas((-reach, -reach, reach, reach), 280)
    ground.ring((0, 0), angles.shape[1], LIGHT, 1.5)

    def paint(step: int) -> Image.Image:
        links = np.stack([np.cos(angles[step]), np.sin(angles[step])], axis=1)  # angles are absolute
        joints = [(0.0, 0.0)] + [tuple(joint) for joint in np.cumsum(links, axis=0)]
        canvas = ground.copy()
        goal = tuple(goals[step])
        canvas.ring(goal, 0.2, GREEN, 3)
        canvas.disc(goal, 0.07, GREEN)
        for start, end in zip(joints, joints[1:], strict=False):
            canvas.line([start, end], BLUE, 9)
        for joint in joints[:-1]:
            canvas.disc(joint, 0.07, INK)
        canvas.disc(joints[-1], 0.14, ORANGE)
        return canvas.picture()

    return paint


def point_robot(episode: Episode) -> Paint:
    states, params = episode.states, episode.params
    arc = [(math.cos(a) * params.circle_radius, math.sin(a) * params.circle_radius) for a in np.linspace(0, math.pi)]

    def background(ground: Canvas) -> None:
        ground.line(arc, LIGHT, 1.5)
        ground.disc(tuple(states.goal[0]), params.goal_radius, GREEN)

    return _moving_point(episode, states.pos, [*arc, *states.goal], background)


def swimmer(episode: Episode) -> Paint:
    states = episode.states

    def background(ground: Canvas) -> None:
        ground.ring(tuple(states.goal_xy[0]), 0.1, GREEN, 3)
        ground.disc(tuple(states.goal_xy[0]), 0.04, GREEN)
        for urchin in states.urchin_xys[0]:
            spikes = np.arange(20) * math.pi / 10
            radii = np.where(np.arange(20) % 2, 0.06, 0.13)
            ground.fill(urchin + radii[:, None] * np.stack([np.cos(spikes), np.sin(spikes)], axis=1), PURPLE)

    return _moving_point(episode, states.xy, [(-1, -1), (1, 1)], background)


def maze(episode: Episode) -> Paint:
    """Rooms with walls; position and goal are (row, column)."""
    tiles = np.where(np.asarray(episode.inner.env_map), "", INK)
    return _tiles(tiles, episode.states.pos, episode.states.goal)


def frozen_lake(episode: Episode) -> Paint:
    desc = np.asarray(episode.inner.desc)
    start, _, hole, goal = range(4)
    tiles = np.select([desc == start, desc == hole, desc == goal], [LIGHT, INK, ""], SKY)
    positions = np.stack(np.divmod(episode.states.position, desc.shape[1]), axis=1)
    return _tiles(tiles, positions, np.broadcast_to(np.argwhere(desc == goal)[0], positions.shape), seam=0.03)


def _tiles(tiles: np.ndarray, positions: np.ndarray, goals: np.ndarray, seam: float = 0.0) -> Paint:
    """A grid of coloured `tiles` [rows, columns] ("" is free), the goal a square and the agent a disc on it."""
    rows, columns = tiles.shape
    cell = min(48, 300 // rows, 360 // columns)
    ground = Canvas((0, -rows, columns, 0), cell * columns)
    for row, column in np.argwhere(tiles != ""):
        box = column + seam, -row - 1 + seam, column + 1 - seam, -row - seam
        ground.rectangle(box, str(tiles[row, column]))

    def paint(step: int) -> Image.Image:
        canvas = ground.copy()
        row, column = goals[step]
        canvas.rectangle((column + 0.12, -row - 0.88, column + 0.88, -row - 0.12), GREEN)
        row, column = positions[step]
        canvas.disc((column + 0.5, -row - 0.5), 0.34, ORANGE)
        return canvas.picture()

    return paint


def _moving_point(
    episode: Episode, path: np.ndarray, landmarks: list[tuple[float, float]], background: Callable[[Canvas], None]
) -> Paint:
    """A point on its `path` [T + 1, 2], with its last positions behind it and its action as an arrow."""
    low, high = np.min(landmarks, axis=0), np.max(landmarks, axis=0)
    size = high - low
    path = path.clip(low - size / 2, high + size / 2)  # what is further away waits at the edge
    low, high = np.minimum(low, path.min(axis=0)), np.maximum(high, path.max(axis=0))
    (x, y), reach = (low + high) / 2, 0.58 * max(high - low)
    ground = Canvas((x - reach, y - reach, x + reach, y + reach), 280)
    background(ground)
    largest = max(float(np.abs(episode.actions).max(initial=0)), 1e-9)

    def paint(step: int) -> Image.Image:
        canvas = ground.copy()
        for place in path[max(0, step - 40) : step]:
            canvas.disc(tuple(place), 0.012 * reach, GREY)
        here = path[step]
        canvas.disc(tuple(here), 0.05 * reach, ORANGE)
        if step < len(episode.actions):
            canvas.arrow([tuple(here), tuple(here + 0.2 * reach * episode.actions[step] / largest)], BLUE, 2.5)
        return canvas.picture()

    return paint


POINTS_AND_MAZES = {
    "Reacher": Scene(reacher, ("angles", "goal_xy"), 0.05),
    "Swimmer": Scene(swimmer, ("urchin_xys", "xy", "goal_xy"), 0.05),
    "PointRobot": Scene(point_robot, ("pos", "goal"), 0.1),
    "FourRooms": Scene(maze, ("pos", "goal"), 0.15),
    "MetaMaze": Scene(maze, ("pos", "goal"), 0.15),
    "FrozenLake": Scene(frozen_lake, ("position",), 0.3),
}
"""By the name of the environment's class."""
