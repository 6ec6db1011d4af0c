"""jaxmarl's environments: `jaxmarl:MPE_simple_spread_v3`.

All agents act as one, for the sum of their rewards.
"""

import math
import operator
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pmaprl.envs.environment import Env, Step
from pmaprl.envs.foreign_code import import_package
from pmaprl.envs.masks import MASK
from pmaprl.envs.spaces import (
    Box,
    Discrete,
    Leaf,
    MultiDiscrete,
    Space,
    are_all,
    box,
    convert,
)
from pmaprl.envs.suite_params import changed_params, settable
from pmaprl.suites.tools.plane import Circle, plane_frame

LIMIT = "max_steps"
LEFT_OUT = (
    "JaxRobotarium",  # needs another package
    "LearnedPolicyEnemySMAX",  # needs a policy
    "storm",  # has other shapes than its spaces say
    "ant",  # this one and those below are deprecated, and use brax's own environments
    "halfcheetah",
    "hopper",
    "humanoid",
    "walker2d",
)
ENDLESS = ("overcooked", "coin_game")  # environments that only their time limits end


def ids() -> list[str]:
    known = import_package("jaxmarl.registration").registered_envs
    return [env_id for env_id in known if not env_id.startswith(LEFT_OUT)]


class SuiteEnv(Env):
    """One of jaxmarl's environments, with a time limit.

    The limit truncates the `ENDLESS` ones, which never terminate.
    """

    def __init__(self, name: str, env_id: str, env_params: dict[str, Any]):
        jaxmarl = import_package("jaxmarl")
        inner = jaxmarl.make(env_id)
        known = settable(type(inner))
        if hasattr(inner, LIMIT):
            known[LIMIT] = inner.max_steps
        params = changed_params(name, known, env_params)
        limit = params.pop(LIMIT, None)
        inner = jaxmarl.make(env_id, **params)
        if not limit:  # it may follow from other parameters
            limit = getattr(inner, LIMIT, 0)
        if hasattr(inner, "num_outer_steps"):
            limit = inner.num_inner_steps * inner.num_outer_steps
        self._endless = env_id.startswith(ENDLESS)
        # Their own limit is never reached, except in overcooked, which shows how near it is
        their_limit = limit if self._endless else limit + 1
        wrapped = getattr(inner, "_env", inner)  # in games against a heuristic
        for env in (inner, wrapped):
            if hasattr(env, LIMIT):
                env.max_steps = their_limit
        obs, state = jax.eval_shape(inner.reset, jax.random.key(0))
        observations = {agent: box(obs[agent].shape) for agent in inner.agents}
        spaces = [_actions_of(inner, agent) for agent in inner.agents]
        actions = _joined(spaces)
        self._sizes = [math.prod(space.shape) for space in spaces]
        self._masks = False
        if isinstance(actions, MultiDiscrete) and _has_masks(inner, state):
            self._masks = True
            observations[MASK] = box((sum(actions.nvec),), 0.0, 1.0)
        if isinstance(actions, Leaf):
            owners = np.repeat(np.arange(len(spaces)), self._sizes)
            self.agents = tuple(owners.tolist())
        super().__init__(name, inner, observations, actions, limit)

    def begin(self, key: jax.Array) -> tuple[Any, Any]:
        obs, state = self.inner.reset(key)
        return self._observed(obs, state), (state, 0)

    def advance(self, key: jax.Array, state: Any, action: Any) -> Step:
        if isinstance(self.action_space, Box):
            action = jnp.split(action, np.cumsum(self._sizes)[:-1])
        actions = {agent: action[index] for index, agent in enumerate(self.inner.agents)}
        obs, inner_state, rewards, dones, _ = self.inner.step_env(key, state[0], actions)
        time = state[1] + 1
        return Step(
            obs=self._observed(obs, inner_state),
            state=(inner_state, time),
            reward=reduce(operator.add, [rewards[agent] for agent in self.inner.agents]),
            terminated=jnp.asarray(not self._endless and dones["__all__"]),
            truncated=jnp.asarray(0 < self.declared_steps <= time),
        )

    def frame(self, state: Any) -> np.ndarray | None:
        particles = state[0]
        if not hasattr(particles, "p_pos") or not hasattr(self.inner, "landmarks"):
            return None
        return plane_of_particles(self.inner, particles)

    def _observed(self, obs: dict[str, jax.Array], state: Any) -> dict[str, jax.Array]:
        agents = self.inner.agents
        observed = {agent: obs[agent] for agent in agents}
        if self._masks:
            legal = self.inner.get_avail_actions(state)
            masks = [jnp.asarray(legal[agent], bool) for agent in agents]
            observed[MASK] = jnp.concatenate(masks)
        return observed


