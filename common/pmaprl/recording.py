"""Episodes in environments on the host, the first of which can be recorded and drawn.

`pmaprl.play` plays them, and so does the end of a run with --gif.
"""

from collections.abc import Callable
from concurrent.futures import wait
from typing import Any, NamedTuple

import jax

from pmaprl.actors.host_evaluation import run_host_episodes
from pmaprl.actors.threads import POLL_INTERVAL, Worker
from pmaprl.cli.errors import TrainingError
from pmaprl.cli.host_flags import HostEnvArgs
from pmaprl.device.agents import Player
from pmaprl.device.episodes import Episodes
from pmaprl.drawing.episodes import RecordedEnvs, Recording
from pmaprl.drawing.pictures import HEIGHT
from pmaprl.envs.host import evaluation_params
from pmaprl.envs.registry import make_host
from pmaprl.envs.spaces import EnvSpec


class HostPlay(NamedTuple):
    """Environments of one kind and the episodes to play in them."""

    name: str
    env_params: str
    num_envs: int
    num_episodes: int
    seed: int  # of the environments
    vectorization: str  # flag of the run; only "vector" matters, as other processes draw nothing
    recorded: bool  # True: record the first environment's first episode
    height: int = HEIGHT  # most pixels of its pictures


def play_on_host(
    play: HostPlay,
    worker: Worker,
    player: Player,
    key: jax.Array | None = None,
    check: Callable[[EnvSpec], None] = lambda spec: None,
) -> tuple[EnvSpec, Episodes, Recording | None]:
    """Play episodes in new environments of this process, and close them.

    Args:
      play: the environments and episodes.
      worker: holds the environments, and notes its phases for those who watch.
      player: acts.
      key: key of sampled actions; None for a player that samples none.
      check: called with the spec of the environments, and may raise an error.

    Returns:
      The spec of the environments, all episodes, and the recording of the first one if `recorded`.
    """
    player = player._replace(act=jax.jit(player.act))
    recorded = None
    try:
        with worker.doing("make"):
            envs = make_host(
                play.name,
                play.num_envs,
                play.seed,
                play.env_params,
                vectorization="vector" if play.vectorization == "vector" else "sync",
                frames=play.recorded,
            )
            worker.envs = envs
        spec = envs.spec
        check(spec)
        if play.recorded:
            recorded = RecordedEnvs(envs, play.height)
        episodes = run_host_episodes(worker, recorded or envs, player, play.num_episodes, key)
    finally:
        worker.close()
    return spec, episodes, recorded and recorded.recording()


def record_on_host(
    args: HostEnvArgs, algorithm: Any, learner: Any, stopped: Callable[[], bool]
) -> tuple[EnvSpec, Recording] | None:
    """Record a greedy episode in an environment of evaluations, in a thread that is watched.

    Args:
      args: flags of the run.
      algorithm: the algorithm of the learner.
      learner: the state of one agent.
      stopped: returns True once the episode is no longer wanted.

    Returns:
      The spec of the environment, and the episode; None if it was stopped.

    Raises:
      TrainingError: an environment does not return.
    """
    play = HostPlay(
        name=args.env,
        env_params=evaluation_params(vars(args)),
        num_envs=1,
        num_episodes=1,
        seed=args.seed,
        vectorization=args.vectorization,
        recorded=True,
    )
    worker = Worker("the episode to draw")
    player = Player.greedy(algorithm, jax.device_put(learner))
    worker.run(lambda: play_on_host(play, worker, player))
    while not worker.result.done():
        if stopped():
            worker.ended = True
            return None
        flag = worker.stuck(args)
        if flag:
            worker.ended = True
            raise TrainingError(
                f"environment {args.env} does not return from {worker.activity.phase} ({flag})"
            )
        wait([worker.result], timeout=POLL_INTERVAL)
    spec, _, recording = worker.result.result()
    return spec, recording
