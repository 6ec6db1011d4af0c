"""Flags of a run that several processes train together, on one machine or on many."""

import copy
from dataclasses import dataclass
from typing import Any, ClassVar

from common.cli.checks import check
from common.cli.errors import UsageError
from common.cli.flags import RunArgs

MAX_PROCESSES = 4096  # more are a slip of the finger, for which the first one would take gigabytes


@dataclass(kw_only=True)
class ProcessArgs(RunArgs):
    """Which processes there are. Each gets the same command."""

    processes: ClassVar[int] = 1
    """How many there are, as far as is known: see `among`."""

    distributed: bool = False
    """Train together with the other processes that Slurm, Open MPI, Kubernetes or a TPU pod has started."""
    coordinator: str = ""
    """The same without such a system: host:port of process 0, which every process can reach."""
    num_processes: int = 0
    """Processes in all, with --coordinator."""
    process_id: int = -1
    """Which of them this one is, from 0, with --coordinator."""

    def __post_init__(self):
        super().__post_init__()
        check(self, "num_processes", at_least=0, at_most=MAX_PROCESSES)
        check(self, "process_id", at_least=-1)
        if self.num_processes:
            self.processes = self.num_processes
        parts = self._given("num_processes process_id")
        if self.coordinator:
            self._check_coordinator(parts)
        elif parts:
            raise UsageError(f"{parts[0]} needs --coordinator HOST:PORT; --distributed finds out by itself")

    def among(self, count: int):
        """These flags for so many processes, which --distributed knows of only once they have met.

        Raises UsageError where sizes do not fit.
        """
        if count == self.processes:
            return self
        args = copy.copy(self)
        args.processes = count
        args.__post_init__()
        return args

    @property
    def is_distributed(self) -> bool:
        return self.distributed or bool(self.coordinator)

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

    def _check_coordinator(self, parts: list[str]) -> None:
        host, _, port = self.coordinator.rpartition(":")
        if not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 2**16):
            raise UsageError(f"--coordinator {self.coordinator} is no host:port, such as 10.0.0.1:1234")
        if len(parts) < 2:
            raise UsageError("--coordinator needs --num-processes and --process-id, from 0 to one less than that")
        if self.process_id >= self.num_processes:
            raise UsageError(
                f"--process-id {self.process_id} of --num-processes {self.num_processes}: they are numbered from 0 to "
                f"{self.num_processes - 1}"
            )
