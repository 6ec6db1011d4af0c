"""Play episodes with a trained policy, and draw one of them.

python -m common.play runs/NAME --episodes 5 --gif episode.gif
"""

import itertools
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from common.cli.checks import Bounds, CountOrZero
from common.cli.command import PolicyArgs, main, parse
from common.cli.console import Console
from common.cli.errors import UsageError
from common.cli.files import check_target


@dataclass
class Args(PolicyArgs):
    """Play episodes with a trained policy, and draw one of them."""

    episodes: Annotated[int, Bounds(at_least=1, at_most=100_000)] = 10
    """Episodes to play."""
    gif: str = ""
    """Draw the first episode to this file."""
    stochastic: bool = False
    """Sample actions as in training, instead of taking the best known ones."""
    seed: CountOrZero = 0
    """Seed of initial states, of chance in the environment and of sampled actions."""
    env: str = ""
    """Play in this environment; needed where the policy was trained on your own, package.module:factory."""
    env_params: str = ""
    """Environment parameters to change, as a JSON object; default those of the run's evaluations."""


if __name__ == "__main__":
    ARGS = parse(Args)  # before the slow imports: --help and usage errors answer at once

import jax
import jax.numpy as jnp
import numpy as np

from common.actors.host_evaluation import run_host_episodes
from common.actors.watchdog import Worker
from common.cli.env_flags import is_custom, steps_on_host
from common.device.agents import Seen
from common.device.evaluation import Episodes, add_to_fingerprint, play_episodes
from common.device.programs import set_up_cache
from common.drawing.gif import draw_gif
from common.drawing.recording import RecordedEnvs, Recording, record
from common.envs.environment import Env
from common.envs.host import evaluation_params
from common.envs.masks import without_privileged
from common.envs.registry import make, make_host
from common.envs.spaces import EnvSpec
from common.policy import Policy, load_named
from common.runs.ranking import describe_episodes

HOST_ENVS = 16  # at most, stepped together


def record_with_bar(policy: Policy, env: Env, key: jax.Array, console: Console, stochastic: bool = False) -> Recording:
    """The episode that begins from `key`."""
    with console.task("playing"):
        return record(env, policy.player(stochastic), key, env.max_steps)


def save_gif(env: Env | EnvSpec, episode: Recording, path: Path, console: Console) -> None:
    """Draw an episode. Raises UsageError where that does not work, or where the file cannot be written."""
    with console.task(f"drawing {path.name}") as on_frame:
        try:
            draw_gif(env, episode, path, on_frame)
        except Exception as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(f"this episode cannot be drawn: {type(error).__name__}: {error}") from error


def make_env(policy: Policy, name: str, env_params: str) -> Env:
    """The environment called `name`, or that of the policy's run. Raises UsageError where the policy does not fit."""
    env = make(*_which(policy, name, env_params))
    _check_fit(policy, env)
    return env


def _which(policy: Policy, name: str, env_params: str) -> tuple[str, str]:
    """Name and parameters of the environment to play in."""
    trained = policy.config["args"]
    if not name and is_custom(trained["env"]):
        raise UsageError(f"{policy.run_dir} was trained on your own environment: name it again, --env {trained['env']}")
    if name not in ("", trained["env"]):
        return name, env_params
    return trained["env"], env_params or _params_of_evaluations(trained)


def _params_of_evaluations(trained: dict[str, Any]) -> str:
    """Environment parameters, by the flags of the run."""
    names = "env", "vectorization", "env_params", "eval_env_params"
    flags = {name: trained.get(name, "") for name in names}
    return evaluation_params(**flags) if steps_on_host(trained["env"]) else trained["env_params"]


def _check_fit(policy: Policy, env: Env | EnvSpec) -> None:
    seen = without_privileged(env.observation_space)
    both = {"observation": (policy.env.observation_space, seen), "action": (policy.env.action_space, env.action_space)}
    for kind, (ours, theirs) in both.items():
        if str(ours) != str(theirs):
            raise UsageError(f"the policy's {kind}s are {ours}, those of {env.name} are {theirs}")


