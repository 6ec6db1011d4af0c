"""Scenes of gymnax's other environments: an arm, moving points, and agents in rooms of squares."""

import math
from collections.abc import Callable

import numpy as np
from PIL import Image

from common.drawing.canvas import BLUE, GREEN, GREY, INK, LIGHT, ORANGE, PURPLE, SKY, Canvas, Paint
from common.drawing.scene import Episode, Scene


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


SCENES = {
    "Reacher": Scene(reacher, ("angles", "goal_xy"), 0.05),
    "Swimmer": Scene(swimmer, ("urchin_xys", "xy", "goal_xy"), 0.05),
    "PointRobot": Scene(point_robot, ("pos", "goal"), 0.1),
    "FourRooms": Scene(maze, ("pos", "goal"), 0.15),
    "MetaMaze": Scene(maze, ("pos", "goal"), 0.15),
    "FrozenLake": Scene(frozen_lake, ("position",), 0.3),
}
"""By the name of the environment's class."""
