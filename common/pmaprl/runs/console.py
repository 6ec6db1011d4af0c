"""The terminal of a run: header, progress bar (or a line per interval) and warnings."""

import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from pmaprl.cli.errors import printable_lines

T = TypeVar("T")


class Doing:
    """Text of what goes on, and for how many seconds it has when it is shown."""

    def __init__(self, what: str):
        self._what = what
        self._began = time.monotonic()

    def __str__(self) -> str:
        return f"{self._what} {time.monotonic() - self._began:.0f} s" if self._what else ""


class Console:
    """Prints a progress bar to a terminal, plain lines elsewhere, and nothing but warnings when
    quiet.
    """

    def __init__(
        self, quiet: bool, total_steps: int, is_population: bool = False, speaks: bool = True
    ):
        """One that does not speak is silent altogether."""
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
        if self._speaks:
            # A live bar has to know of every line; else warnings go to stderr.
            stream, target = (
                ("stdout", self._bar.console) if self._bar else ("stderr", self._errors)
            )
            with self._unread(stream):
                target.print(f"warning: {printable_lines(text)}", markup=False, style="yellow")

    @contextmanager
    def _unread(self, stream: str = "stdout") -> Iterator[None]:
        """Inside, a stream may prove to be broken: from then on the run goes on without it.

        The reader has gone, as in `| head` (rich makes that a SystemExit), or the terminal, or the
        disk is full.
        """
        try:
            yield
        except (OSError, SystemExit):
            self.quiet = self.quiet or stream == "stdout"
            self._bar = None
            setattr(sys, stream, open(os.devnull, "w"))  # noqa: SIM115

    def show_bar(self, steps: int) -> None:
        """Show how far the training is and what goes on, where output is a terminal, in one line of
        80 columns.
        """
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

    def doing(self, what: str) -> None:
        """Show what goes on from now on, such as `compiling`, and the seconds that it takes."""
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
        ended = round(float(np.sum(row["episode/count"])))
        earned = (
            f"return {brief_returns(row['episode/return'], self._is_population)}"
            if ended
            else "no episode ended"
        )
        which = f"({ended:,} episode{'s' * (ended > 1)} ended)" if ended else ""
        speed = f"{row['time/sps']:,.0f} steps/s"
        if self._bar:
            # Of a population its best; the rest is for long lines
            first = earned.split(", ")[0].split(" over ")[0]
            with self._unread():
                self._bar.update(
                    self._bar.task_ids[0],
                    report=f"{first if ended else ''} {row['time/sps']:,.0f}/s",
                )
            self.reach(steps)
            return
        eta = max(self.total - steps, 0) / max(row["time/sps_wall"], 1e-9)
        shown = " ".join(filter(None, [earned, which]))
        self.say(f"step {steps:>11,} / {self.total:,}  {shown}  {speed}  ETA {eta:.0f} s")

    def attempt(self, what: str, tell: Callable[..., T], *args: Any) -> T | None:
        """What `tell` returns at the end of a run, which that does not decide; None where it fails,
        with a warning.
        """
        try:
            return tell(*args)
        except Exception as error:
            self.warn(f"the run's {what} failed at the end: {type(error).__name__}: {error}")
            return None

    def show_cursor(self) -> None:
        """Give the terminal back its cursor, for a process that ends at once."""
        if not self.quiet:
            with self._unread():
                self._rich.show_cursor()

    def stop(self, steps: int) -> None:
        """End the bar, which shows these trained steps for good."""
        if self._bar:
            self.doing("")
            self.reach(steps)
            with self._unread():
                self._bar.stop()
            self._bar = None


def brief(number: float, unit: str = "") -> str:
    """A number as people read it, such as a return; "-" where there is none."""
    if not math.isfinite(number):
        return "-"
    digits = (
        ",.0f" if abs(number) >= 1000 else ",.1f" if abs(number) >= 10 or number == 0 else ".3g"
    )
    return f"{number:{digits}}{unit}"


def brief_returns(returns: float | list[float | None] | None, is_population: bool) -> str:
    """Mean ± deviation over the seeds that have a return; of a population the best, the median and
    the worst one.
    """
    every = np.array(returns, float, ndmin=1)  # with NaN for None
    finite = every[np.isfinite(every)]
    if not len(finite):
        return "-"
    if is_population:
        return (
            f"best {brief(finite.max())}, median {brief(np.median(finite))}, worst "
            f"{brief(finite.min())}"
        )
    spread = f" ± {brief(finite.std())} over {len(finite)} seeds" if len(finite) > 1 else ""
    return f"{brief(finite.mean())}{spread}"