def _has_masks(inner: Any, state: Any) -> bool:
    """True if the environment knows which actions are legal."""
    try:
        return bool(jax.eval_shape(inner.get_avail_actions, state))
    except NotImplementedError:
        return False


COLORS = {
    "agent": "#0072B2",
    "adversary": "#D55E00",
    "leadadversary": "#CC79A7",
    "landmark": "#8A9099",
    "food": "#009E73",
    "forest": "#F0E442",
    "speaker": "#D55E00",
    "listener": "#0072B2",
    "eve": "#D55E00",
    "alice": "#0072B2",
    "bob": "#56B4E9",
}
OTHER = "#FFFFFF"  # colour of other kinds of particles


def plane_of_particles(inner: Any, state: Any) -> np.ndarray:
    """Draw the particles of MPE and the words that they say, [H, W, 3] in bytes.

    Args:
        inner: jaxmarl's environment, with the names of `agents` and `landmarks`, and `rad`, the
            radius of each of them.
        state: its state. `p_pos` [N, 2] are the places of the agents and then of the landmarks, `c`
            [agents, words] are the words that agents say, and `goal` is the number of a landmark,
            or one for each agent, or None.
    """
    places = np.asarray(state.p_pos, float)
    radii = np.asarray(inner.rad, float)
    goal = getattr(state, "goal", None)
    goals = set() if goal is None else set(np.ravel(goal).tolist())
    circles = []
    for names, first in ((inner.agents, 0), (inner.landmarks, len(inner.agents))):
        for index, name in enumerate(names):
            kind = _kind_of(name)
            circle = Circle(
                name=name,
                kind=kind,
                color=COLORS.get(kind, OTHER),
                center=tuple(places[first + index].tolist()),
                radius=float(radii[first + index]),
                name_above=first == 0,
                in_ring=first > 0 and index in goals,
            )
            circles.append(circle)
    return plane_frame(circles, ring="goal", notes=_words(inner, state))


def _kind_of(name: str) -> str:
    """A name such as agent_0 without its number."""
    return name.rstrip("0123456789").rstrip("_ ") or name


def _words(inner: Any, state: Any) -> list[str]:
    """A note for each agent that speaks, with the index of its word: that of the largest number."""
    messages = getattr(state, "c", None)
    silent = getattr(inner, "silent", None)
    if messages is None or silent is None or not np.size(messages):
        return []
    notes = []
    for index in np.flatnonzero(np.asarray(silent) == 0):
        message = messages[index]
        if np.any(message):
            notes.append(f"{inner.agents[index]} says {np.argmax(message)}")
    return notes


def _actions_of(inner: Any, agent: str) -> Leaf:
    """The action space of an agent.

    Raises:
        ValueError: it is none of Discrete, MultiDiscrete and Box.
    """
    what = f"action space of {agent}"
    space = convert(inner.action_space(agent), what)
    if not isinstance(space, Leaf):
        raise ValueError(f"{what} {space} is not supported: it must have one part")
    return space


def _joined(actions: list[Leaf]) -> Space:
    """Join the action spaces of all agents: choices or vectors one after another, or a tuple."""
    if are_all(actions, Discrete):
        return MultiDiscrete(tuple(space.n for space in actions))
    are_vectors = all(len(space.shape) == 1 for space in actions)
    if not are_vectors or not are_all(actions, Box):
        return tuple(actions)
    low = np.concatenate([space.low for space in actions])
    high = np.concatenate([space.high for space in actions])
    return Box(low, high, low.shape)
