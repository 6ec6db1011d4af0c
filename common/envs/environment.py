"""Environments that step on the device. Whoever adds a suite of them derives a class from `Env`, as described here.

`Env` is one environment as pure functions of a single instance; algorithms `vmap` and compile them. A class of a suite
gives two of them, and `Env` does the rest: types, bounds of actions, checks, and resets.

- `begin(key)` returns the first observation of an episode and its state. An observation is one array, always of the
  same shape and dtype, numbers, bytes or bools; or a dictionary or tuple of such, as its space is a Dict or Tuple. A
  state is any pytree of arrays, typed keys and Python numbers.
- `advance(key, state, action)` returns a `Transition`: one step, without a reset. The action is an integer [] where
  the space is Discrete, integers [A] where it is MultiDiscrete, and floats in shape and bounds where it is a Box.
- A suite without a time limit of its own gets one here: count the steps in the state, up to `declared_steps`, the
  constructor's `max_steps`, which otherwise only bounds the episodes of an evaluation.
- Only environments whose episodes ended compute a reset, see `common/device/rollout.py`. Where one costs no more than
  a few sums, let the class say `cheap_reset = True`: an accelerator computes those in every step, and asks nobody.
- A suite that can only step and reset in one gives `step` instead of `advance`, as `custom.py` does.

A complete module for a suite called pond, whose states know neither time limits nor resets:

    def ids():
        return import_package("pond").registered()

    class SuiteEnv(Env):
        def __init__(self, name, env_id, env_params):
            pond = import_package("pond")
            inner = pond.create(env_id, **changed_params(name, settable(pond.Pond), env_params))
            super().__init__(name, inner, box((inner.obs_size,)), Discrete(inner.num_actions), max_steps=1_000)

        def begin(self, key):
            pond = self.inner.reset(key)
            return pond.obs, (pond, 0)

        def advance(self, key, state, action):
            pond, time = self.inner.step(state[0], action), state[1] + 1
            return Transition(pond.obs, (pond, time), pond.reward, pond.done, time >= self.declared_steps)
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from common.cli.errors import UsageError
from common.envs import spaces
from common.envs.masks import PRIVILEGED, check_mask, has_privileged
from common.envs.spaces import Box, Dict, Discrete, EnvSpec, MultiDiscrete, Tuple, leaves

DEFAULT_HORIZON = 1_000  # for environments that declare no `max_steps`
LONGEST_HORIZON = 27_000  # an evaluation has to end, whatever an environment declares


class Transition(NamedTuple):
    """What `advance` returns: one step of one environment, without a reset, at the end of an episode too.

    Where both ends are true, the episode has terminated.
    """

    obs: Any  # the true next observation
    state: Any  # the true next state
    reward: jax.Array  # [], any number
    terminated: jax.Array  # [] bool: over by its own rules; nothing follows, and no value is bootstrapped
    truncated: jax.Array  # [] bool: cut by a time limit; the value of `obs` stands for the rest
    info: Any = None  # a dictionary; numbers [] in it are what --log-info can name, those that are NaN left out


class Step(NamedTuple):
    """What `Env.step` returns: one step of one environment, with the reset where it ended an episode."""

    obs: Any  # what to act on next: the next episode's first observation where this one is over
    state: Any  # likewise
    reward: jax.Array  # float32
    terminated: jax.Array  # bool
    truncated: jax.Array  # bool
    final_obs: Any  # the true next observation, never that of a reset
    final_state: Any  # the true next state; the one before where only the environment's own reset knows it
    info: Any = None  # float32: by metric, what is `logged`


class Env:
    """One environment: pure functions of a single instance, to be vmapped. See the module's text."""

    params: Any = None  # of environments that take parameters with every call, as gymnax's do
    cheap_reset = False  # whether an accelerator computes one sooner than it finds out who needs one
    resets_itself = False  # whether there is no `advance`, but a `step` with the reset in it
    is_game = False  # whether there are other players, as `against` says, and returns above 0 are games won
    agents: tuple[int, ...] = ()  # where several act for one reward: whose of them each component of an action is
    info_numbers: tuple[str, ...] = ()  # the entries of its `info` that are numbers
    logged: dict[str, str] | None = None  # by metric, the entry of `info`; None is each of `info_numbers`

    def __init__(self, name: str, inner: Any, observation_space: Any, action_space: Any, max_steps: int = 0):
        """`name` is what the user calls it, `inner` the suite's own object. Spaces may be gymnax's or gymnasium's too.

        `max_steps` bounds an episode of an evaluation; 0 where nothing is known. `begin` and `advance` are traced here.
        Raises UsageError or ValueError where spaces or what they return do not fit.
        """
        self.name, self.inner, self.declared_steps = name, inner, max_steps
        self.max_steps = min(max_steps if max_steps > 0 else DEFAULT_HORIZON, LONGEST_HORIZON)
        self.observation_space = spaces.convert(observation_space, "observation space")
        self.action_space = spaces.convert(action_space, "action space")
        obs, self.state_shape = jax.eval_shape(self.reset, jax.random.key(0))
        self.observation_space, self.obs_dtype = spaces.as_seen(name, self.observation_space, obs)
        action = jax.eval_shape(lambda key: spaces.sample(key, self.action_space), jax.random.key(0))
        stepped = jax.eval_shape(self.step, jax.random.key(0), self.state_shape, action)  # checks what it returns
        self.info_numbers, self.logged = tuple(stepped.info or ()), {}

    def begin(self, key: jax.Array) -> tuple[Any, Any]:
        """First observation and state of an episode: what a suite gives."""
        raise NotImplementedError

    def advance(self, key: jax.Array, state: Any, action: jax.Array) -> Transition:
        """One step without a reset: what a suite gives."""
        raise NotImplementedError

    def frame(self, state: Any) -> np.ndarray | None:
        """A picture [H, W, 3] of a state on the host, bytes, by the suite's own renderer; None where it has none."""
        return None

    def against(self, opponent: Callable[[jax.Array, Any], jax.Array]) -> "Env":
        """The same game with others who act by `opponent`, of a key and an observation; before, they act at random."""
        raise NotImplementedError

    @property
    def numbers(self) -> dict[str, float]:
        """Parameters that `with_numbers` can change, and what they are."""
        return {}

    def with_numbers(self, numbers: dict[str, jax.Array]) -> "Env":
        """The same with other values, arrays [], of some of its `numbers`."""
        raise NotImplementedError

    def without_numbers(self, state: Any) -> Any:
        """A state as `frame` and pictures take it."""
        return state

    @property
    def spec(self) -> EnvSpec:
        return EnvSpec(self.name, self.observation_space, self.obs_dtype, self.action_space)

    @property
    def obs_like(self) -> Any:
        """Shape and type of an observation."""
        return self.spec.obs_like

    def example_obs(self, *batch: int) -> Any:
        """A batch of observations, all zeros."""
        return self.spec.example_obs(*batch)

    def reset(self, key: jax.Array) -> tuple[Any, Any]:
        """First observation and state of an episode."""
        # Python numbers in the state become strongly typed, as they are after a step
        obs, state = self.begin(key)
        return jax.tree.map(lambda x: as_type(x, jnp.result_type(x)), (spaces.plain(obs), state))

    def step(self, key: jax.Array, state: Any, action: jax.Array) -> Step:
        """One step, with the reset included where it ended the episode. Box actions may come flat, and are clipped."""
        advance_key, reset_key = jax.random.split(key)
        reached = self.advance_checked(advance_key, state, action)
        over = reached.terminated | reached.truncated
        obs, next_state = select(over, self.reset(reset_key), (reached.obs, reached.state))
        return stepped(reached, obs, next_state)

    def advance_checked(self, key: jax.Array, state: Any, action: jax.Array) -> Transition:
        """One step without a reset, in the dtypes of `reset` and `Step`. Box actions may come flat, and are clipped."""
        action = spaces.clip(action, self.action_space)
        return self.checked(self.advance(key, state, action))

    def checked(self, transition: Transition) -> Transition:
        """`transition` in the dtypes of `reset` and `Step`. Raises UsageError where a shape is wrong."""
        obs, state, *outcome, info = transition
        obs = self.checked_obs("obs", obs)
        state = jax.tree.map(lambda new, old: as_type(new, old.dtype), state, self.state_shape)
        dtypes = {"reward": jnp.float32, "terminated": bool, "truncated": bool}
        outcome = [self.checked_array(*one) for one in zip(dtypes, outcome, dtypes.values(), strict=True)]
        return Transition(obs, state, *outcome, self._logged(info if isinstance(info, Mapping) else {}))

    def _logged(self, info: Mapping[str, Any]) -> dict[str, jax.Array]:
        logged = {name: name for name, x in info.items() if spaces.is_number(x)} if self.logged is None else self.logged
        return {metric: self.checked_array(entry, info[entry], jnp.float32) for metric, entry in logged.items()}

    def checked_obs(self, what: str, obs: Any) -> Any:
        """An observation in the types of `reset`. Raises UsageError, naming `what` it is, where it has other shapes."""
        obs, wanted = spaces.plain(obs), jax.tree.structure(self.obs_like)
        if (found := jax.tree.structure(obs)) != wanted:
            raise UsageError(f"environment {self.name}: step returned {what} of structure {found} instead of {wanted}")
        return jax.tree.map(lambda x, like: self.checked_array(what, x, like.dtype, like.shape), obs, self.obs_like)

    def checked_array(self, what: str, value: Any, dtype: Any, shape: tuple[int, ...] = ()) -> jax.Array:
        """`value` as an array of `dtype`. Raises UsageError, naming `what` it is, where shape or kind are others."""
        array = jnp.asarray(value)
        if dtype is bool and array.dtype.kind == "f":  # which may be a fraction
            raise UsageError(f"environment {self.name}: step returned {what} of type {array.dtype}, not true or false")
        array = array.astype(dtype)
        if array.shape != shape:
            raise UsageError(f"environment {self.name}: step returned {what} of shape {array.shape} instead of {shape}")
        return array


