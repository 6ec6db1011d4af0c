"""Environments that step on the device. Whoever adds a suite of them derives a class from `Env`, as
described here.

`Env` is one environment as pure functions of a single instance; algorithms `vmap` and compile them.
A class of a suite gives two of them, and `Env` does the rest: types, bounds of actions, checks, and
resets.

- `begin(key)` returns the first observation of an episode and its state. An observation is one
  array, always of the same shape and dtype, numbers, bytes or bools; or a dictionary or tuple of
  such, as its space is. A state is any pytree of arrays, typed keys and Python numbers.
- `advance(key, state, action)` returns a `Step`, without a reset. The action is an integer [] where
  the space is Discrete, integers [A] where it is MultiDiscrete, and floats in shape and bounds
  where it is a Box.
- A suite without a time limit of its own gets one here: count the steps in the state, up to
  `declared_steps`, the constructor's `max_steps`, which otherwise only bounds the episodes of an
  evaluation.
- A suite that can only step and reset in one gives `step` instead of `advance`, as `custom.py`
  does.

A complete module for a suite called pond, whose states know neither time limits nor resets:

    from pmaprl.envs.environment import Env, Step
    from pmaprl.envs.spaces import Discrete, box
    from pmaprl.envs.suite_tools import changed_params, import_package, settable

    def ids():
        return import_package("pond").registered()

    class SuiteEnv(Env):
        def __init__(self, name, env_id, env_params):
            pond = import_package("pond")
            inner = pond.create(env_id, **changed_params(name, settable(pond.Pond), env_params))
            observed, acted = box((inner.obs_size,)), Discrete(inner.num_actions)
            super().__init__(name, inner, observed, acted, max_steps=1_000)

        def begin(self, key):
            pond = self.inner.reset(key)
            return pond.obs, (pond, 0)

        def advance(self, key, state, action):
            pond, time = self.inner.step(state[0], action), state[1] + 1
            return Step(pond.obs, (pond, time), pond.reward, pond.done, time >= self.declared_steps)
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pmaprl.cli.errors import UsageError
from pmaprl.envs import spaces
from pmaprl.envs.masks import PRIVILEGED, check_parts, has_privileged
from pmaprl.envs.numbers import cast
from pmaprl.envs.spaces import Box, Discrete, EnvSpec, is_image, leaves
from pmaprl.envs.suite_tools import is_number

DEFAULT_HORIZON = 1_000  # for environments that declare no `max_steps`
LONGEST_HORIZON = 27_000  # an evaluation has to end, whatever an environment declares


class Step(NamedTuple):
    """One step of one environment: of `advance` without a reset, of `Env.step` with one where it
    ended an episode.
    """

    obs: Any  # the true next observation; after a reset the first one of the next episode
    state: Any  # likewise
    reward: jax.Array  # [], any number; of `Env.step` float32
    # [] bool: over by its own rules, truncated or not; nothing follows, no value is bootstrapped
    terminated: jax.Array
    # [] bool: cut by a time limit; the value of the true next observation stands for the rest
    truncated: jax.Array
    # A dictionary, in which numbers [] are for --log-info, but NaN; of `Env.step` what is `logged`
    info: Any = None
    final_obs: Any = None  # of `Env.step` the true next observation, never that of a reset
    # The true next state; the one before where only the environment's own reset knows it
    final_state: Any = None

    def continued(self, obs: Any, state: Any) -> "Step":
        """A step without a reset, which goes on with these: those of a reset where an episode
        ended.
        """
        return self._replace(obs=obs, state=state, final_obs=self.obs, final_state=self.state)


class Env:
    """One environment: pure functions of a single instance, to be vmapped. See the module's
    text.
    """

    # Whether a reset is so few sums that an accelerator had better compute one in every step
    cheap_reset = False
    resets_itself = False  # whether there is no `advance`, but a `step` with the reset in it
    # Whether types that a step cuts to those of a reset are refused; suites are known to be right
    is_of_user = False
    # Whether there are other players, as `against` says, and returns above 0 are games won
    is_game = False
    # Where several act for one reward: whose of them each component of an action is
    agents: tuple[int, ...] = ()
    # Parameters that `with_numbers` can change, and what they are
    numbers: Mapping[str, float] = {}
    # Of the numbers of an observation, or of the channels of a map, for pictures
    obs_names: tuple[str, ...] = ()
    # Whether a `frame` depends on its `numbers`, such as the length of a pole
    shows_numbers = False
    info_numbers: tuple[str, ...] = ()  # the entries of its `info` that are numbers
    # By metric, the entry of `info`; None is each of `info_numbers`
    logged: dict[str, str] | None = None

    def __init__(
        self, name: str, inner: Any, observation_space: Any, action_space: Any, max_steps: int = 0
    ):
        """`name` is what the user calls it, `inner` the suite's own object. Spaces may be gymnax's
        or gymnasium's too.

        `max_steps` bounds an episode of an evaluation; 0 where nothing is known. `begin` and
        `advance` are traced here. Raises UsageError or ValueError where spaces or what they return
        do not fit.
        """
        self.name = name
        self.inner = inner
        self.declared_steps = max_steps
        self.max_steps = min(max_steps if max_steps > 0 else DEFAULT_HORIZON, LONGEST_HORIZON)
        self.observation_space = spaces.convert(observation_space, "observation space")
        self.action_space = spaces.convert(action_space, "action space")
        key = jax.random.key(0)
        obs, self.state_shape = jax.eval_shape(self.reset, key)
        self.observation_space, self.obs_dtype = spaces.as_seen(name, self.observation_space, obs)
        action = jax.eval_shape(lambda key: spaces.sample(key, self.action_space), key)
        step = jax.eval_shape(self.step, key, self.state_shape, action)  # checks what it returns
        self.info_numbers = tuple(step.info or ())
        self.logged = {}

    def begin(self, key: jax.Array) -> tuple[Any, Any]:
        """First observation and state of an episode: what a suite gives."""
        raise NotImplementedError

    def advance(self, key: jax.Array, state: Any, action: jax.Array) -> Step:
        """One step without a reset: what a suite gives."""
        raise NotImplementedError

    def frame(self, state: Any) -> np.ndarray | None:
        """A picture [H, W, 3] of a state on the host, bytes, by the suite's own renderer; None
        where it has none.
        """
        return None

    def against(self, opponent: Callable[[jax.Array, Any], jax.Array]) -> "Env":
        """The same game with others who act by `opponent`, of a key and an observation; before,
        they act at random.
        """
        raise NotImplementedError

    def with_numbers(self, numbers: dict[str, jax.Array]) -> "Env":
        """The same with other values, arrays [], of some of its `numbers`."""
        raise NotImplementedError

    @property
    def spec(self) -> EnvSpec:
        return EnvSpec(
            name=self.name,
            observation_space=self.observation_space,
            obs_dtype=self.obs_dtype,
            action_space=self.action_space,
        )

    def reset(self, key: jax.Array) -> tuple[Any, Any]:
        """First observation and state of an episode."""
        # Python numbers in the state become strongly typed, as they are after a step
        obs, state = self.begin(key)
        told = f"environment {self.name}: reset returned"
        return jax.tree.map(
            lambda x: as_type(x, jnp.result_type(x), told), (spaces.plain(obs), state)
        )

    def step(self, key: jax.Array, state: Any, action: jax.Array) -> Step:
        """One step, with the reset included where it ended the episode. Box actions may come flat,
        and are clipped.
        """
        advance_key, reset_key = jax.random.split(key)
        reached = self.advance_checked(advance_key, state, action)
        over = reached.terminated | reached.truncated
        return reached.continued(*select(over, self.reset(reset_key), (reached.obs, reached.state)))

    def advance_checked(self, key: jax.Array, state: Any, action: jax.Array) -> Step:
        """One step without a reset, in the dtypes of `reset` and `Step`. Box actions may come flat,
        and are clipped.
        """
        return self.checked(self.advance(key, state, spaces.clip(action, self.action_space)))

    def checked(self, reached: Step) -> Step:
        """The same in the dtypes of `reset` and `Step`. Raises UsageError where a shape or a type
        is wrong.
        """
        state = jax.tree.map_with_path(self._checked_state, reached.state, self.state_shape)
        reward = self._checked_array("reward", reached.reward, jnp.float32)
        ends = (
            self._checked_array(end, getattr(reached, end), bool)
            for end in ("terminated", "truncated")
        )
        info = reached.info if isinstance(reached.info, Mapping) else {}
        logged = (
            {name: name for name, x in info.items() if is_number(x)}
            if self.logged is None
            else self.logged
        )
        info = {
            metric: self._checked_array(entry, info[entry], jnp.float32)
            for metric, entry in logged.items()
        }
        return Step(self.checked_obs("obs", reached.obs), state, reward, *ends, info)

    def checked_obs(self, what: str, obs: Any) -> Any:
        """An observation in the types of `reset`. Raises UsageError, naming `what` it is, where it
        has other shapes.
        """
        obs = spaces.plain(obs)
        like = self.spec.obs_like
        if (found := jax.tree.structure(obs)) != (wanted := jax.tree.structure(like)):
            raise UsageError(
                f"environment {self.name}: step returned {what} of structure {found} instead "
                f"of {wanted}"
            )
        if self.is_of_user:
            jax.tree.map(
                lambda x, like: self._check_kept(what, jnp.result_type(x), like.dtype), obs, like
            )
        return jax.tree.map(
            lambda x, like: self._checked_array(what, x, like.dtype, like.shape), obs, like
        )

    def _checked_state(self, path: Any, new: Any, old: jax.ShapeDtypeStruct) -> jax.Array:
        name = f"state{jax.tree_util.keystr(path)}"
        if (shape := jnp.shape(new)) != old.shape:
            told = f"step returned {name} of shape {shape}, and reset of shape {old.shape}"
            raise UsageError(f"environment {self.name}: {told}: shapes must stay")
        if self.is_of_user:
            self._check_kept(name, jnp.result_type(new), old.dtype)
        return as_type(new, old.dtype, f"environment {self.name}: step returned {name}")

    def _check_kept(self, what: str, dtype: Any, begun: Any) -> None:
        """Raise UsageError where numbers of a type do not survive in the type that `reset` has
        begun with.
        """
        if not keeps(begun, dtype):
            told = (
                f"step returned {what} of type {dtype}, which is cut to the {begun} that "
                "reset returned"
            )
            raise UsageError(
                f"environment {self.name}: {told}: let reset return {dtype}, or step {begun}"
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
    """Tell if a type holds the numbers of another one; float32 holds whole numbers, rounded to 24
    bits.
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
        reaches = float(old.min) <= float(new.min) and float(new.max) <= float(old.max)
        return reaches and new.nmant <= old.nmant
    kinds = jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating  # each holds those before it
    had, needed = (
        next(i for i, kind in enumerate(kinds) if jnp.issubdtype(x, kind)) for x in (wide, dtype)
    )
    return needed <= had


