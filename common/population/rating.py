"""What is done at the end of a run whose members have played with or against each other: they are rated."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from common.cli.files import replacing
from common.device.memory import Agent
from common.envs.environment import Env
from common.population import teams, tournament

MANY = 16  # members, from which on the games of each no longer become more


def rate_members(run: Any, env: Env, agent: Agent, learners: Any, status: str) -> str:
    """With --opponent members, write what `learners` [S, ...] are worth to a file; returns lines for the console.

    In games that is elo.json, where several agents act for one reward teams.json. See `Run.finish`. Without the flag,
    and for a run that has not finished, there are none.
    """
    if getattr(run.args, "opponent", "") != "members" or status != "finished":
        return ""
    kind, how = (tournament, "all against all") if env.is_game else (teams, "all with all")
    with run.console.task(f"playing {how}"):
        table = kind.play_all(env, agent, learners, games_of_two(run.args))
    write(run.dir / kind.FILE, table.record, run.steps)
    return table.words


def games_of_two(args: Any) -> int:
    """How often the policy of one is played by that of another: above `MANY` members less often, so that each plays as
    many games in all as among those.
    """
    return math.ceil(args.eval_episodes * min(1, (MANY - 1) / (args.num_agents - 1)))


def write(path: Path, record: dict[str, Any], env_steps: int) -> None:
    """Write numbers and arrays by name as JSON, null in place of NaN."""
    plain = {name: np.where(np.isnan(x), None, np.asarray(x, object)).tolist() for name, x in record.items()}
    with replacing(path) as temporary:
        temporary.write_text(json.dumps({"env_steps": env_steps} | plain) + "\n")
