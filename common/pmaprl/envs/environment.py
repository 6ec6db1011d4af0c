"""Environments that step on the device, and the contract of their suites.

`Env` is one environment as pure functions of a single instance; algorithms `vmap` and compile them.
A suite derives a class from it, with two functions, and `Env` does the rest: types, bounds of
actions, checks, and resets.

- `begin(key)` returns the first observation of an episode and its state. An observation is one
  array of numbers, bytes or bools, always of the same shape and dtype; or a dictionary or tuple of
  arrays, like its space. A state is any pytree of arrays, typed keys and Python numbers.
- `advance(key, state, action)` returns a `Step`, without a reset. The action is an integer [] in a
  Discrete space, integers [A] in a MultiDiscrete one, and floats in shape and bounds of a Box.
- A suite without a time limit of its own gets one here: count the steps in the state, up to
  `declared_steps`, the constructor's `max_steps`, which otherwise only bounds the episodes of an
  evaluation.
- A suite that can only step and reset at once has `step` instead of `advance`, as `custom.py` does.

A complete module for a suite called pond, whose states know neither time limits nor resets:

    from pmaprl.envs.environment import Env, Step
    from pmaprl.envs.spaces import Discrete, box
    from pmaprl.envs.foreign_code import import_package
    from pmaprl.envs.suite_params import changed_params, settable

    def ids():
        return import_package("pond").registered()

    class SuiteEnv(Env):
        def __init__(self, name, env_id, env_params):
            pond = import_package("pond")
            params = changed_params(name, settable(pond.Pond), env_params)
            inner = pond.create(env_id, **params)
            observations = box((inner.obs_size,))
            actions = Discrete(inner.num_actions)
            super().__init__(name, inner, observations, actions, max_steps=1_000)

        def begin(self, key):
            pond = self.inner.reset(key)
            return pond.obs, (pond, 0)

        def advance(self, key, state, action):
            pond, time = state
            pond = self.inner.step(pond, action)
            time = time + 1
            return Step(
                obs=pond.obs,
                state=(pond, time),
                reward=pond.reward,
                terminated=pond.done,
                truncated=time >= self.declared_steps,
            )
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pmaprl.cli.errors import UsageError
from pmaprl.envs import spaces
from pmaprl.envs.masks import MASK, PRIVILEGED, check_parts, has_privileged
from pmaprl.envs.numbers import cast
from pmaprl.envs.spaces import (
    Box,
    Discrete,
    EnvSpec,
    HasSpaces,
    choices_of,
    has_channels_first,
    is_image,
    leaves,
)
from pmaprl.envs.suite_params import is_number

DEFAULT_HORIZON = 1_000  # for environments that declare no `max_steps`
LONGEST_HORIZON = 27_000  # an evaluation has to end, whatever an environment declares


class Step(NamedTuple):
    """One step of one environment.

    `advance` returns it without a reset, and `Env.step` with one if the step ended an episode.
    """

    obs: Any  # the true next observation; after a reset the first one of the next episode
    state: Any  # the next state; after a reset the first one of the next episode
    reward: jax.Array  # [] any number; float32 from `Env.step`
    # [] bool: over by its own rules, truncated or not; nothing follows, no value is bootstrapped
    terminated: jax.Array
    # [] bool: cut by a time limit; the value of the true next observation stands for the rest
    truncated: jax.Array
    # Dictionary whose finite numbers [] are for --log-info; from `Env.step` only the logged ones
    info: Any = None
    final_obs: Any = None  # from `Env.step` the true next observation, never that of a reset
    # True next state; the state before it if only the environment's own reset knows it
    final_state: Any = None

    def continued(self, obs: Any, state: Any) -> "Step":
        """Continue after a step without a reset from these values, which a reset may give."""
        return self._replace(obs=obs, state=state, final_obs=self.obs, final_state=self.state)


class Env:
    """One environment: pure functions of a single instance, to be vmapped.

    The text of the module says how a suite derives from it.
    """

    cheap_reset = False  # True: an accelerator computes a reset in every step, which is faster
    resets_itself = False  # True: it has no `advance`, but a `step` that includes the reset
    # True: refuse spaces of other shapes than observations have, and types that a step would cut to
    # those of a reset; suites are known to be right
    is_of_user = False
    is_game = False  # True: it has other players, see `against`, and a return above 0 is a win
    # In teams with one reward: the agent that owns each action component
    agents: tuple[int, ...] = ()
    # Names of an observation's numbers, or of a map's channels, for pictures
    obs_names: tuple[str, ...] = ()
    shows_numbers = False  # True: a `frame` depends on `numbers`, such as the length of a pole
    info_numbers: tuple[str, ...] = ()  # entries of its `info` that are numbers
    # Entries of `info` that a step returns, by metric; None: all of `info_numbers`
    logged: dict[str, str] | None = None

    def __init__(
        self, name: str, inner: Any, observation_space: Any, action_space: Any, max_steps: int = 0
    ):
        """Check an environment by tracing `begin` and `advance`.

        Args:
            name: the user's name for it.
            inner: the suite's own object.
            observation_space: a space of ours, gymnax's or gymnasium's.
            action_space: a space of ours, gymnax's or gymnasium's.
            max_steps: bounds an episode of an evaluation, in steps; 0: nothing is known.

        Raises:
            UsageError: `begin` or `advance` returns something that does not fit.
            ValueError: a space is not supported.
        """
        self.name = name
        self.inner = inner
        self.declared_steps = max_steps
        self.max_steps = min(max_steps if max_steps > 0 else DEFAULT_HORIZON, LONGEST_HORIZON)
        self.observation_space = spaces.convert(observation_space, "observation space")
        self.action_space = spaces.convert(action_space, "action space")
        key = jax.random.key(0)
        obs, self.state_shape = jax.eval_shape(self.reset, key)
        self.observation_space, self.obs_dtype = spaces.as_seen(
            name, self.observation_space, obs, may_differ=not self.is_of_user
        )
        action = jax.eval_shape(lambda key: spaces.sample(key, self.action_space), key)
        step = jax.eval_shape(self.step, key, self.state_shape, action)  # checks what it returns
        self.info_numbers = tuple(step.info or ())
        self.logged = {}

    def begin(self, key: jax.Array) -> tuple[Any, Any]:
        """Begin an episode. A suite defines this.

        Args:
            key: a random key.

        Returns:
            The first observation and state.
        """
        raise NotImplementedError

    def advance(self, key: jax.Array, state: Any, action: jax.Array) -> Step:
        """Step without a reset. A suite defines this.

        Args:
            key: a random key.
            state: the state of `begin` or of the step before.
            action: [] or [A] integers, or floats in shape and bounds of a Box.
        """
        raise NotImplementedError

    def frame(self, state: Any) -> np.ndarray | None:
        """Draw a state by the suite's own renderer.

        Args:
            state: a state on the host.

        Returns:
            A picture [H, W, 3] in bytes; None if the suite has no renderer.
        """
        return None

    def against(self, opponent: Callable[[jax.Array, Any], jax.Array]) -> "Env":
        """The same game with other players, who would act at random.

        Args:
            opponent: a function of a key and an observation that returns an action.
        """
        raise NotImplementedError

    def with_numbers(self, numbers: dict[str, jax.Array]) -> "Env":
        """The same environment with other values [] of some of its `numbers`."""
        raise NotImplementedError

    @property
    def numbers(self) -> Mapping[str, float]:
        """Parameters that `with_numbers` can change, and their values."""
        return {}

    @property
    def spec(self) -> EnvSpec:
        return EnvSpec(
            name=self.name,
            observation_space=self.observation_space,
            obs_dtype=self.obs_dtype,
            action_space=self.action_space,
        )

    def reset(self, key: jax.Array) -> tuple[Any, Any]:
        """Begin an episode.

        Args:
            key: a random key.

        Returns:
            The first observation and state.
        """
        obs, state = self.begin(key)
        returned = f"environment {self.name}: reset returned"

        def typed(x: Any) -> jax.Array:
            # Python numbers in the state become strongly typed, as they are after a step
            return as_type(x, jnp.result_type(x), returned)

        return jax.tree.map(typed, (spaces.plain(obs), state))

    def step(self, key: jax.Array, state: Any, action: jax.Array) -> Step:
        """Step, and reset if that ends the episode.

        Args:
            key: a random key.
            state: the state of `reset` or of the step before.
            action: [] or [A]; actions of a Box may be flat, and are clipped.
        """
        advance_key, reset_key = jax.random.split(key)
        reached = self.advance_checked(advance_key, state, action)
        over = reached.terminated | reached.truncated
        begun = self.reset(reset_key)
        obs, state = select(over, begun, (reached.obs, reached.state))
        return reached.continued(obs, state)

    def advance_checked(self, key: jax.Array, state: Any, action: jax.Array) -> Step:
        """Step without a reset, in the dtypes of `reset` and `Step`.

        Args:
            key: a random key.
            state: the state of `reset` or of the step before.
            action: [] or [A]; actions of a Box may be flat, and are clipped.
        """
        clipped = spaces.clip(action, self.action_space)
        return self.checked(self.advance(key, state, clipped))

    def checked(self, reached: Step) -> Step:
        """Convert a step to the dtypes of `reset` and `Step`.

        Raises:
            UsageError: a shape or a type is wrong.
        """
        state = jax.tree.map_with_path(self._checked_state, reached.state, self.state_shape)
        reward = self._checked_array("reward", reached.reward, jnp.float32)
        terminated = self._checked_array("terminated", reached.terminated, bool)
        truncated = self._checked_array("truncated", reached.truncated, bool)
        info = reached.info if isinstance(reached.info, Mapping) else {}
        self._check_mask(info)
        logged = self.logged
        if logged is None:
            logged = {name: name for name, value in info.items() if is_number(value)}
        numbers = {
            metric: self._checked_array(entry, info[entry], jnp.float32)
            for metric, entry in logged.items()
        }
        return Step(
            obs=self.checked_obs("obs", reached.obs),
            state=state,
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            info=numbers,
        )

    def _check_mask(self, info: Mapping[str, Any]) -> None:
        """Raise UsageError if an info has a mask of legal actions that is not observed."""
        observed = self.observation_space
        is_observed = isinstance(observed, Mapping) and MASK in observed
        if MASK in info and not is_observed and choices_of(self.action_space):
            raise UsageError(
                f"environment {self.name}: step returned an {MASK} in its info, where nobody looks "
                f'for it: let observations be a dictionary with an "{MASK}"'
            )

    def checked_obs(self, what: str, obs: Any) -> Any:
        """Convert an observation to the types of `reset`.

        Args:
            what: name of the observation in messages.
            obs: the observation.

        Raises:
            UsageError: it has another structure, other shapes, or types that would be cut.
        """
        obs = spaces.plain(obs)
        like = self.spec.obs_like
        structure = jax.tree.structure(obs)
        expected = jax.tree.structure(like)
        if structure != expected:
            raise UsageError(
                f"environment {self.name}: step returned {what} of structure {structure} instead "
                f"of {expected}"
            )

        def checked(x: Any, like: jax.ShapeDtypeStruct) -> jax.Array:
            if self.is_of_user:
                self._check_kept(what, jnp.result_type(x), like.dtype)
            return self._checked_array(what, x, like.dtype, like.shape)

        return jax.tree.map(checked, obs, like)

    def _checked_state(self, path: Any, new: Any, old: jax.ShapeDtypeStruct) -> jax.Array:
        name = f"state{jax.tree_util.keystr(path)}"
        shape = jnp.shape(new)
        if shape != old.shape:
            raise UsageError(
                f"environment {self.name}: step returned {name} of shape {shape}, and reset of "
                f"shape {old.shape}: shapes must stay"
            )
        if self.is_of_user:
            self._check_kept(name, jnp.result_type(new), old.dtype)
        return as_type(new, old.dtype, f"environment {self.name}: step returned {name}")

    def _check_kept(self, what: str, dtype: Any, first_dtype: Any) -> None:
        """Raise UsageError if the type of `reset` does not hold the numbers of a step's type."""
        if not keeps(first_dtype, dtype):
            raise UsageError(
                f"environment {self.name}: step returned {what} of type {dtype}, which is cut to "
                f"the {first_dtype} that reset returned: let reset return {dtype}, or step "
                f"{first_dtype}"
            )

    def _checked_array(
        self, what: str, value: Any, dtype: Any, shape: tuple[int, ...] = ()
    ) -> jax.Array:
        returned = f"environment {self.name}: step returned {what}"
        array = on_device(value, returned)
        if jnp.issubdtype(array.dtype, jax.dtypes.extended):
            raise UsageError(f"{returned} of type {array.dtype}, which is no number")
        if dtype is bool and array.dtype != bool:  # which may be neither 0 nor 1
            raise UsageError(
                f"{returned} of type {array.dtype}, not true or false: return {what} != 0"
            )
        if array.shape != shape:
            raise UsageError(f"{returned} of shape {array.shape} instead of {shape}")
        if array.dtype.kind == "c":
            raise UsageError(f"{returned} of type {array.dtype}, not real numbers")
        return array.astype(dtype)


