"""Flags of a run that several processes train together, on one machine or on many."""

import copy
import re
from dataclasses import dataclass
from typing import Any, ClassVar

from common.cli.checks import optional_word, shortened
from common.cli.errors import UsageError
from common.cli.flags import RunArgs

MAX_PROCESSES = 4096  # more are a slip of the finger, for which the first one would take gigabytes
Meeting = optional_word("HOST:PORT,ID/COUNT", bare="auto")


@dataclass(kw_only=True)
class ProcessArgs(RunArgs):
    """Which processes there are. Each gets the same command."""

    processes: ClassVar[int] = 1
    """How many there are, as far as is known: see `among`."""
    coordinator, num_processes, process_id = "", 0, -1  # where they meet; all that there are; which one this is

    # devices and machines
    distributed: Meeting = ""
    """Several processes: those that Slurm, Open MPI, Kubernetes or a TPU pod has started, or, without such a system,
    process ID (from 0) of COUNT, which meet at HOST:PORT of process 0."""

    def __post_init__(self):
        super().__post_init__()
        if self.distributed not in ("", "auto"):
            self._read_meeting()
            self.processes = self.num_processes

    @property
    def is_distributed(self) -> bool:
        return bool(self.distributed)

    @property
    def process(self) -> dict[str, Any]:
        """What `jax.distributed.initialize` gets; empty where it is to find out."""
        names = {"coordinator_address": "coordinator", "num_processes": "num_processes", "process_id": "process_id"}
        return {theirs: getattr(self, ours) for theirs, ours in names.items()} if self.coordinator else {}

    def _read_meeting(self) -> None:
        flag = f"--distributed {shortened(self.distributed)}"
        found = re.fullmatch(r"(.+):([0-9]{1,5}),([0-9]{1,9})/([0-9]{1,9})", self.distributed)
        host, port, own, count = (found[1], *map(int, found.groups()[1:])) if found else ("", 0, 0, 0)
        if not 0 < port < 2**16:
            raise UsageError(f"{flag} is not of the form HOST:PORT,ID/COUNT, such as 10.0.0.1:1234,0/2")
        if not own < count <= MAX_PROCESSES:
            raise UsageError(f"{flag}: the last ID is COUNT - 1, and COUNT is at most {MAX_PROCESSES:,}")
        self.coordinator, self.num_processes, self.process_id = f"{host}:{port}", count, own

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
