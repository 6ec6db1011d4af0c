"""What there is to learn: the tasks of sets.toml, for the kit's algorithms and for peers that have flags for them."""

import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from common.cli.files import fitting

FOLDER = Path(__file__).resolve().parent


class Goal(NamedTuple):
    """An environment that an algorithm is to learn.

    `algorithm` and `env` are names to show. In brackets they may say what `flags` do, as in "ppo_rnn_pmap (lstm)".
    """

    set: str
    algorithm: str
    env: str
    steps: int  # of the environment, for each agent
    threshold: float
    seeds_at_once: int | None  # in one run; None for all
    flags: dict[str, Any]  # beside those; a peer's own, as its authors publish them
    eval_episodes: int | None = None  # of an evaluation; None for as many as usual

    @property
    def script(self) -> str:
        """The file of algos/."""
        return plain(self.algorithm)

    @property
    def env_flag(self) -> str:
        return plain(self.env)


def plain(name: str) -> str:
    """The name of an algorithm or an environment without what stands in brackets behind it."""
    return name.partition(" (")[0]


def goals() -> list[Goal]:
    """Those of the kit."""
    found = []
    for name, algorithms in tomllib.loads((FOLDER / "sets.toml").read_text()).items():
        for algorithm, envs in algorithms.items():
            for env, flags in envs.items():
                own = [flags.pop(key, None) for key in ("steps", "threshold", "seeds_at_once", "eval_episodes")]
                found.append(Goal(name, algorithm, env, *own[:3], flags, own[3]))
    return found


def peers() -> dict[str, dict[str, Any]]:
    """What is known of each peer, by name."""
    return tomllib.loads((FOLDER / "peers" / "peers.toml").read_text())["peers"]


def goals_of_peer(peer: str) -> list[Goal]:
    """Those of the kit for which the peer's authors publish flags.

    Its PPO and SAC have the goals of ours, also of the asynchronous ones.
    """
    about = peers()[peer]
    published = tomllib.loads((FOLDER / "peers" / "peers.toml").read_text())["flags"]
    found = []
    for goal in goals():
        kind = goal.algorithm.removesuffix("_pmap")
        kind = {"appo": "ppo"}.get(kind, kind)
        tables = published.get(f"{about.get('flags_of', peer)}_{kind}", {})
        pattern = fitting(tables, goal.env)
        if pattern:
            found.append(goal._replace(algorithm=f"{peer}_{kind}", flags=tables[pattern]))
    return found
