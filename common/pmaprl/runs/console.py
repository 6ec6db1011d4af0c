"""The terminal of a run: header, progress bar (or a line per interval) and warnings."""

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from pmaprl.cli.errors import printable_lines

T = TypeVar("T")


class Doing:
    """Text of an activity, with its seconds at the time when it is shown."""

    def __init__(self, what: str):
        self._what = what
        self._began = time.monotonic()

    def __str__(self) -> str:
        return f"{self._what} {time.monotonic() - self._began:.0f} s" if self._what else ""


class Console:
    """Prints a progress bar to a terminal, plain lines elsewhere, only warnings when quiet."""

    def __init__(
        self, quiet: bool, total_steps: int, is_population: bool = False, speaks: bool = True
    ):
        """Prepare the console of a run.

        Args:
            quiet: print warnings only.
            total_steps: environment steps of the run.
            is_population: the agents are members, not seeds.
            speaks: False: print nothing at all, not even warnings.
        """
        from rich.console import Console as Rich

        self.quiet = quiet or not speaks
        self.total = total_steps
        self._speaks = speaks
        self._is_population = is_population
        self._rich = Rich(highlight=False, soft_wrap=True)
        if self._rich.is_jupyter:  # there rich puts every line into a box of its own
            self._rich = Rich(
                highlight=False, soft_wrap=True, force_jupyter=False, force_terminal=False
            )
        self._errors = Rich(stderr=True, highlight=False, soft_wrap=True)
        self._bar = None

    def say(self, text: str) -> None:
        if self.quiet or not text:
            return
        with self._unread():
            if self._rich.is_terminal:
                self._rich.print(printable_lines(text), markup=False)
            else:  # rich would take longer for a line than an update may take
                print(printable_lines(text), flush=True)

    def warn(self, text: str) -> None:
        if not self._speaks:
            return
        stream = "stderr"
        target = self._errors
        if self._bar:  # a live bar has to know of every line
            stream = "stdout"
            target = self._bar.console
        with self._unread(stream):
            target.print(f"warning: {printable_lines(text)}", markup=False, style="yellow")

    @contextmanager
    def _unread(self, stream: str = "stdout") -> Iterator[None]:
        """Go on without a stream that proves to be broken inside.

        Its reader may have gone, as in `| head` (rich makes that a SystemExit), or the terminal, or
        the disk may be full.
        """
        try:
            yield
        except (OSError, SystemExit):
            self.quiet = self.quiet or stream == "stdout"
            self._bar = None
            setattr(sys, stream, open(os.devnull, "w"))  # noqa: SIM115

    def show_bar(self, steps: int) -> None:
        """Show progress and activity in one line of 80 columns, if output is a terminal."""
        if self.quiet or not self._rich.is_terminal:
            return
        from rich import progress, table

        def text(template: str) -> progress.TextColumn:
            return progress.TextColumn(template, table_column=table.Column(no_wrap=True))

        self._bar = progress.Progress(
            text("{task.completed:,.0f}/{task.total:,.0f}"),
            progress.BarColumn(bar_width=None, table_column=table.Column(ratio=1, min_width=4)),
            text("{task.fields[report]}"),
            text("{task.fields[doing]}"),
            progress.TextColumn("ETA"),
            progress.TimeRemainingColumn(compact=True),
            console=self._rich,
            refresh_per_second=5,
            expand=True,
        )
        self._bar.add_task(
            "", total=self.total, completed=steps, report="", doing=Doing("starting")
        )
        with self._unread():
            self._bar.start()

    @contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Say what goes on inside, such as `playing`; a terminal shows the seconds that pass."""
        if self.quiet or not self._rich.is_terminal:
            self.say(f"{what} ...")
            yield
            return
        from rich import progress

        columns = progress.SpinnerColumn(), progress.TextColumn("{task.fields[doing]}")
        self._bar = progress.Progress(
            *columns, console=self._rich, refresh_per_second=5, transient=True
        )
        self._bar.add_task("", total=None, doing=Doing(what))
        try:
            with self._bar:
                yield
        finally:
            self._bar = None

    def doing(self, what: str) -> None:
        """Show an activity that begins now, such as `compiling`, and its seconds."""
        if self._bar:
            self._bar.update(self._bar.task_ids[0], doing=Doing(what))

    def reach(self, steps: int) -> None:
        """Show that so many steps are trained."""
        if self._bar:
            self._bar.update(self._bar.task_ids[0], completed=min(steps, self.total))

    def update(self, steps: int, row: dict[str, Any]) -> None:
        """Show one log interval, with the return of the episodes that ended in it."""
        if self.quiet:
            return
        count = round(float(np.sum(row["episode/count"])))
        returns = brief_returns(row["episode/return"], self._is_population) if count else ""
        known = row["time/sps"]
        speed = f"{row['time/sps_total'] if known is None else known:,.0f}"
        if self._bar:
            # The line is short: the best of a population, or the mean of seeds
            first = returns.split(", ")[0].split(" over ")[0]
            report = f"return {first} {speed}/s" if count else f" {speed}/s"
            with self._unread():
                self._bar.update(self._bar.task_ids[0], report=report)
            self.reach(steps)
            return
        eta = max(self.total - steps, 0) / max(row["time/sps_wall"], 1e-9)
        episodes = "no episode ended"
        if count:
            episodes = f"return {returns} ({count:,} episode{'s' * (count > 1)} ended)"
        self.say(
            f"step {steps:>11,} / {self.total:,}  {episodes}  {speed} steps/s  ETA {eta:.0f} s"
        )

    def attempt(self, part: str, function: Callable[..., T], *args: Any) -> T | None:
        """Call a function at the end of a run, whose result does not depend on it.

        Returns:
            The function's value; None if it fails, with a warning that names the `part`.
        """
        try:
            return function(*args)
        except Exception as error:
            self.warn(f"the run's {part} failed at the end: {type(error).__name__}: {error}")
            return None

    def show_cursor(self) -> None:
        """Give the terminal back its cursor, for a process that ends at once."""
        if not self.quiet:
            with self._unread():
                self._rich.show_cursor()

    def stop(self, steps: int) -> None:
        """End the bar, which keeps showing these steps."""
        if self._bar:
            self.doing("")
            self.reach(steps)
            with self._unread():
                self._bar.stop()
            self._bar = None


def brief(number: float, unit: str = "") -> str:
    """Format a number, such as a return, with few digits; "-" if it is not finite."""
    if not math.isfinite(number):
        return "-"
    number = number + 0.0  # makes 0 of -0
    size = abs(number)
    if size >= 1000:
        return f"{number:,.0f}{unit}"
    if size >= 10 or number == 0:
        return f"{number:,.1f}{unit}"
    return f"{number:.3g}{unit}"


def brief_returns(returns: float | Sequence[float | None] | None, is_population: bool) -> str:
    """Format returns: mean ± deviation of seeds; best, median and worst of a population."""
    numbers = np.array(returns, float, ndmin=1)  # None becomes NaN
    finite = numbers[np.isfinite(numbers)]
    if not len(finite):
        return "-"
    if is_population:
        best = brief(finite.max())
        median = brief(np.median(finite))
        worst = brief(finite.min())
        return f"best {best}, median {median}, worst {worst}"
    mean = brief(finite.mean())
    if len(finite) == 1:
        return mean
    return f"{mean} ± {brief(finite.std())} over {len(finite)} seeds"
