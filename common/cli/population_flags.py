"""Flags of populations: agents trained together that may differ in their flags, and population-based training."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Annotated, Any, NamedTuple

from common.cli.checks import Bounds, Count, CountOrZero, flag_of, sweepable
from common.cli.env_flags import (
    PREFIX,
    Draw,
    check_sweepable,
    combined,
    drawn,
    given_number,
    lists_in,
    read_sweep,
    rounded,
)
from common.cli.errors import UsageError
from common.cli.run_flags import Members, RunArgs

OWN = ("population", "sweep")
ALONE = ("num_seeds", "num_devices", "opponent", "opponent_interval", "sharding", *OWN)  # nothing for who trains alone
MOST = 10_000  # agents, whose metrics are one line


@dataclass(kw_only=True)
class PopulationArgs(RunArgs):
    """How many agents, and in which flags they differ."""

    # populations
    num_seeds: Count = 1
    """Independent agents trained together, with seeds seed, seed + 1, ...; of each combination of values in --sweep."""
    population: Annotated[int, Bounds(at_least=0, at_most=MOST)] = 0
    """Members trained together, with seeds seed, seed + 1, ..., that differ in what --sweep draws; 0: none."""
    sweep: tuple[str, ...] = ()
    """Hyper-parameters of members: with --population draws, as learning_rate=log:1e-4:1e-2 gamma=uniform:0.9:0.999
    ent_coef=choice:0,0.01; without it all combinations of values, as learning_rate=3e-4,1e-3 clip_eps=0.1,0.2."""

    @property
    def fixed(self) -> tuple[str, ...]:
        return (*super().fixed, *OWN, *["env_params"] * any(name.startswith(PREFIX) for name in self.members.hyper))

    @property
    def grid(self) -> dict[str, tuple[float, ...]]:
        """By flag the values of --sweep, of which all combinations are trained; nothing in a population that draws."""
        return {} if self.population else read_sweep(self.sweep, sweepable(type(self)))[1]

    @property
    def num_agents(self) -> int:
        """Agents trained together."""
        return self.population or math.prod(map(len, self.grid.values())) * self.num_seeds

    @property
    def is_population(self) -> bool:
        return bool(self.population or self.sweep)

    @property
    def members(self) -> Members:
        values = combined(self.grid, self.num_seeds) or drawn(self.draws, self.seed, self.num_agents)
        seeds = [self.seed + index % (self.population or self.num_seeds) for index in range(self.num_agents)]
        return Members(seeds, values)

    @property
    def draws(self) -> dict[str, Draw]:
        """What each member of a --population draws, by flag, or by `env.` and the name of a parameter."""
        lists = lists_in(self.env_params) if self.population else {}
        of_env = {name: Draw("choice", values) for name, values in lists.items()}
        swept, _ = read_sweep(self.sweep, sweepable(type(self)))
        if both := sorted(of_env.keys() & swept.keys()):
            raise UsageError(f"--sweep and --env-params both say what members draw for {both[0]}")
        return of_env | swept

    def __post_init__(self):
        super().__post_init__()
        draws, values = read_sweep(self.sweep, sweepable(type(self)))
        if draws and not self.population:
            raise UsageError(f"--sweep {min(draws)} draws, and needs --population N: so many members draw their values")
        if values and self.population:
            name = min(values)
            raise UsageError(f"--sweep {name}: with --population members draw from values, as in {name}=choice:A,B,...")
        if self.population and self.num_seeds > 1:
            raise UsageError("--population says how many agents there are, each with a seed: leave out --num-seeds")
        if self.num_agents > MOST:
            raise UsageError(f"{self.num_agents:,} agents are more than can be trained together: at most {MOST:,}")
        for name, values in (self.grid | {name: draw.values for name, draw in self.draws.items()}).items():
            if not name.startswith(PREFIX):  # the environment checks those
                self._check_values(name, values)

    def _check_values(self, name: str, values: tuple[float, ...]) -> None:
        """Raise UsageError where a run with one of these values alone would be refused."""
        shared = [x for x in dataclasses.fields(self) if x.name in ALONE or x.name.startswith("pbt")]
        alone = {x.name: x.default for x in shared}
        for value in values:
            try:
                dataclasses.replace(self, **alone, **{name: value})
            except UsageError as error:
                raise UsageError(f"--sweep {name}: {error}") from error


LEAST = 1e-6  # that changes leave of what is missing to 1: single precision tells it from nothing


def clipped(number: float, low: float, high: float) -> float:
    """The nearest number from `low` to `high`."""
    return min(max(number, low), high)


class Rules(NamedTuple):
    """How members exchange weights and change hyper-parameters; all but the first three are constants."""

    window: int  # newest episodes whose mean is the objective
    complements: tuple[str, ...] = ()  # of which what is missing to 1 changes
    shares: tuple[str, ...] = ()  # which stay at most 1
    fraction: float = 0.3  # of the members that are among the best, and among the worst
    gap: float = 0.1  # by which a better one has to be better, relative to the larger magnitude
    gap_absolute: float = 1e-6  # and in all
    mutation_rate: float = 0.15  # probability that a value changes
    factors: tuple[float, float] = (1.1, 1.5)  # lowest and highest by which it is multiplied or divided
    complement_factors: tuple[float, float] = (1.01, 1.2)  # the same for what is missing to 1
    reset_rate: float = 0.01  # of the changes that go back to the given value

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

    # population-based training
    pbt: bool = False
    """Population-based training: the worst members of a --population copy the best, and hyper-parameters are perturbed.
    Member 0 is a control, which keeps its flags."""
    pbt_evolve: tuple[str, ...] = ()
    """Hyper-parameters to evolve, as learning_rate ent_coef, or env.NAME, a number that --env-params has; default those
    of --sweep, else all that can and are not 0."""
    pbt_start: CountOrZero = 0
    """Environment steps of each member before the first exchange."""
    pbt_interval: Count = 20_000
    """Environment steps of each member between exchanges, rounded up to whole updates."""
    pbt_window: Annotated[int, Bounds(at_least=1, at_most=100)] = 100
    """Newest episodes of a member whose mean return (or objective) ranks it, at most 100."""

    @property
    def fixed(self) -> tuple[str, ...]:
        deciding = [x for x in (*sweepable(type(self)), "lr_schedule", "autotune") if hasattr(self, x)]
        return (*super().fixed, "pbt", "pbt_evolve", *(deciding if self.pbt else ()))

    @property
    def rules(self) -> Rules:
        ways = sweepable(type(self)).items()
        complements, shares = (tuple(x for x, by in ways if by == way) for way in ("complement", "share"))
        return Rules(self.pbt_window, complements, shares)

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
        drawn, _ = read_sweep(self.sweep, sweepable(type(self)))
        able = [name for name in sweepable(type(self)) if self.rules.can_change(name, getattr(self, name))]
        possible = [name for name in able if name not in self._inert]
        return {name: self._value(name) for name in (self.pbt_evolve or drawn or possible)}

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
        names = [name if name.startswith(PREFIX) else name.replace("-", "_") for name in self.pbt_evolve]
        self.pbt_evolve = tuple(names)
        check_sweepable("--pbt-evolve", names, sweepable(type(self)))
        self._check_evolution()

    def _check_evolution(self) -> None:
        given = [x for x in self._given(" ".join(PbtArgs.__annotations__)) if x != "--pbt"]
        if given and not self.pbt:
            raise UsageError(f"{given[0]} needs --pbt")
        if self.pbt and self.population < 2:
            raise UsageError(f"--pbt needs a --population of 2 or more members, not {self.population}")
        for name in (*self.draws, *self.evolving) if self.pbt else ():
            flag, value = flag_of(name), self._value(name)
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
