"""Setup of a run: what is known of it before it loads, writes or trains anything."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pmaprl.device.programs import set_up_cache
from pmaprl.machine import multihost
from pmaprl.machine.devices import Device
from pmaprl.runs import reports
from pmaprl.runs.clock import Clock
from pmaprl.runs.console import Console
from pmaprl.runs.directory import agree_on_directory, describe_run
from pmaprl.runs.intervals import intervals_of
from pmaprl.runs.metrics import Row, import_writers
from pmaprl.runs.signals import Interruption

Callback = Callable[[Row], Any]
"""Function that is called with every row of metrics, once it is written; True ends the run."""


class Setup:
    """Flags, devices and directory of a run, its console and its clock.

    Attributes:
        args: the flags.
        devices: the devices of all processes.
        is_game: True if evaluations have a rate of games won.
        env_name: name of the environment.
        cautions: limits of metrics, see `Algorithm.cautions`.
        total: environment steps of the whole run.
        end: environment steps at which this invocation ends.
        intervals: when to log, evaluate and save.
        config: content of `config.json`.
        path: the run's directory; None if nothing is written.
        dir: directory in which this process writes, if it is the first.
        console: the terminal.
        interruption: signals that stop the run. Enter it before the run begins.
        clock: seconds of the run.
        callback: called with every row of metrics.
        header: lines for the console.
    """

    def __init__(
        self,
        args: Any,
        script: str,
        env: Any,
        devices: list[Device],
        notes: dict[str, str],
        callback: Callback | None = None,
        cautions: Mapping[str, tuple[float, str]] | None = None,
    ):
        """Choose the run's directory, without writing anything.

        Args:
            args: the flags.
            script: file of the algorithm.
            env: the environment, with a `name` and a `spec`.
            devices: the devices of all processes.
            notes: lines for the header, by their first word.
            callback: called with every row of metrics.
            cautions: limits of metrics, see `Algorithm.cautions`.

        Raises:
            UsageError: the directory or an extra cannot be used.
        """
        import_writers(args)  # fails before anything is written
        set_up_cache()
        self.args = args
        self.devices = devices
        self.is_game: bool = getattr(env, "is_game", False)
        self.env_name: str = env.name
        self.cautions = dict(cautions or {})
        self.total: int = args.num_updates * args.steps_per_update
        self.end: int = min(self.total, args.stop_after or self.total)
        self.intervals = intervals_of(args, on_accelerator=devices[0].platform != "cpu")
        self.config = describe_run(args, script, env, devices)
        self.path, changes = agree_on_directory(args, self.config)
        self.has_changes = bool(changes)
        is_first = multihost.is_first()
        self.dir: Path | None = self.path if is_first else None
        self.console = Console(
            args.quiet or args.benchmark, self.total, args.is_population, speaks=is_first
        )
        self.interruption = Interruption(self.console)
        self.clock = Clock()
        self.callback = callback if is_first else None
        self.header = reports.header(self, env.name, notes, changes)
