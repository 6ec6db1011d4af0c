"""The flags by which the commands that use a trained policy find it."""

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from common.cli.checks import check_flags
from common.cli.errors import UsageError


@dataclass
class PolicyArgs:
    """Which policy."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN", help_behavior_hint="(required)")] = ""
    """A run directory, or one of its checkpoints."""
    step: int | Literal["best", "latest"] = "latest"
    """Checkpoint: a number of environment steps, the newest, or the one with the best evaluation."""
    agent: int | None = None
    """Seed of the agent to take from a run with --num-seeds; default the first."""
    member: int | None = None
    """Member to take from a population, by its place from 0 on; default the one with the best evaluation."""
    algorithm: str = ""
    """The algorithm's file, where it is not in this repository's algos/: its code is run."""

    def __post_init__(self):
        check_flags(self)
        if not self.run:
            raise UsageError("name a run directory, such as runs/NAME")
