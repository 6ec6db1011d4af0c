"""Flags of a run that several processes train together, on one machine or on many."""

import copy
import re
from dataclasses import dataclass
from typing import Any, ClassVar

from common.cli.checks import Bounds, check_bounds, optional_word, shortened
from common.cli.errors import UsageError
from common.cli.flags import RunArgs

MAX_PROCESSES = 4096  # more are a slip of the finger, for which the first one would take gigabytes

Meeting = optional_word("HOST:PORT,ID/COUNT", bare="auto")


@dataclass(kw_only=True)
class ProcessArgs(RunArgs):
    """Which processes there are. Each gets the same command."""

    processes: ClassVar[int] = 1
    """How many there are, as far as is known: see `among`."""

    # devices and machines
    distributed: Meeting = ""
    """Several processes: those that Slurm, Open MPI, Kubernetes or a TPU pod has started, or, without such a
    system, this one as process ID (from 0) of COUNT, which meet at HOST:PORT of process 0."""

    def __post_init__(self):
        super().__post_init__()
        if self.distributed not in ("", "auto"):
            self._check_meeting()
            self.processes = self.num_processes

    @property
    def is_distributed(self) -> bool:
        return bool(self.distributed)

    @property
    def coordinator(self) -> str:
        """Where processes meet; empty where a system of the cluster says it."""
        return self._meeting[0]

    @property
    def num_processes(self) -> int:
        """Processes in all; 0 where a system of the cluster says it."""
        return int(self._meeting[2] or 0)

    @property
    def process_id(self) -> int:
        """Which of them this one is; -1 where a system of the cluster says it."""
        return int(self._meeting[1] or -1)

    @property
    def process(self) -> dict[str, Any]:
        """What `jax.distributed.initialize` gets; empty where it is to find out."""
        if not self.coordinator:
            return {}
        return {
            "coordinator_address": self.coordinator,
            "num_processes": self.num_processes,
            "process_id": self.process_id,
        }

    @property
    def _meeting(self) -> tuple[str, str, str]:
        """Address, number of this process, and of all of them, as they are given."""
        found = re.fullmatch(r"(.+:[0-9]{1,5}),([0-9]{1,9})/([0-9]{1,9})", self.distributed)
        return found.groups() if found else ("", "", "")

    def _check_meeting(self) -> None:
        if not self.coordinator or not 0 < int(self.coordinator.rpartition(":")[2]) < 2**16:
            said = shortened(self.distributed)
            raise UsageError(f"--distributed {said} is not of the form HOST:PORT,ID/COUNT, such as 10.0.0.1:1234,0/2")
        check_bounds("--distributed COUNT", self.num_processes, Bounds(at_least=1, at_most=MAX_PROCESSES))
        if self.process_id >= self.num_processes:
            raise UsageError(
                f"--distributed {self.distributed} has processes from 0/{self.num_processes} to "
                f"{self.num_processes - 1}/{self.num_processes}"
            )

    def among(self, count: int):
        """These flags for so many processes, which are known only once they have met.

        Raises UsageError where sizes do not fit.
        """
        if count == self.processes:
            return self
        args = copy.copy(self)
        args.processes = count
        args.__post_init__()
        return args
