"""What a peer's run writes: config.json, metrics.jsonl and DONE, as a run of the kit does, for the same code to read.

Only the standard library is here and in what it imports: peers live in environments of their own.
"""

import json
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from common.cli.errors import UsageError
from common.runs.lock import locked


class Rows:
    """One run: what is asked for, and the rows that come of it."""

    def __init__(self, run_dir: Path):
        self.config = json.loads((run_dir / "config.json").read_text())
        self.args: dict[str, Any] = self.config["args"]
        self._run_dir, self._began = run_dir, time.perf_counter()
        self._compiled = self._evaluated = 0.0
        self._file = (run_dir / "metrics.jsonl").open("w")  # a run that was cut short begins again

    @property
    def seeds(self) -> range:
        return range(self.args["seed"], self.args["seed"] + self.args["num_seeds"])

    def describe(self, devices: Iterable[object]) -> None:
        """Say what it runs with."""
        names = [package.split("=")[0].split("[")[0] for package in self.args["packages"]]
        self.config["versions"] = {"python": sys.version.split()[0], **{name: metadata.version(name) for name in names}}
        self.config["devices"] = [str(device) for device in devices]
        (self._run_dir / "config.json").write_text(json.dumps(self.config, indent=2))

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """What is in here is compilation, and does not count as training."""
        began = time.perf_counter()
        yield
        self._compiled += time.perf_counter() - began

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """What is in here does not count as training."""
        began = time.perf_counter()
        yield
        self._evaluated += time.perf_counter() - began

    def write(self, env_steps: int, returns: Iterable[float]) -> None:
        """Add an evaluation after so many steps of each agent: the mean return of each seed."""
        returns, wall = [float(value) for value in returns], time.perf_counter() - self._began
        row = {
            "env_steps": env_steps,
            "eval/return_mean": returns if len(returns) > 1 else returns[0],
            "time/wall": wall,
            "time/compile": self._compiled,
            "time/sps_total": env_steps / (wall - self._compiled - self._evaluated),
        }
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        print(f"step {env_steps:,} / {self.args['total_timesteps']:,}, greedy return {returns}", flush=True)


def evaluation_points(total: int, interval: float) -> list[int]:
    """After how many updates to evaluate, evenly, about once in an interval and at the end. Both count updates."""
    count = max(round(total / interval), 1)
    return sorted({max(round(total * index / count), 1) for index in range(1, count + 1)})


@contextmanager
def run_of(argv: list[str]) -> Iterator[Rows]:
    """The run whose directory is named on the command line. It is marked as done where nothing fails in here."""
    run_dir = Path(argv[1])
    try:
        with locked(run_dir):
            yield Rows(run_dir)
            (run_dir / "DONE").touch()
    except UsageError as error:
        sys.exit(f"error: {error}")