def play_on_host(args: Args, policy: Policy, name: str, env_params: str, console: Console) -> Episodes:
    """Episodes in environments that step on the host, the first of them drawn with --gif."""
    worker, count = Worker("play"), min(args.episodes, HOST_ENVS)
    how = "vector" if policy.config["args"].get("vectorization") == "vector" else "sync"
    player, key, steps = policy.player(args.stochastic), jax.random.key(args.seed), itertools.count()
    act = jax.jit(player.act)

    def choose(seen: Seen, memory: Any, keys: None) -> tuple[np.ndarray, Any]:
        return act(seen, memory, jax.random.split(jax.random.fold_in(key, next(steps)), count))

    try:
        with console.task("playing"):
            worker.envs = make_host(name, count, args.seed, env_params, how, frames=bool(args.gif))
            _check_fit(policy, worker.envs.spec)
            worker.envs = envs = RecordedEnvs(worker.envs) if args.gif else worker.envs
            episodes = run_host_episodes(envs, player._replace(act=choose), args.episodes, worker)
    finally:
        worker.close()
    show(episodes, console)
    if args.gif:
        if envs.without_pictures:
            console.warn(f"drawn from observations, as {name} shows no pictures here: {envs.without_pictures}")
        draw(args, envs.spec, envs.recording(), console)
    return episodes


def play(args: Args) -> Episodes:
    """What the command does; returns the episodes as host arrays."""
    if args.gif:
        check_target(Path(args.gif), ".gif")
    with suppress(ValueError):  # outside the main thread
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ends the bar, and leaves no half of a file
    console = Console(quiet=False, total_steps=0)
    set_up_cache()
    policy = load_named(args, console)
    how = "sampled actions" if args.stochastic else "greedy"
    console.say(f"policy   {policy.run_dir}, step {policy.step:,}, {policy.who}, {how}")
    name, env_params = _which(policy, args.env, args.env_params)
    console.say(f"env      {name}")
    if steps_on_host(name):
        return play_on_host(args, policy, name, env_params, console)

    env = make_env(policy, args.env, args.env_params)
    keys = jax.random.split(jax.random.key(args.seed), args.episodes)
    with console.task("playing"):
        run = jax.jit(lambda keys: play_episodes(env, policy.player(args.stochastic), keys))
        others = keys[1:] if args.gif else keys
        episodes = jax.device_get(run(others)) if len(others) else Episodes(*np.empty((3, 0)))
    if args.gif:
        episode = record_with_bar(policy, env, keys[0], console, args.stochastic)
        steps = jax.tree.map(lambda x: x[:, None], (jax.tree.map(lambda x: x[:-1], episode.obs), episode.rewards))
        fingerprint, _ = jax.lax.scan(
            lambda fingerprint, step: (add_to_fingerprint(fingerprint, *step), None), jnp.zeros(1, jnp.uint32), steps
        )
        first = Episodes(episode.rewards.sum(), len(episode.rewards), jax.device_get(fingerprint))
        episodes = jax.tree.map(np.append, first, episodes)
    show(episodes, console, env.is_game)
    if args.gif:
        draw(args, env, episode, console)
    return episodes


def draw(args: Args, env: Env | EnvSpec, episode: Recording, console: Console) -> None:
    """Write the file that --gif names."""
    save_gif(env, episode, Path(args.gif), console)
    console.say(f"gif      {args.gif} ({Path(args.gif).stat().st_size / 1e3:,.0f} kB, episode 1)")


def show(episodes: Episodes, console: Console, is_game: bool = False) -> None:
    """Print every episode and their summary."""
    for number, (ret, length, _) in enumerate(zip(*episodes, strict=True), 1):
        console.say(f"episode {number:>4}  return {ret:>10.2f}  length {length:>6,.0f}")
    ret = episodes.ret
    spread = f"{ret.mean():.1f} ± {ret.std():.1f} (min {ret.min():.1f}, max {ret.max():.1f})"
    won = f", {np.mean(ret > 0):.0%} won" if is_game else ""
    console.say(f"return   {spread} over {describe_episodes(len(ret), [len(np.unique(episodes.fingerprint))])}{won}")


if __name__ == "__main__":
    main(play, ARGS)
