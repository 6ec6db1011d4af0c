"""Flags of algorithms that train several agents together, which may differ in more than their seeds."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar

from common.cli.checks import check
from common.cli.env_params import lists_in
from common.cli.errors import UsageError
from common.cli.flags import RunArgs
from common.cli.members import Members
from common.cli.sweeps import PREFIX, Draw, combined, drawn, read_grid, read_sweep

OWN = ("population", "sweep", "grid")
ALONE = ("num_seeds", "num_devices", "matchmaking", "sharding", *OWN)  # flags without a meaning for who trains alone
MOST = 10_000  # agents, whose metrics are one line


@dataclass(kw_only=True)
class PopulationArgs(RunArgs):
    """How many agents, and in which flags they differ."""

    sweepable: ClassVar[str] = ""
    """Flags in which members of a population may differ, which the algorithm reads from `hyper_of`."""
    complements: ClassVar[str] = ""
    """Those of them that are near 1, such as discounts: what is missing to 1 is what --pbt changes."""
    shares: ClassVar[str] = ""
    """Those that are at most 1: no change of --pbt takes them further."""
    num_seeds: int = 1
    """Independent agents trained together, with seeds seed, seed + 1, ...; with --grid, of each combination."""
    population: int = 0
    """Members trained together, with seeds seed, seed + 1, ..., that draw the values of --sweep; 0 is none."""
    sweep: tuple[str, ...] = ()
    """What each member draws: learning_rate=log:1e-4:1e-2 gamma=uniform:0.9:0.999 ent_coef=choice:0,0.01,0.1."""
    grid: tuple[str, ...] = ()
    """Values of which all combinations are trained: learning_rate=3e-4,1e-3 clip_eps=0.1,0.2."""

    @property
    def fixed(self) -> tuple[str, ...]:
        return (*super().fixed, *OWN, *["env_params"] * any(name.startswith(PREFIX) for name in self.members.hyper))

    @property
    def num_agents(self) -> int:
        """Agents trained together."""
        combinations = math.prod(map(len, read_grid(self.grid, self.sweepable.split()).values()))
        return self.population or combinations * self.num_seeds

    @property
    def is_population(self) -> bool:
        return bool(self.population or self.grid)

    @property
    def members(self) -> Members:
        if self.grid:
            values = combined(read_grid(self.grid, self.sweepable.split()), self.num_seeds)
        else:
            values = drawn(self.draws, self.seed, self.num_agents)
        seeds = [self.seed + index % (self.population or self.num_seeds) for index in range(self.num_agents)]
        return Members(seeds, values)

    @property
    def draws(self) -> dict[str, Draw]:
        """What each member of a --population draws, by flag, or by `env.` and the name of a parameter."""
        lists = lists_in(self.env_params) if self.population else {}
        of_env = {name: Draw("choice", values) for name, values in lists.items()}
        swept = read_sweep(self.sweep, self.sweepable.split())
        if both := sorted(of_env.keys() & swept.keys()):
            raise UsageError(f"--sweep and --env-params both say what members draw for {both[0]}")
        return of_env | swept

    def __post_init__(self):
        super().__post_init__()
        check(self, "num_seeds", at_least=1)
        check(self, "population", at_least=0, at_most=MOST)
        if self.sweep and self.grid:
            raise UsageError("--sweep draws values and --grid goes through all: give only one of them")
        if self.sweep and not self.population:
            raise UsageError("--sweep needs --population N: so many members draw their values")
        if self.grid and self.population:
            raise UsageError("--grid has as many members as combinations: leave out --population")
        if self.population and self.num_seeds > 1:
            raise UsageError("--population says how many agents there are, each with a seed: leave out --num-seeds")
        if self.num_agents > MOST:
            raise UsageError(f"{self.num_agents:,} agents are more than can be trained together: at most {MOST:,}")
        check_values = read_grid(self.grid, self.sweepable.split())
        check_values |= {name: draw.values for name, draw in self.draws.items()}
        for name, values in check_values.items():
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
                raise UsageError(f"{'--sweep' if self.sweep else '--grid'} {name}: {error}") from error


def check_matchmaking(args: Any) -> None:
    """Raise UsageError where --matchmaking members, of an algorithm that has it, does not fit the other flags."""
    if args.matchmaking == "none":
        return
    if args.population < 2:
        raise UsageError(f"--matchmaking members needs a --population of 2 or more members, not {args.population}")
    if args.opponent == "self":
        raise UsageError("--matchmaking members and --opponent self both say who plays the others: give only one")
    if args.sharding != "pmap":  # whose checks take the axis of the members for one of devices
        raise UsageError(f"--matchmaking members needs --sharding pmap, it is {args.sharding}")