def keeps(wide: Any, dtype: Any) -> bool:
    """True if a type holds the numbers of another one.

    float32 counts as holding whole numbers, though it rounds them to 24 bits.
    """
    if wide == dtype:
        return True
    if any(jnp.issubdtype(x, jax.dtypes.extended) for x in (wide, dtype)):  # such as keys
        return False
    if jnp.issubdtype(wide, jnp.integer) and jnp.issubdtype(dtype, jnp.integer):
        old = jnp.iinfo(wide)
        new = jnp.iinfo(dtype)
        return old.min <= new.min and new.max <= old.max
    if jnp.issubdtype(wide, jnp.floating) and jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits <= jnp.finfo(wide).nmant or wide == np.float32
    if jnp.issubdtype(wide, jnp.floating) and jnp.issubdtype(dtype, jnp.floating):
        old = jnp.finfo(wide)
        new = jnp.finfo(dtype)
        has_range = float(old.min) <= float(new.min) and float(new.max) <= float(old.max)
        return has_range and new.nmant <= old.nmant
    return _kind(dtype) <= _kind(wide)


def _kind(dtype: Any) -> int:
    """Index of a type's kind, of which each holds those before it."""
    kinds = jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating
    return next(index for index, kind in enumerate(kinds) if jnp.issubdtype(dtype, kind))