def as_type(x: Any, dtype: Any, told: str) -> jax.Array:
    """`x` as an array of this type; typed keys, which nothing converts, as they are. Raises as
    `on_device`.
    """
    return x if jnp.issubdtype(dtype, jax.dtypes.prng_key) else on_device(x, told).astype(dtype)


def on_device(x: Any, told: str) -> jax.Array:
    """`x` as an array of at most 32 bits. Raises UsageError, which begins as `told`, where those do
    not hold a number.

    JAX lets NumPy's numbers of 64 bits wrap.
    """
    if isinstance(x, np.ndarray | np.generic) and x.dtype.kind in "iuf" and x.dtype.itemsize == 8:
        try:
            return jnp.asarray(cast(x, np.dtype(f"{x.dtype.kind}4")))
        except OverflowError as error:
            raise UsageError(f"{told} {error}") from None
    return jnp.asarray(x)


def select(condition: jax.Array, yes: Any, no: Any) -> Any:
    """`jnp.where` on the arrays of two trees of the same structure."""
    return jax.tree.map(lambda yes, no: jnp.where(condition, yes, no), yes, no)


def check_spaces(args: Any, env: Any) -> None:
    """Raise UsageError where a mask, or a flag that the algorithm has, does not fit the spaces of
    an Env or EnvSpec.
    """
    check_parts(env)
    if getattr(args, "share_torso", False) and has_privileged(env.observation_space):
        raise UsageError(
            f"--share-torso would hide the {PRIVILEGED} of {env.name} from the critic, for "
            "whom it is"
        )
    observed, acted = (
        [leaf for _, leaf in leaves(space)] for space in (env.observation_space, env.action_space)
    )
    if (
        getattr(args, "normalize_obs", False)
        and not _has_arrays(env)
        and not type(args).normalize_obs
    ):
        raise UsageError(
            f"--normalize-obs needs arrays as observations, {env.name} has {env.observation_space}"
        )
    if getattr(args, "encoder", "") in ("nature", "impala") and not any(map(is_image, observed)):
        raise UsageError(
            f"--encoder {args.encoder} needs images, and {env.name} has {env.observation_space}"
        )
    if getattr(args, "image_scale", 1.0) != 1 and not any(map(is_image, observed)):
        raise UsageError(
            f"--image-scale {args.image_scale} needs images, {env.name} has {env.observation_space}"
        )
    if getattr(args, "exploration_loss", "") == "symmetric-kl" and any(
        isinstance(leaf, Box) for leaf in acted
    ):
        raise UsageError(
            "--exploration-loss symmetric-kl needs discrete actions: there is no uniform "
            "policy on a Box"
        )


