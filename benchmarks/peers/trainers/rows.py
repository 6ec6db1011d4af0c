"""Files of a peer's run: config.json, metrics.jsonl and DONE, as a run of the kit writes them, for
the same code to read.

Only the standard library and numpy are in here and in what it imports: peers live in environments
of their own.
"""

import json
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from pmaprl.cli.errors import UsageError
from pmaprl.runs.lock import locked
from pmaprl.runs.metrics import jsonable


class Rows:
    """One run: what is asked for, and the rows that come of it."""

    def __init__(self, run_dir: Path):
        self.config = json.loads((run_dir / "config.json").read_text())
        self.args: dict[str, Any] = self.config["args"]
        self._run_dir = run_dir
        self._began = 0.0
        self._spent = {"compiling": 0.0, "evaluating": 0.0}
        self._file = (run_dir / "metrics.jsonl").open("w")  # a run that was cut short begins again

    @property
    def seeds(self) -> range:
        return range(self.args["seed"], self.args["seed"] + self.args["num_seeds"])

    def begin(self, platform: str, devices: Iterable[object]) -> None:
        """Say what it runs with, and start the clock: imports do not count.

        Raises UsageError where the peer has found other devices than the kit.
        """
        if platform != self.args["platform"]:
            raise UsageError(
                f"the peer runs on a {platform}, where the kit has a {self.args['platform']}"
            )
        self.config["versions"] = {"python": sys.version.split()[0]}
        self.config["versions"] |= {found.name: found.version for found in metadata.distributions()}
        self.config["devices"] = [str(device) for device in devices]
        (self._run_dir / "config.json").write_text(json.dumps(self.config, indent=2))
        self._began = time.perf_counter()

    @contextmanager
    def spent_on(self, what: Literal["compiling", "evaluating"]) -> Iterator[None]:
        """Leave the time spent in here out of the speed of training; evaluating, which takes long
        on the host, does not count at all.
        """
        began = time.perf_counter()
        yield
        self._spent[what] += time.perf_counter() - began

    def write(self, env_steps: int, returns: Iterable[float]) -> None:
        """Add an evaluation after so many steps of each agent: the mean return of each seed."""
        earned = jsonable(list(returns))
        wall = time.perf_counter() - self._began - self._spent["evaluating"]
        compiled = self._spent["compiling"]
        row = {
            "env_steps": env_steps,
            "eval/return_mean": earned,
            "time/wall": wall,
            "time/compile": compiled,
        }
        row |= {"time/sps_total": env_steps / (wall - compiled)}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        print(
            f"step {env_steps:,} / {self.args['total_timesteps']:,}, greedy return {earned}",
            flush=True,
        )


def evaluation_points(total: int, interval: float) -> list[int]:
    """After how many updates to evaluate, evenly, about once in an interval and at the end. Both
    count updates.
    """
    count = max(round(total / interval), 1)
    return sorted({max(round(total * index / count), 1) for index in range(1, count + 1)})


@contextmanager
def run_of(argv: list[str]) -> Iterator[Rows]:
    """The run whose directory is named on the command line. It is marked as done where nothing
    fails in here.
    """
    run_dir = Path(argv[1])
    try:
        with locked(run_dir):
            (run_dir / "DONE").unlink(missing_ok=True)
            yield Rows(run_dir)
            (run_dir / "DONE").touch()
    except UsageError as error:
        sys.exit(f"error: {error}")
