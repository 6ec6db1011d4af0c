"""Check an environment before training on it: spaces, numbers, ends, resets, and speed.

python -m pmaprl.check_env my_envs:Walk
python -m pmaprl.check_env gymnasium:my_gym_envs:Walk-v0
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import tyro

from pmaprl.cli.checks import Bounds, CountOrZero, Timeout, check_flags
from pmaprl.cli.command import NO_DEFAULT, main, parse
from pmaprl.cli.errors import TrainingError, UsageError, printable

ENV = tyro.conf.arg(metavar="ENV", help_behavior_hint="(required)")


@dataclass
class Args:
    """Check an environment with random actions; the exit code is 1 if a check fails."""

    env: Annotated[tyro.conf.Positional[str], ENV] = ""
    """Environment, as for --env of an algorithm."""
    env_params: Annotated[str, NO_DEFAULT] = ""
    """Change parameters of the environment, or arguments of its make: a JSON object."""
    steps: Annotated[int, Bounds(at_least=10, at_most=10_000_000)] = 1_000
    """Random steps of each of four environments."""
    seed: CountOrZero = 0
    """Seed of initial states, of chance in the environment and of actions."""
    reset_timeout: Timeout = 120.0
    """Seconds that making or resetting an environment on the host may take."""
    step_timeout: Timeout = 60.0
    """Seconds that a step of an environment on the host may take."""

    def __post_init__(self):
        check_flags(self)
        if not self.env:
            raise UsageError(
                "name an environment, such as CartPole-v1, my_envs:Walk or gymnasium:CartPole-v1"
            )


# Before the slow imports: --help and usage errors answer at once
ARGS = parse(Args) if __name__ == "__main__" else None

import jax
import numpy as np

from pmaprl.cli.env_flags import is_custom, steps_on_host
from pmaprl.device.keys import split_keys
from pmaprl.device.programs import set_up_cache
from pmaprl.drawing.pictures import fitting
from pmaprl.envs import spaces
from pmaprl.envs.environment import Env, channels_in_front
from pmaprl.envs.foreign_code import place_in_code, readable_errors, reason
from pmaprl.envs.masks import check_parts, is_mask, legal_actions, nothing_legal
from pmaprl.envs.numbers import cast
from pmaprl.envs.ranges import LARGEST, are_bytes_in_bounds, are_choices, fault_in
from pmaprl.envs.registry import make, make_host
from pmaprl.envs.spaces import Box, EnvSpec
from pmaprl.machine.devices import check_settings, start_jax

NUM_ENVS = 4
LARGE = 100  # size of an observation from which on networks learn badly
SLOW_RESET = 10  # a reset is slow if it takes so many times as long as a step


class Played(NamedTuple):
    """Record of random actions: T steps of N environments."""

    first_obs: Any  # [N, ...] at the first reset
    obs: Any  # [T, N, ...] after each step, the last ones of episodes among them
    reward: np.ndarray  # [T, N]
    terminated: np.ndarray  # [T, N]
    truncated: np.ndarray  # [T, N]
    acting: np.ndarray  # [T, N]: True if the policy would act on the observation
    step_seconds: float  # of a step of all environments
    reset_seconds: float  # of a reset of all environments


class Finding(NamedTuple):
    """A line of the report."""

    kind: str  # "ok", "note" or "wrong"
    text: str


def check_env(args: Args) -> list[Finding]:
    """Check an environment, print the report and return it.

    Raises:
        TrainingError: a check has failed.
        UsageError: the environment cannot be made or stepped.
    """
    check_settings()
    start_jax()
    set_up_cache()
    where = "host" if steps_on_host(args.env) else "device"
    print(f"env      {printable(args.env)}, steps on the {where}")
    play = _play_on_host if where == "host" else _play_on_device
    spec, played, again, picture = play(args)
    print(f"actions  {spec.action_space}")
    for line in _describe_obs(spec, played):
        print(f"obs      {line}")
    findings = [*_findings(spec, played, again, where), *picture]
    for kind, text in findings:
        print(f"{kind:<8} {printable(text)}")
    wrong = sum(kind == "wrong" for kind, _ in findings)
    if wrong:
        raise TrainingError(f"{wrong} of {len(findings)} checks of {args.env} failed")
    return findings


# --------------------------------------------------------------------------------------------------
# play


def _play_on_device(args: Args) -> tuple[EnvSpec, Played, Played, list["Finding"]]:
    env = make(args.env, args.env_params)
    check_parts(env)
    reset = jax.jit(jax.vmap(env.reset))
    step = jax.jit(jax.vmap(env.step))
    act = _random_actions(env.spec)
    played = _device_steps(args, env, reset, step, act)
    again = _device_steps(args, env, reset, step, act)
    findings = list(_picture(args, env))
    if told := channels_in_front(env):
        findings.append(Finding("note", told))
    return env.spec, played, again, findings


def _random_actions(spec: EnvSpec) -> Any:
    """A function of keys [N] and observations [N, ...] that draws legal actions [N, ...]."""

    def act(key: jax.Array, obs: Any) -> Any:
        return spaces.sample(key, spec.action_space, legal_actions(obs))

    return jax.jit(jax.vmap(act))


def _device_steps(args: Args, env: Env, reset: Any, step: Any, act: Any) -> Played:
    """Step by random actions, one call per step."""
    key = jax.random.key(args.seed)
    reset_keys = jax.random.split(jax.random.fold_in(key, 0), NUM_ENVS)
    first, state = jax.block_until_ready(reset(reset_keys))
    reset_seconds = _seconds(lambda: reset(reset_keys))
    obs = first
    steps = []
    began = time.monotonic()
    for index in range(args.steps):
        keys = jax.random.split(jax.random.fold_in(key, 1 + index), NUM_ENVS)
        action_keys, step_keys = split_keys(keys, 2)
        out = step(step_keys, state, act(action_keys, obs))
        steps.append(jax.device_get((out.final_obs, out.reward, out.terminated, out.truncated)))
        obs = out.obs
        state = out.state
        if index == 0:
            began = time.monotonic()  # later steps need not be compiled
    seconds = (time.monotonic() - began) / max(args.steps - 1, 1)
    after, reward, terminated, truncated = jax.tree.map(lambda *x: np.stack(x), *steps)
    return Played(
        first_obs=jax.device_get(first),
        obs=after,
        reward=reward,
        terminated=terminated,
        truncated=truncated,
        acting=~(terminated | truncated),
        step_seconds=seconds,
        reset_seconds=reset_seconds,
    )


def _play_on_host(args: Args) -> tuple[EnvSpec, Played, Played, list["Finding"]]:
    def played() -> tuple[EnvSpec, Played]:
        envs = make_host(
            args.env,
            NUM_ENVS,
            args.seed,
            args.env_params,
            vectorization="async",
            reset_timeout=args.reset_timeout,
            step_timeout=args.step_timeout,
        )
        try:
            check_parts(envs.spec)
            with readable_errors(f"environment {args.env} cannot be stepped"):
                return envs.spec, _host_steps(args, envs)
        finally:
            envs.close()

    spec, first = played()
    _, second = played()
    return spec, first, second, []


def _host_steps(args: Args, envs: Any) -> Played:
    act = _random_actions(envs.spec)
    key = jax.random.key(args.seed)
    began = time.monotonic()
    first = envs.reset()
    reset_seconds = time.monotonic() - began
    obs = first
    steps = []
    stepping = 0.0
    for index in range(args.steps):
        keys = jax.random.split(jax.random.fold_in(key, 1 + index), NUM_ENVS)
        action = jax.device_get(act(keys, obs))
        began = time.monotonic()
        out = envs.step(action)
        stepping += time.monotonic() - began
        after = out.obs if out.final_obs is None else out.final_obs
        ended = out.terminated | out.truncated
        steps.append(
            (after, out.reward, out.terminated & out.valid, out.truncated & out.valid, ~ended)
        )
        obs = out.obs
    after, reward, terminated, truncated, acting = jax.tree.map(lambda *x: np.stack(x), *steps)
    return Played(
        first_obs=first,
        obs=after,
        reward=reward,
        terminated=terminated,
        truncated=truncated,
        acting=acting,
        step_seconds=stepping / args.steps,
        reset_seconds=reset_seconds,
    )


def _seconds(function: Any) -> float:
    began = time.monotonic()
    jax.block_until_ready(function())
    return time.monotonic() - began


# --------------------------------------------------------------------------------------------------
# report


def _describe_obs(spec: EnvSpec, played: Played) -> Iterator[str]:
    """Describe each part of observations in a line: its space, and the range of its numbers."""
    for name, leaf, dtype, x in spaces.leaves(spec.observation_space, spec.obs_dtype, played.obs):
        space = f"{leaf} {_bounds(leaf)}" if isinstance(leaf, Box) else f"{leaf}"
        observed_range = f"{np.min(x):g} to {np.max(x):g}" if np.size(x) else "nothing"
        prefix = f"{name}: " if name else ""
        yield f"{prefix}{space}, {dtype}, seen {observed_range}"


def _bounds(leaf: Box) -> str:
    """The bounds of a Box in words; very large ones, such as gymnasium has, count as none."""
    bounded = (np.abs(leaf.low) < 1e30) & (np.abs(leaf.high) < 1e30)
    if not bounded.any():
        return "without bounds"
    ends = f"{leaf.low[bounded].min():g} to {leaf.high[bounded].max():g}"
    if bounded.all():
        return ends
    return f"{ends}, {np.sum(~bounded)} of {bounded.size} without bounds"


def _findings(spec: EnvSpec, played: Played, again: Played, where: str) -> Iterator[Finding]:
    yield from _numbers(spec, played)
    yield from _ends(played)
    yield from _repeats(played, again)
    yield from _masks(spec, played)
    yield from _speed(played, where)


IN_SPACE = are_choices, are_bytes_in_bounds


def _numbers(spec: EnvSpec, played: Played) -> Iterator[Finding]:
    """Check that numbers are finite, and within their bounds."""
    bad = False
    parts = spaces.leaves(spec.observation_space, spec.obs_dtype, played.obs, played.first_obs)
    for name, leaf, dtype, x, first in parts:
        what = f"observations{f' {name}' if name else ''}"
        for values, when in ((first, "at a reset"), (x, "after a step")):
            try:
                typed = cast(np.asarray(values), dtype)
            except OverflowError as error:  # actors refuse it
                bad = True
                yield Finding("wrong", f"{what} have {error}, {when}: correct their space")
                continue
            with np.errstate(over="ignore"):
                numbers = typed.astype(np.float32)  # as networks take them
            if not (np.abs(numbers) <= LARGEST).all():
                bad = True
                yield Finding(
                    "wrong", f"{what} are not finite {when}, or larger than {LARGEST:.2g}"
                )
        if not isinstance(leaf, Box) or is_mask(name):
            continue
        low = np.min(x, axis=(0, 1))
        high = np.max(x, axis=(0, 1))
        if np.any(low < leaf.low) or np.any(high > leaf.high):
            yield Finding(
                "note", f"{what} leave their bounds: {np.min(low):g} to {np.max(high):g} were seen"
            )
        if np.all(low == high):
            yield Finding("note", f"{what} are always the same, whatever the actions")
        elif np.max(np.abs([low, high])) > LARGE and x.dtype != np.uint8:
            yield Finding("note", f"{what} are large: train with --normalize-obs")
    fault = fault_in(played.first_obs, spec, IN_SPACE) or fault_in(played.obs, spec, IN_SPACE)
    if fault:
        bad = True
        yield Finding("wrong", fault)
    if not np.isfinite(played.reward).all():
        bad = True
        yield Finding("wrong", "rewards are not finite")
    if not bad:
        yield Finding("ok", "all numbers are finite")
    low = played.reward.min()
    high = played.reward.max()
    if not np.isfinite([low, high]).all():
        return
    if low == high:
        yield Finding("note", f"every reward is {low:g}")
    else:
        yield Finding(
            "ok", f"rewards are {low:g} to {high:g}, {played.reward.mean():.3g} on average"
        )


def _ends(played: Played) -> Iterator[Finding]:
    """Check that episodes end."""
    over = played.terminated | played.truncated
    episodes = int(over.sum())
    steps = over.shape[0]
    if not episodes:
        yield Finding("note", f"no episode ended within {steps:,} steps: --steps plays longer ones")
        return
    terminated = int(played.terminated.sum())
    kinds = f"{terminated:,} terminated, {episodes - terminated:,} cut by a time limit"
    yield Finding(
        "ok", f"{episodes:,} episodes of {over.size / episodes:,.0f} steps on average: {kinds}"
    )
    lengths = np.concatenate([np.diff(np.flatnonzero(ends)) for ends in over.T])
    if terminated == episodes and len(lengths) > 1 and np.all(lengths == lengths[0]):
        yield Finding(
            "note",
            f"every episode was terminated after {lengths[0]:,} steps: an end by a time limit has "
            "to be truncated",
        )


def _repeats(played: Played, again: Played) -> Iterator[Finding]:
    """Check that the seed decides everything, and that it decides something."""

    def is_same(x: np.ndarray, y: np.ndarray) -> bool:
        return np.array_equal(x, y, equal_nan=True)

    first = jax.tree.leaves(played.first_obs)
    if all(np.all(x == x[:1]) for x in first):
        yield Finding(
            "note", "all environments begin alike, whatever their seed: does reset use the seed?"
        )
    elif jax.tree.all(jax.tree.map(is_same, played[:5], again[:5])):
        yield Finding("ok", "the same seed and actions give the same episodes")
    else:
        yield Finding(
            "note", "the same seed and actions give other episodes: runs on it do not repeat"
        )


def _masks(spec: EnvSpec, played: Played) -> Iterator[Finding]:
    """Check that there is a legal action wherever the policy would act."""
    if legal_actions(played.obs, np) is None:
        return
    stuck = nothing_legal(played.obs, spec.action_space, np) & played.acting
    count = int(np.sum(stuck))
    if count:
        yield Finding(
            "wrong", f"the action_mask leaves no legal action where one has to act: {count:,} times"
        )
    else:
        yield Finding("ok", "the action_mask leaves a legal action wherever one has to act")


def _picture(args: Args, env: Env) -> Iterator[Finding]:
    """Check that the user's `frame` draws a state."""
    if not is_custom(args.env) or not callable(getattr(env.inner, "frame", None)):
        return
    _, state = env.reset(jax.random.key(args.seed))
    state = jax.device_get(state)
    try:
        frame: Any = env.frame(state)  # whatever the user's function returns
        width, height = fitting(frame).size
    except Exception as error:
        yield Finding("wrong", f"frame shows no picture: {reason(error)}{place_in_code(error)}")
    else:
        yield Finding("ok", f"frame shows a picture, {height} x {width} in a GIF")


def _speed(played: Played, where: str) -> Iterator[Finding]:
    step = 1e3 * played.step_seconds
    reset = 1e3 * played.reset_seconds
    yield Finding(
        "ok",
        f"a call steps {NUM_ENVS} environments in {step:.3g} ms, and resets them in {reset:.3g} ms",
    )
    # On the host the first reset waits for processes to start
    if where == "device" and reset > SLOW_RESET * step and reset > 1:
        yield Finding("note", "resets are slow: train with --reset-pool")


def run_command(args: Args) -> None:
    """Run the command."""
    check_env(args)


if __name__ == "__main__":
    main(run_command, ARGS)