class Wrapper(Env):
    """Another environment, `wrapped`, of which a subclass changes observations or states."""

    def __init__(self, name: str, wrapped: Env, observation_space: Any):
        self.wrapped, self.cheap_reset, self.params = wrapped, wrapped.cheap_reset, wrapped.params
        super().__init__(name, wrapped.inner, observation_space, wrapped.action_space, wrapped.declared_steps)

    @property
    def numbers(self) -> dict[str, float]:
        return self.wrapped.numbers

    def with_numbers(self, numbers: dict[str, jax.Array]) -> Env:
        other = copy.copy(self)
        other.wrapped = self.wrapped.with_numbers(numbers)
        return other

    def frame(self, state: Any) -> np.ndarray | None:
        return self.wrapped.frame(state)


def stepped(reached: Transition, obs: Any, state: Any) -> Step:
    """A step that has `reached` something, and goes on with these, those of a reset where an episode ended."""
    outcome = reached.reward, reached.terminated, reached.truncated
    return Step(obs, state, *outcome, reached.obs, reached.state, reached.info)


def as_type(x: Any, dtype: Any) -> jax.Array:
    """`x` as an array of this type; typed keys, which nothing converts, as they are."""
    return x if jnp.issubdtype(dtype, jax.dtypes.prng_key) else jnp.asarray(x).astype(dtype)


