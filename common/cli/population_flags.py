"""Flags of algorithms that train several agents together, which may differ in more than their seeds."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Annotated

from common.cli.checks import Bounds, Count, sweepable
from common.cli.env_params import lists_in
from common.cli.errors import UsageError
from common.cli.flags import RunArgs
from common.cli.members import Members
from common.cli.sweeps import PREFIX, Draw, combined, drawn, read_sweep

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
