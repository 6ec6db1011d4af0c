"""Play episodes with a trained policy, and draw one of them.

python -m pmaprl.play runs/NAME --episodes 5 --gif episode.gif
"""

import signal
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from pmaprl.cli.checks import Bounds, CountOrZero
from pmaprl.cli.command import NO_DEFAULT, PolicyArgs, main, parse
from pmaprl.cli.errors import FailedEnvError, UsageError
from pmaprl.cli.files import check_target
from pmaprl.runs.console import Console, brief


@dataclass
class Args(PolicyArgs):
    """Play episodes with a trained policy, and draw one of them."""

    episodes: Annotated[int, Bounds(at_least=1, at_most=100_000)] = 10
    """Episodes to play."""
    gif: Annotated[str, NO_DEFAULT] = ""
    """Draw the first episode to this file."""
    gif_height: Annotated[int, Bounds(at_least=64, at_most=2_000)] = 300
    """Most pixels of the height of its pictures, where the suite draws them."""
    stochastic: bool = False
    """Sample actions as in training, instead of taking the best known ones."""
    seed: CountOrZero = 0
    """Seed of initial states, of chance in the environment and of sampled actions."""
    env: Annotated[str, NO_DEFAULT] = ""
    """Environment to play in (default: the run's; name your own again)."""
    env_params: Annotated[str, NO_DEFAULT] = ""
    """Change the environment's parameters: a JSON object (default: those of evaluations)."""


# Before the slow imports: --help and usage errors answer at once
ARGS = parse(Args) if __name__ == "__main__" else None

import jax
import numpy as np

from pmaprl.actors.threads import Worker
from pmaprl.cli.env_flags import is_custom, steps_on_host
from pmaprl.cli.run_flags import check_params_of_run
from pmaprl.device.evaluation import Episodes, fault_of, play_episodes
from pmaprl.device.programs import set_up_cache
from pmaprl.drawing.episodes import Recording, draw_gif, record
from pmaprl.envs.bytes import spec_with_byte_max
from pmaprl.envs.differences import difference, has_types_of_actions
from pmaprl.envs.environment import Env
from pmaprl.envs.host import evaluation_params
from pmaprl.envs.masks import policy_spec
from pmaprl.envs.registry import make
from pmaprl.envs.spaces import EnvSpec, leaves
from pmaprl.policy import StoredPolicy, load_named
from pmaprl.recording import HostPlay, play_on_host

HOST_ENVS = 16  # most environments that step together


def play(args: Args) -> Episodes:
    """Run the command, and return the episodes as host arrays."""
    if args.gif:
        check_target(Path(args.gif), ".gif")
    with suppress(ValueError):  # outside of the main thread
        # An exception ends the bar, and leaves no half of a file
        signal.signal(signal.SIGINT, signal.default_int_handler)
    console = Console(quiet=False, total_steps=0)
    set_up_cache()
    policy = load_named(args, console)
    how = "sampled actions" if args.stochastic else "greedy"
    console.say(f"policy   {policy.run_dir}, step {policy.step:,}, {policy.who}, {how}")
    name, env_params = environment_of(args, policy)
    parts = leaves(policy.env.observation_space, policy.env.given_like)
    shapes = [f"{part} {x.dtype}{list(x.shape)}".strip() for part, _, x in parts]
    actions = policy.env.action_space
    console.say(f"env      {name}, observations {', '.join(shapes)}, actions {actions}")
    play_in_place = _play_on_host if steps_on_host(name) else _play_on_device
    with console.busy("playing"):
        env, episodes, episode = play_in_place(args, policy, name, env_params, console)
    show(episodes, console, getattr(env, "is_game", False))
    if episode is not None:
        path = Path(args.gif)
        with console.busy("drawing"):
            draw_gif(env, episode, path, console.warn, args.gif_height)
        console.say(f"gif      {args.gif} ({path.stat().st_size / 1e3:,.0f} kB, episode 1)")
    return episodes


def environment_of(args: Args, policy: StoredPolicy) -> tuple[str, str]:
    """Name and parameters of the environment to play in, by default those of evaluations."""
    trained = policy.config["args"]
    name = args.env or trained["env"]
    if not args.env and is_custom(name):
        raise UsageError(
            f"{policy.run_dir} was trained on your own environment: name it again, --env {name}"
        )
    if name != trained["env"] or args.env_params:
        return name, args.env_params
    check_params_of_run(policy.run_dir, trained, flag="--env-params")
    params = trained.get("env_params", "")
    return name, evaluation_params(trained) if steps_on_host(name) else params


def _check_fit(policy: StoredPolicy, env: EnvSpec) -> None:
    """Raise UsageError if the policy was not trained for the spaces of an environment."""
    config = policy.config
    played_spec = policy_spec(spec_with_byte_max(env, config["args"].get("byte_max", 0)))
    when = "in its training", "there"
    found = difference(policy.env, played_spec, when, has_types=has_types_of_actions(config))
    if found:
        raise UsageError(
            f"the policy needs the spaces of its training, {env.name} has others: {found}"
        )


# The environment, all episodes, and with --gif the recording of the first one
Played = tuple[Env | EnvSpec, Episodes, Recording | None]


def _play_on_device(
    args: Args, policy: StoredPolicy, name: str, env_params: str, console: Console
) -> Played:
    env = make(name, env_params)
    _check_fit(policy, env.spec)
    keys = jax.random.split(jax.random.key(args.seed), args.episodes)
    player = policy.player(args.stochastic)
    play_all = jax.jit(lambda keys: play_episodes(env, player, keys))
    episodes = jax.device_get(play_all(keys))
    fault = fault_of(episodes)
    if fault:
        raise FailedEnvError(f"{env.name} {fault}")
    recording = None
    if args.gif:
        recording = record(env, player, keys[0], env.max_steps)
    return env, episodes, recording


def _play_on_host(
    args: Args, policy: StoredPolicy, name: str, env_params: str, console: Console
) -> Played:
    host_play = HostPlay(
        name=name,
        env_params=env_params,
        num_envs=min(args.episodes, HOST_ENVS),
        num_episodes=args.episodes,
        seed=args.seed,
        vectorization=policy.config["args"].get("vectorization", ""),
        recorded=bool(args.gif),
        height=args.gif_height,
    )
    return play_on_host(
        host_play,
        Worker("play"),
        policy.player(args.stochastic),
        jax.random.key(args.seed),
        partial(_check_fit, policy),
    )


def show(episodes: Episodes, console: Console, is_game: bool) -> None:
    """Print every episode and their summary."""
    for number, (ret, length) in enumerate(zip(*episodes, strict=True), 1):
        console.say(f"episode {number:>4}  return {ret + 0.0:>10.2f}  length {length:>6,.0f}")
    ret = episodes.ret
    spread = (
        f"{brief(float(ret.mean()))} ± {brief(float(ret.std()))} "
        f"(min {brief(float(ret.min()))}, max {brief(float(ret.max()))})"
    )
    won = f", {np.mean(ret > 0):.0%} won" if is_game else ""
    console.say(f"return   {spread} over {len(ret)} episode{'s' * (len(ret) > 1)}{won}")


if __name__ == "__main__":
    main(play, ARGS)
