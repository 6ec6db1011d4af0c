"""jaxmarl's environments: `jaxmarl:MPE_simple_spread_v3`. All agents act as one, for the sum of
their rewards.
"""

import math
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pmaprl.envs.environment import Env, Step
from pmaprl.envs.masks import MASK
from pmaprl.envs.spaces import Box, Discrete, Leaf, MultiDiscrete, Space, box, convert
from pmaprl.envs.suite_tools import changed_params, import_package, settable
from pmaprl.suites.tools.plane import Circle, plane_frame

LIMIT = "max_steps"
LEFT_OUT = (
    "JaxRobotarium",  # another package
    "LearnedPolicyEnemySMAX",  # wants a policy
    "storm",  # other shapes than its spaces say
    # Deprecated, on brax's own environments
    *("ant", "halfcheetah", "hopper", "humanoid", "walker2d"),
)
ENDLESS = ("overcooked", "coin_game")  # which end with their time limits alone


def ids() -> list[str]:
    known = import_package("jaxmarl.registration").registered_envs
    return [env_id for env_id in known if not env_id.startswith(LEFT_OUT)]


class SuiteEnv(Env):
    """One of jaxmarl's, with a time limit. The `ENDLESS` ones are cut by it, and never over."""

    def __init__(self, name: str, env_id: str, env_params: dict[str, Any]):
        jaxmarl = import_package("jaxmarl")
        inner = jaxmarl.make(env_id)
        known = settable(type(inner)) | ({LIMIT: inner.max_steps} if hasattr(inner, LIMIT) else {})
        params = changed_params(name, known, env_params)
        limit = params.pop(LIMIT, None)
        inner = jaxmarl.make(env_id, **params)
        limit = limit or getattr(inner, LIMIT, 0)  # which may follow from other parameters
        if hasattr(inner, "num_outer_steps"):
            limit = inner.num_inner_steps * inner.num_outer_steps
        self._endless = env_id.startswith(ENDLESS)
        for one in (inner, getattr(inner, "_env", None)):  # wrapped, in games against a heuristic
            if hasattr(one, LIMIT):
                # Never reached; overcooked shows how near it is
                one.max_steps = limit + (not self._endless)
        obs, state = jax.eval_shape(inner.reset, jax.random.key(0))
        seen = {agent: box(obs[agent].shape) for agent in inner.agents}
        spaces = [
            convert(inner.action_space(agent), f"action space of {agent}") for agent in inner.agents
        ]
        actions = _joined(spaces)
        self._sizes = [math.prod(space.shape) for space in spaces]
        self._masks = False
        with suppress(NotImplementedError):
            self._masks = isinstance(actions, MultiDiscrete) and bool(
                jax.eval_shape(inner.get_avail_actions, state)
            )
        if self._masks:
            seen[MASK] = box((sum(actions.nvec),), 0.0, 1.0)
        if isinstance(actions, Leaf):
            self.agents = tuple(np.repeat(np.arange(len(spaces)), self._sizes).tolist())
        super().__init__(name, inner, seen, actions, limit)

    def begin(self, key: jax.Array) -> tuple[Any, Any]:
        obs, state = self.inner.reset(key)
        return self._observed(obs, state), (state, 0)

    def advance(self, key: jax.Array, state: Any, action: Any) -> Step:
        if isinstance(self.action_space, Box):
            action = jnp.split(action, np.cumsum(self._sizes)[:-1])
        actions = {agent: action[index] for index, agent in enumerate(self.inner.agents)}
        obs, inner_state, rewards, dones, _ = self.inner.step_env(key, state[0], actions)
        reward = sum(rewards[agent] for agent in self.inner.agents)
        time = state[1] + 1
        ends = not self._endless and dones["__all__"], 0 < self.declared_steps <= time
        return Step(self._observed(obs, inner_state), (inner_state, time), reward, *ends)

    def frame(self, state: Any) -> np.ndarray | None:
        is_plane = hasattr(state[0], "p_pos") and hasattr(self.inner, "landmarks")
        return plane_of_particles(self.inner, state[0]) if is_plane else None

    def _observed(self, obs: dict[str, jax.Array], state: Any) -> dict[str, jax.Array]:
        seen = {agent: obs[agent] for agent in self.inner.agents}
        if not self._masks:
            return seen
        legal = self.inner.get_avail_actions(state)
        return seen | {
            MASK: jnp.concatenate([jnp.asarray(legal[agent], bool) for agent in self.inner.agents])
        }


COLORS = {
    "agent": "#0072B2",
    "adversary": "#D55E00",
    "leadadversary": "#CC79A7",
    "landmark": "#8A9099",
}
COLORS |= {"food": "#009E73", "forest": "#F0E442", "speaker": "#D55E00", "listener": "#0072B2"}
COLORS |= {"eve": "#D55E00", "alice": "#0072B2", "bob": "#56B4E9"}
OTHER = "#FFFFFF"  # colour of another kind of particle


def plane_of_particles(inner: Any, state: Any) -> np.ndarray:
    """A picture of the particles of MPE and what they say.

    Args:
      inner: jaxmarl's environment, with the names of `agents` and `landmarks`, and `rad`, the
          radius of each of them.
      state: its state. `p_pos` [N, 2] are the places of agents and then of landmarks; `c` [agents,
        words] is what is said; `goal` is the number of a landmark, or one for each agent, or None.
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
    """What those agents say that can speak: the word with the largest number, by its place."""
    said = getattr(state, "c", None)
    silent = getattr(inner, "silent", None)
    if said is None or silent is None or not np.size(said):
        return []
    speakers = np.flatnonzero(np.asarray(silent) == 0)
    return [
        f"{inner.agents[index]} says {np.argmax(said[index])}"
        for index in speakers
        if np.any(said[index])
    ]


def _joined(actions: list[Space]) -> Space:
    """The actions of all agents, one after another where they are choices or vectors."""
    if all(isinstance(space, Discrete) for space in actions):
        return MultiDiscrete(tuple(space.n for space in actions))
    if not all(isinstance(space, Box) and len(space.shape) == 1 for space in actions):
        return tuple(actions)
    low, high = (
        np.concatenate([getattr(space, bound) for space in actions]) for bound in ("low", "high")
    )
    return Box(low, high, low.shape)