def defaults_left_off(args: Any, env: Any) -> dict[str, str]:
    """Notes for the header of a run on defaults of flags that do nothing in this environment; a
    typed flag is refused.

    Args:
        args: flags of the run, which `check_spaces` has seen.
        env: the Env or EnvSpec.
    """
    if getattr(args, "normalize_obs", False) and not _has_arrays(env):
        return {"without": f"--normalize-obs, the default: {env.name} has no arrays to normalize"}
    return {}


def _has_arrays(env: Any) -> bool:
    return any(isinstance(leaf, Box) for _, leaf in leaves(env.observation_space))


def check_discrete(
    env: Any, instead: str, needs: str = "Q-learning needs Discrete actions"
) -> None:
    """Raise UsageError unless actions are Discrete, two or more: says who `needs` that, and what to
    take `instead`.
    """
    space = env.action_space
    if not isinstance(space, Discrete) or space.n == 1:
        raise UsageError(
            f"{needs}, two or more, and {env.name} has {space}; {instead} can train on it"
        )


def check_squashable(env: Any, instead: str) -> None:
    """Raise UsageError unless actions are Discrete, two or more, or a finite Box; it names what to
    take `instead`.
    """
    space = env.action_space
    if not isinstance(space, Box):
        check_discrete(env, instead, "SAC needs a Box or Discrete actions")
        return
    with np.errstate(over="ignore", invalid="ignore"):
        finite = np.isfinite(space.high - space.low)
    if not (finite & (space.low < space.high)).all():
        bounds = f"{np.ravel(space.low)} to {np.ravel(space.high)}"
        raise UsageError(
            f"SAC squashes actions between bounds, and those of {env.name} are {bounds}: "
            "each must be finite, as must "
            f"their difference, the lower below the upper; {instead} can train on it"
        )
