"""The flags by which the commands that use a trained policy find it."""

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from common.cli.checks import Count


@dataclass
class PolicyArgs:
    """Which policy."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """A run directory, or one of its checkpoints."""
    step: Count | Literal["best", "latest"] = "latest"
    """Checkpoint: a number of environment steps, the newest, or the one with the best evaluation."""
    agent: int | None = None
    """Seed of the agent to take from a run with --num-seeds; default the first."""
    algorithm: str = ""
    """The algorithm's file, where it is not in this repository's algos/: its code is run."""
