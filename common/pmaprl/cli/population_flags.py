"""Flags of populations: agents trained together that may differ in their flags, and
population-based training.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Annotated, Any, NamedTuple

from pmaprl.cli.checks import (
    Bounds,
    Count,
    CountOrZero,
    check_bounds,
    flag_of,
    kinds_of,
    limits_of,
    note_of,
    sweepable,
)
from pmaprl.cli.env_flags import FORMS, PREFIX, Draw, read_draw, rounded
from pmaprl.cli.errors import UsageError, shortened
from pmaprl.cli.run_flags import Members, RunArgs

MAX_AGENTS = 10_000  # agents, whose metrics are one line
# That changes leave of what is missing to 1: single precision tells it from nothing
MIN_COMPLEMENT = 1e-6


def clipped(number: float, low: float, high: float) -> float:
    """The nearest number from `low` to `high`."""
    return min(max(number, low), high)


class Rules(NamedTuple):
    """How members exchange weights and change hyper-parameters; all but the first three are
    constants.
    """

    window: int  # newest episodes whose mean is the objective
    ways: dict[str, str]  # how each flag changes, see `Swept.by`
    limits: dict[str, tuple[float, float]] = {}  # lowest and highest value of flags that have such
    fraction: float = 0.3  # of the members that are among the best, and among the worst
    gap: float = 0.1  # by which a better one has to be better, relative to the larger magnitude
    mutation_rate: float = 0.15  # probability that a value changes
    reset_rate: float = 0.01  # of the changes that go back to the given value

    def factors_of(self, name: str) -> tuple[float, float]:
        """Lowest and highest factor by which a value, or what is missing to 1, is multiplied or
        divided.
        """
        return (1.01, 1.2) if self.ways.get(name) == "complement" else (1.1, 1.5)

    def can_change(self, name: str, value: float | None) -> bool:
        """Tell if a factor changes the value."""
        return value not in (None, 0, 1 if self.ways.get(name) == "complement" else 0)

    def moved(self, name: str, value: Any, factor: Any, clip: Callable = clipped) -> Any:
        """`value` after a change by the `factor`; where they are arrays, with a `clip` for
        those.
        """
        way = self.ways.get(name)
        if way == "complement":
            return 1 - clip((1 - value) * factor, MIN_COMPLEMENT, 1.0)
        low, high = (0.0, 1.0) if way == "share" else self.limits.get(name, (-math.inf, math.inf))
        return clip(value * factor, low, high)


@dataclass(kw_only=True)
class PbtArgs(RunArgs):
    """Flags of several agents: how many, in which flags they differ, and how they evolve."""

    # populations
    num_seeds: Count = 1
    """Independent agents trained together, with seeds seed, seed + 1, ...; so many for each
    combination in --sweep."""
    population: Annotated[int, Bounds(at_least=0, at_most=MAX_AGENTS)] = 0
    """Members trained together, with seeds seed, seed + 1, ..., that differ in what --sweep draws;
    0: none."""
    sweep: tuple[str, ...] = ()
    """Hyper-parameters in which members differ: all combinations of values, as
    learning_rate=3e-4,1e-3 clip_eps=0.1,0.2, or with --population random draws, as
    learning_rate=log:1e-4:1e-2 gamma=uniform:0.9:0.999 ent_coef=choice:0,0.01."""

    # population-based training
    pbt: bool = False
    """Let the worst members of a --population copy the best and perturb their hyper-parameters;
    member 0 is a control, which keeps its flags."""
    pbt_evolve: tuple[str, ...] = ()
    """Hyper-parameters to evolve, as learning_rate ent_coef (default: those of --sweep, else all
    that can be swept and are not 0)."""
    pbt_start: CountOrZero = 0
    """Environment steps of each member before the first exchange."""
    pbt_interval: Count = 20_000
    """Environment steps of each member between exchanges, rounded up to whole updates."""
    pbt_window: Annotated[int, Bounds(at_least=1, at_most=100)] = 100
    """Rank members by the mean return of this many newest episodes (at most 100)."""

    @property
    def fixed(self) -> tuple[str, ...]:
        of_env = ["env_params"] * any(name.startswith(PREFIX) for name in self.swept)
        deciding = [
            x
            for x in (*sweepable(type(self)), "lr_schedule", "autotune")
            if self.pbt and hasattr(self, x)
        ]
        return (*super().fixed, "population", "sweep", *of_env, "pbt", "pbt_evolve", *deciding)

    @property
    def swept(self) -> dict[str, Draw]:
        """Draws that --sweep asks for, by flag or parameter of the environment."""
        found = {}
        for word in self.sweep:
            name, _, text = "".join(word.split()).removeprefix("--").partition("=")
            name = name if name.startswith(PREFIX) else name.replace("-", "_")
            if "=" in text and len(word.split()) > 1:
                told = "is one word: leave the quotes off, a word for each flag"
                raise UsageError(f"--sweep {shortened(repr(word))} {told}")
            if not text:
                raise UsageError(
                    f"--sweep {shortened(repr(word))} is not of the form NAME=A,B,... or "
                    f"NAME={FORMS}"
                )
            self._check_sweepable("--sweep", name)
            if name in found:
                raise UsageError(f"--sweep has {name} twice")
            found[name] = read_draw(f"--sweep {name}={shortened(text)}", text)
        return found

    @property
    def num_agents(self) -> int:
        return (
            self.population
            or math.prod(len(sweep.values) for sweep in self.swept.values()) * self.num_seeds
        )

    @property
    def is_population(self) -> bool:
        return bool(self.population or self.sweep)

    @property
    def members(self) -> Members:
        seeds = [
            self.seed + index % (self.population or self.num_seeds)
            for index in range(self.num_agents)
        ]
        swept = self.swept
        if self.population:  # a flag draws the same whatever others are swept
            streams = {name: Random(f"{self.seed} {name}") for name in swept}
            values = {
                name: [draw.draw(streams[name]) for _ in seeds] for name, draw in swept.items()
            }
        else:  # all combinations, each for as many seeds; the last flag changes first
            product = itertools.product(*(sweep.values for sweep in swept.values()))
            rows = [row for row in product for _ in range(self.num_seeds)]
            values = {name: [row[index] for row in rows] for index, name in enumerate(swept)}
        for name, given in self.evolving.items() if self.pbt else ():
            random = Random(f"{self.seed} {name} at first")
            rules = self.rules
            factors = (
                (random.uniform(*rules.factors_of(name)), random.random() < 0.5) for _ in seeds
            )
            moved = [
                rounded(rules.moved(name, given, factor if up else 1 / factor))
                for factor, up in factors
            ]
            values.setdefault(name, moved)
        for name in values if self.pbt else ():
            values[name][0] = getattr(self, name)  # of the control
        return Members(seeds, values)

    def values_of(self, name: str) -> list[Any]:
        """A flag's value, or those that --sweep gives members; evolution begins near those, within
        all limits.
        """
        return super().values_of(name) if name in self.swept else [getattr(self, name)]

    @property
    def rules(self) -> Rules:
        ways = sweepable(type(self))
        kinds = kinds_of(type(self))
        return Rules(
            self.pbt_window, ways, {name: limits_of(note_of(kinds[name], Bounds)) for name in ways}
        )

    @property
    def exchange_interval(self) -> int:
        """Environment steps between exchanges; 0 without."""
        updates = -(-self.pbt_interval // self.steps_per_update)
        return updates * self.steps_per_update if self.pbt else 0

    @property
    def evolving(self) -> dict[str, float]:
        """The flags that change, and their values on the command line."""
        able = [
            name
            for name in sweepable(type(self))
            if self.rules.can_change(name, getattr(self, name))
        ]
        possible = [name for name in able if name not in self._inert]
        return {name: getattr(self, name) for name in (self.pbt_evolve or self.swept or possible)}

    @property
    def _inert(self) -> set[str]:
        """Flags whose change in the middle of a run would do nothing."""
        adaptive = getattr(self, "lr_schedule", "") == "kl-adaptive"
        temperature = "alpha" if getattr(self, "autotune", False) else "target_entropy_scale"
        of_targets = set() if getattr(self, "target_networks", True) else {"tau"}
        return {"learning_rate" if adaptive else "desired_kl", temperature} | of_targets

    def __post_init__(self):
        super().__post_init__()
        for name, sweep in self.swept.items():
            if sweep.kind and not self.population:
                raise UsageError(
                    f"--sweep {name} draws, and needs --population N: so many members draw "
                    "their values"
                )
            if self.population and not sweep.kind:
                example = f"{name}=choice:A,B,..."
                raise UsageError(
                    f"--sweep {name}: with --population members draw from values, as in {example}"
                )
            if not name.startswith(PREFIX):  # the environment checks those
                bounds = note_of(kinds_of(type(self))[name], Bounds)
                check_bounds(f"--sweep {name}: {flag_of(name)}", sweep.values, bounds)
        if self.population and self.num_seeds > 1:
            raise UsageError(
                "--population says how many agents there are, each with a seed: leave out "
                "--num-seeds"
            )
        if self.num_agents > MAX_AGENTS:
            raise UsageError(
                f"at most {MAX_AGENTS:,} agents can be trained together, not {self.num_agents:,}"
            )
        self.pbt_evolve = tuple(name.replace("-", "_") for name in self.pbt_evolve)
        for name in self.pbt_evolve:
            self._check_sweepable("--pbt-evolve", name)
        if self.pbt:
            self._check_evolution()
        self.check_needed("pbt_evolve pbt_start pbt_interval pbt_window", "pbt")

    def _check_sweepable(self, flag: str, name: str) -> None:
        """Raise UsageError where members cannot differ in it; of the environment's parameters only
        itself knows.
        """
        if name not in sweepable(type(self)) and not name.startswith(PREFIX):
            known = (
                f"{', '.join(sweepable(type(self)))} only, or in {PREFIX}NAME, a number "
                "of the environment"
            )
            others = kinds_of(type(self)).keys() - {"env", "sweep", "population", "num_seeds"}
            word = flag_of(name) if name in others else ""
            loop = (
                f"; for {word} run one after another: for x in A B; do python ... {word} $x; done"
                if word
                else ""
            )
            raise UsageError(f"{flag} {shortened(name)}: members may differ in {known}{loop}")

    def _check_evolution(self) -> None:
        if self.population < 2:
            raise UsageError(
                f"--pbt needs a --population of 2 or more members, not {self.population}"
            )
        for name in (*self.pbt_evolve, *self.swept):
            if name.startswith(PREFIX):
                raise UsageError(
                    f"--pbt compares the returns of members, which {name} changes: leave it out"
                )
        for name in (*self.swept, *self.evolving):
            value = getattr(self, name)
            if name in self._inert & self.evolving.keys():
                raise UsageError(
                    f"{name} cannot evolve with these flags: a change in the middle of a run "
                    "does nothing"
                )
            if value is None or name in self.evolving and not self.rules.can_change(name, value):
                raise UsageError(
                    f"{flag_of(name)} {value} cannot evolve, as multiples of it are no other "
                    "numbers"
                )