def as_type(x: Any, dtype: Any, returned: str) -> jax.Array:
    """Convert `x` to an array of this type; typed keys, which nothing converts, stay as they are.

    Raises:
        UsageError: see `on_device`.
    """
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return x
    return on_device(x, returned).astype(dtype)


def on_device(x: Any, returned: str) -> jax.Array:
    """Convert `x` to an array of at most 32 bits.

    Args:
        x: an array or a number.
        returned: beginning of the error, such as "environment NAME: step returned reward".

    Raises:
        UsageError: 32 bits do not hold a number. JAX would let NumPy's numbers of 64 bits wrap.
    """
    is_numpy = isinstance(x, np.ndarray | np.generic)
    if is_numpy and x.dtype.kind in "iuf" and x.dtype.itemsize == 8:
        try:
            return jnp.asarray(cast(np.asarray(x), np.dtype(f"{x.dtype.kind}4")))
        except OverflowError as error:
            raise UsageError(f"{returned} {error}") from None
    return jnp.asarray(x)


def select(condition: jax.Array, yes: Any, no: Any) -> Any:
    """`jnp.where` on the arrays of two trees of the same structure."""
    return jax.tree.map(lambda yes, no: jnp.where(condition, yes, no), yes, no)


def check_spaces(args: Any, env: HasSpaces) -> None:
    """Raise UsageError if a mask, or a flag of the algorithm, does not fit an environment."""
    check_parts(env)
    if getattr(args, "share_torso", False) and has_privileged(env.observation_space):
        raise UsageError(
            f"--share-torso would hide the {PRIVILEGED} of {env.name} from the critic, for "
            "whom it is"
        )
    has_images = any(is_image(leaf) for _, leaf in leaves(env.observation_space))
    has_boxes = any(isinstance(leaf, Box) for _, leaf in leaves(env.action_space))
    normalizes = getattr(args, "normalize_obs", False)
    if normalizes and not _has_arrays(env) and not type(args).normalize_obs:
        raise UsageError(
            f"--normalize-obs needs arrays as observations, {env.name} has {env.observation_space}"
        )
    if getattr(args, "encoder", "") in ("nature", "impala") and not has_images:
        raise UsageError(
            f"--encoder {args.encoder} needs images, and {env.name} has {env.observation_space}"
        )
    if getattr(args, "image_scale", 1.0) != 1 and not has_images:
        raise UsageError(
            f"--image-scale {args.image_scale} needs images, {env.name} has {env.observation_space}"
        )
    if getattr(args, "exploration_loss", "") == "symmetric-kl" and has_boxes:
        raise UsageError(
            "--exploration-loss symmetric-kl needs discrete actions: there is no uniform "
            "policy on a Box"
        )


