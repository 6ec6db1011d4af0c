"""The flags by which the commands that use a trained policy find it. Imports nothing slow."""

import warnings
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro

from common.cli.checks import Count
from common.cli.console import Console


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

    def load(self, console: Console) -> Any:
        """The policy; what it warns of goes to `console`. Raises UsageError as `load_policy` does."""
        from common.policy import load_policy

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            try:
                return load_policy(self.run, self.step, self.agent, self.algorithm or None)
            finally:
                for warning in caught:
                    console.warn(str(warning.message))