def select(condition: jax.Array, yes: Any, no: Any) -> Any:
    """`jnp.where` on the arrays of two trees of the same structure."""
    return jax.tree.map(lambda yes, no: jnp.where(condition, yes, no), yes, no)


def check_spaces(args: Any, env: Any) -> None:
    """Raise UsageError where a flag, or a mask, does not fit the spaces of an environment, or of its EnvSpec.

    A flag that an algorithm lacks asks for nothing.
    """
    check_mask(env)
    if getattr(args, "share_torso", False) and has_privileged(env.observation_space):
        raise UsageError(f"--share-torso would hide the {PRIVILEGED} of {env.name} from the critic, for whom it is")
    has_array = any(isinstance(leaf, Box) for _, leaf in leaves(env.observation_space))
    if getattr(args, "normalize_obs", False) and not has_array:
        raise UsageError(f"--normalize-obs needs arrays as observations, {env.name} has {env.observation_space}")
    has_box = any(isinstance(leaf, Box) for _, leaf in leaves(env.action_space))
    if getattr(args, "exploration_loss", "") == "symmetric-kl" and has_box:
        raise UsageError("--exploration-loss symmetric-kl needs discrete actions: there is no uniform policy on a Box")


def check_discrete(env: Any, instead: str) -> None:
    """Raise UsageError unless actions are Discrete, two or more, as Q-learning needs them. It names what to take
    `instead`.
    """
    if not isinstance(env.action_space, Discrete) or env.action_space.n == 1:
        needs = f"Q-learning needs Discrete actions, two or more, and {env.name} has {env.action_space}"
        raise UsageError(f"{needs}; {instead} can train on it")


def check_squashable(env: Any, instead: str) -> None:
    """Raise UsageError unless actions are Discrete, two or more, or a Box with finite bounds, as SAC needs them.

    It names what to take `instead`.
    """
    space = env.action_space
    if isinstance(space, (MultiDiscrete, Dict, Tuple)):
        raise UsageError(f"SAC acts in a Box or in Discrete actions, {env.name} has {space}; {instead} can train on it")
    if isinstance(space, Discrete):
        if space.n == 1:
            raise UsageError(f"SAC chooses among actions, and {env.name} has only one; {instead} can train on it")
        return
    if not (np.isfinite(space.low) & np.isfinite(space.high) & (space.low < space.high)).all():
        raise UsageError(
            f"SAC squashes actions between bounds, and those of {env.name} are {np.ravel(space.low)} to "
            f"{np.ravel(space.high)}: each must be finite, the lower below the upper; {instead} can train on it"
        )