def channels_in_front(env: Env) -> str:
    """Say which images of a user's environment seem to be [C, H, W]; "" if none do."""
    found = [
        f"{name} {leaf}".strip()
        for name, leaf in leaves(env.observation_space)
        if env.is_of_user and has_channels_first(leaf)
    ]
    if not found:
        return ""
    return (
        f"{', '.join(found)} seems to have its channels first, and networks take images as "
        "[height, width, channels]: transpose it"
    )


def defaults_left_off(args: Any, env: HasSpaces) -> dict[str, str]:
    """Notes for the header of a run on default flags that do nothing in this environment.

    Args:
        args: flags of the run. `check_spaces` has refused those that the user has set in vain.
        env: the environment.
    """
    if getattr(args, "normalize_obs", False) and not _has_arrays(env):
        return {"without": f"--normalize-obs, the default: {env.name} has no arrays to normalize"}
    return {}


def _has_arrays(env: HasSpaces) -> bool:
    return any(isinstance(leaf, Box) for _, leaf in leaves(env.observation_space))


def check_discrete(
    env: HasSpaces, instead: str, needs: str = "Q-learning needs Discrete actions"
) -> Discrete:
    """Return the space of actions. Raise UsageError unless it is Discrete, of two or more.

    Args:
        env: the environment.
        instead: algorithms that can train on it.
        needs: beginning of the error.
    """
    space = env.action_space
    if not isinstance(space, Discrete) or space.n == 1:
        raise UsageError(
            f"{needs}, two or more, and {env.name} has {space}; {instead} can train on it"
        )
    return space


SquashableSpace = Discrete | Box
"""Space of the actions of SAC, which squashes those of a Box."""


def check_squashable(env: HasSpaces, instead: str) -> SquashableSpace:
    """Return the space of actions.

    Raise UsageError unless it is Discrete, of two or more, or a finite Box.

    Args:
        env: the environment.
        instead: algorithms that can train on it.
    """
    space = env.action_space
    if not isinstance(space, Box):
        return check_discrete(env, instead, "SAC needs a Box or Discrete actions")
    with np.errstate(over="ignore", invalid="ignore"):
        finite = np.isfinite(space.high - space.low)
    if not (finite & (space.low < space.high)).all():
        bounds = f"{np.ravel(space.low)} to {np.ravel(space.high)}"
        raise UsageError(
            f"SAC squashes actions between bounds, and those of {env.name} are {bounds}: "
            "each must be finite, as must their difference, the lower below the upper; "
            f"{instead} can train on it"
        )
    return space
