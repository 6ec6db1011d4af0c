"""What a person sees while a run goes on: a header, a progress bar (or a line per interval), and the end."""

import os
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Console:
    """Prints a progress bar to a terminal, plain lines elsewhere, and nothing but warnings when quiet."""

    def __init__(self, quiet: bool, total_steps: int, brief: Callable[[Any], str] | None = None, speaks: bool = True):
        """`brief` puts the returns of several agents into a few words. One that does not speak is silent altogether."""
        from rich.console import Console as Rich

        self.quiet, self.total, self._brief = quiet or not speaks, total_steps, brief or brief_seeds
        self._speaks = speaks
        self._rich = Rich(highlight=False, soft_wrap=True)
        if self._rich.is_jupyter:  # there rich puts every line into a box of its own
            self._rich = Rich(highlight=False, soft_wrap=True, force_jupyter=False, force_terminal=False)
        self._errors = Rich(stderr=True, highlight=False, soft_wrap=True)
        self._bar = None
        self._task = None

    def say(self, text: str) -> None:
        if self.quiet:
            return
        try:
            self._rich.print(text, markup=False)
        except (OSError, SystemExit):
            # The reader has gone, as in `| head` (rich makes that a SystemExit), or the output's disk is full: the run
            # goes on without it.
            self.quiet = True
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115

    def warn(self, text: str) -> None:
        if not self._speaks:
            return
        # A live bar has to know of every line; else warnings go to stderr.
        target = self._bar.console if self._bar else self._errors
        target.print(f"warning: {text}", markup=False, style="yellow")

    def start(self, steps: int) -> None:
        """Show the progress bar, where output is a terminal."""
        if self.quiet or not self._rich.is_terminal:
            return
        from rich import progress

        columns = [
            progress.TextColumn("{task.completed:>11,.0f} / {task.total:,.0f} steps"),
            progress.BarColumn(bar_width=None),
            progress.TextColumn("{task.fields[report]}"),
            progress.TextColumn("ETA"),
            progress.TimeRemainingColumn(compact=True),
        ]
        self._bar = progress.Progress(*columns, console=self._rich, refresh_per_second=5)
        self._task = self._bar.add_task("", total=self.total, completed=steps, report="")
        self._bar.start()

    def update(self, steps: int, row: dict[str, Any]) -> None:
        """Show one log interval."""
        if self.quiet:
            return
        report = f"return {self._brief(row['episode/return_last100'])}  {row['time/sps']:,.0f} steps/s"
        if self._bar:
            self._bar.update(self._task, completed=min(steps, self.total), report=report)
            return
        eta = max(self.total - steps, 0) / max(row["time/sps_wall"], 1e-9)
        self.say(f"step {steps:>11,} / {self.total:,}  {report}  ETA {eta:.0f} s")

    @contextmanager
    def task(self, words: str) -> Iterator[Callable[[int, int], None]]:
        """While something slow goes on: yields a function to call with how much is done, and of how much.

        A bar on a terminal, a line elsewhere.
        """
        if self.quiet or not self._rich.is_terminal:
            self.say(f"{words} ...")
            yield lambda done, total: None
            return
        from rich import progress

        columns = progress.TextColumn("{task.description}"), progress.BarColumn(), progress.TimeElapsedColumn()
        with progress.Progress(*columns, console=self._rich, transient=True) as bar:
            task = bar.add_task(words, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)

    def abandon(self) -> None:
        """Give the terminal back its cursor, for a process that ends at once."""
        if self._bar:
            self._rich.show_cursor()

    def stop(self) -> None:
        if self._bar:
            self._bar.stop()
            self._bar = None


def brief_seeds(value: float | list[float | None] | None) -> str:
    """One number as it is, several as mean ± deviation over seeds."""
    numbers = [x for x in (value if isinstance(value, list) else [value]) if x is not None]
    if not numbers:
        return "-"
    several = isinstance(value, list) and len(value) > 1
    return f"{statistics.fmean(numbers):.1f}" + (f" ± {statistics.pstdev(numbers):.1f}" if several else "")
