"""Flags of population-based training."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

from common.cli.checks import check
from common.cli.env_params import given_number
from common.cli.errors import UsageError
from common.cli.members import Members
from common.cli.population_flags import PopulationArgs
from common.cli.sweeps import PREFIX, check_sweepable, read_sweep, rounded

LEAST = 1e-6  # that changes leave of what is missing to 1: single precision tells it from nothing


def clipped(number: float, low: float, high: float) -> float:
    """The nearest number from `low` to `high`."""
    return min(max(number, low), high)


class Rules(NamedTuple):
    """How members exchange weights and change hyper-parameters."""

    fraction: float  # of the members that are among the best, and among the worst
    window: int  # newest episodes whose mean is the objective
    gap: float  # by which a better one has to be better, relative to the larger magnitude
    gap_absolute: float
    mutation_rate: float  # probability that a value changes
    factors: tuple[float, float]  # lowest and highest by which it is multiplied or divided
    complement_factors: tuple[float, float]  # the same for what is missing to 1
    reset_rate: float  # of the changes that go back to the given value
    complements: tuple[str, ...]  # of which what is missing to 1 changes
    shares: tuple[str, ...]  # which stay at most 1

    def factors_of(self, name: str) -> tuple[float, float]:
        """Lowest and highest factor of a change."""
        return self.complement_factors if name in self.complements else self.factors

    def can_change(self, name: str, value: float | None) -> bool:
        """Whether factors make another number of it."""
        return value not in (None, 0, 1 if name in self.complements else 0)

    def moved(self, name: str, value: Any, factor: Any, clip: Callable = clipped) -> Any:
        """`value` after a change by the `factor`; where they are arrays, with a `clip` for those."""
        if name in self.complements:
            return 1 - clip((1 - value) * factor, LEAST, 1.0)
        return clip(value * factor, 0.0, 1.0) if name in self.shares else value * factor


@dataclass(kw_only=True)
class PbtArgs(PopulationArgs):
    """Members that evolve."""

    pbt: bool = False
    """Evolve the --population: the worst take over the best, and hyper-parameters change by chance; 0 is a control."""
    pbt_evolve: tuple[str, ...] = ()
    """Flags that change, such as learning_rate ent_coef; default those of --sweep, else all that can and are not 0."""
    pbt_env_params: tuple[str, ...] = ()
    """Parameters of the environment that change too, such as gravity; --env-params says what they are for member 0."""
    pbt_start: int = 0
    """Environment steps of each member before which there is no exchange."""
    pbt_interval: int = 20_000
    """Environment steps of each member between exchanges, rounded up to whole updates."""
    pbt_fraction: float = 0.3
    """Share of the members that are the best, which stay, and of those that are the worst."""
    pbt_window: int = 100
    """Newest episodes of a member by whose mean return, or objective, an exchange sorts it; at most 100."""
    pbt_gap: float = 0.1
    """A better one is better by more than this share of the larger return, in magnitude."""
    pbt_gap_absolute: float = 1e-6
    """And by more than this."""
    pbt_mutation_rate: float = 0.15
    """Probability that a value changes, of members that are not the best."""
    pbt_factors: tuple[float, float] = (1.1, 1.5)
    """It is multiplied or divided by a number between these; of discounts and Adam's betas see below."""
    pbt_complement_factors: tuple[float, float] = (1.01, 1.2)
    """What gamma, gae_lambda, adam_b1 and adam_b2 are below 1 is multiplied or divided by a number between these."""
    pbt_reset_rate: float = 0.01
    """Share of the changes that go back to the value of the command line."""

    @property
    def fixed(self) -> tuple[str, ...]:
        deciding = [x for x in (*self.sweepable.split(), "lr_schedule", "autotune") if hasattr(self, x)]
        return (*super().fixed, "pbt", "pbt_evolve", "pbt_env_params", *(deciding if self.pbt else ()))

    @property
    def rules(self) -> Rules:
        given = {name: getattr(self, f"pbt_{name}") for name in Rules._fields if hasattr(self, f"pbt_{name}")}
        return Rules(**given, complements=tuple(self.complements.split()), shares=tuple(self.shares.split()))

    @property
    def exchange_interval(self) -> int:
        """Environment steps between exchanges; 0 without."""
        updates = -(-self.pbt_interval // self.steps_per_update)
        return updates * self.steps_per_update if self.pbt else 0

    @property
    def remarks(self) -> dict[str, str]:
        """Lines for the header, by their first word: where a run is over before its first exchange."""
        last, every = self.num_updates * self.steps_per_update, self.exchange_interval
        first = every * max(1, -(-self.pbt_start // every)) if every else 0
        if first <= last:
            return {}
        lower = "--pbt-interval" if every > last else "--pbt-start"
        return {"pbt": f"no exchange: the first would be at step {first:,}, and the last is {last:,}; lower {lower}"}

    @property
    def evolving(self) -> dict[str, float]:
        """The flags and parameters of the environment that change, and their values on the command line."""
        swept = tuple(read_sweep(self.sweep, self.sweepable.split()))
        able = [name for name in self.sweepable.split() if self.rules.can_change(name, getattr(self, name))]
        possible = [name for name in able if name not in self._inert]
        of_env = tuple(PREFIX + name for name in self.pbt_env_params)
        return {name: self._value(name) for name in (*(self.pbt_evolve or swept or possible), *of_env)}

    @property
    def _inert(self) -> set[str]:
        """Flags whose change in the middle of a run would do nothing."""
        adaptive = getattr(self, "lr_schedule", "") == "kl-adaptive"
        at_first = ["alpha"] if getattr(self, "autotune", False) else []
        return {"learning_rate" if adaptive else "desired_kl", *at_first}

    @property
    def members(self) -> Members:
        if not self.pbt:
            return super().members
        seeds, values = super().members
        for name, given in self.evolving.items():
            random = Random(f"{self.seed} {name} at first")
            values.setdefault(name, [self._moved(name, given, random) for _ in range(self.population)])
        for name in values:
            values[name][0] = self._value(name)
        return Members(seeds, values)

    def _value(self, name: str) -> float | None:
        """What the command line says of a flag, or of a parameter of the environment."""
        return given_number(self.env_params, name) if name.startswith(PREFIX) else getattr(self, name)

    def _moved(self, name: str, value: float, random: Random) -> float:
        """A first change of `value`."""
        factor = random.uniform(*self.rules.factors_of(name))
        return rounded(self.rules.moved(name, value, factor if random.random() < 0.5 else 1 / factor))

    def __post_init__(self):
        super().__post_init__()
        check(self, "pbt_start", at_least=0)
        check(self, "pbt_interval", at_least=1)
        check(self, "pbt_window", at_least=1, at_most=100)
        check(self, "pbt_fraction", above=0, at_most=0.5)
        check(self, "pbt_gap pbt_gap_absolute", at_least=0)
        check(self, "pbt_mutation_rate pbt_reset_rate", at_least=0, at_most=1)
        check(self, "pbt_factors pbt_complement_factors", at_least=1)
        self.pbt_evolve = tuple(name.replace("-", "_") for name in self.pbt_evolve)
        self.pbt_env_params = tuple(name.removeprefix(PREFIX) for name in self.pbt_env_params)
        check_sweepable("--pbt-evolve", self.pbt_evolve, self.sweepable.split())
        self._check_evolution()

    def _check_evolution(self) -> None:
        for low, high in (self.pbt_factors, self.pbt_complement_factors):
            if low > high:
                raise UsageError(f"a lowest factor of {low:g} is above the highest, {high:g}")
        given = [x for x in self._given(" ".join(PbtArgs.__annotations__)) if x != "--pbt"]
        if given and not self.pbt:
            raise UsageError(f"{given[0]} needs --pbt")
        if self.pbt and self.population < 2:
            raise UsageError(f"--pbt needs a --population of 2 or more members, not {self.population}")
        if self.pbt and self.grid:
            raise UsageError("--pbt evolves a --population: leave out --grid")
        for name in (*self.draws, *self.evolving) if self.pbt else ():
            flag, value = "--" + name.replace("_", "-"), self._value(name)
            if value is None and name.startswith(PREFIX):
                example = f"--env-params '{{\"{name.removeprefix(PREFIX)}\": NUMBER}}'"
                raise UsageError(f"{name} needs the number that member 0 keeps, as in {example}")
            if value is None or name in self.evolving and not self.rules.can_change(name, value):
                but = "0 or 1" if name in self.rules.complements else "0"
                raise UsageError(
                    f"{flag} {value} cannot evolve: give the number, other than {but}, that member 0 keeps"
                )
        if self.pbt and self._inert & self.evolving.keys():
            name = min(self._inert & self.evolving.keys())
            raise UsageError(f"{name} cannot evolve with these flags: a change in the middle of a run would do nothing")
