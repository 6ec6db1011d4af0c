"""Whether all processes see the same storage."""

import time
from pathlib import Path

import jax

from common.cli.errors import UsageError
from common.device import cluster
from common.runs.lock import is_locked

SECONDS_TO_APPEAR = 10  # of a file that another host has written


def check_shared(run_dir: Path | None) -> None:
    """Raise UsageError where a process does not see the `run_dir` that the first one has locked."""
    if run_dir is None or cluster.count() == 1:
        return
    cluster.largest(0)  # the first is there
    end = time.monotonic() + SECONDS_TO_APPEAR
    while not (seen := is_locked(run_dir)) and time.monotonic() < end:
        time.sleep(0.1)
    if blind := cluster.largest(0 if seen else jax.process_index()):
        raise UsageError(f"process {blind} does not see {run_dir}: it has to be on storage that all processes share")
