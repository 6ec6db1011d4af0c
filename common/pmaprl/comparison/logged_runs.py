"""Run directories as they are compared: flags, seeds and metrics, equal runs once."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pmaprl.cli.env_flags import read_params
from pmaprl.cli.errors import UsageError, printable, shortened
from pmaprl.cli.files import read_config
from pmaprl.cli.run_flags import ONE_TIME, PARAMS
from pmaprl.runs.metrics import Log, read_log
from pmaprl.runs.results import checksum_of


class LoggedRun(NamedTuple):
    """A run directory, read.

    A population becomes several of these: members with the same flags, as if they had run alone.
    """

    path: Path
    algorithm: str
    flags: dict[str, Any]
    seeds: list[int]
    log: Log
    checksum: str | None = None  # checksum of the final state; None while the run goes on
    copies: tuple[Path, ...] = ()  # equal runs, which are not counted
    codes: tuple[str, ...] = ()  # checksums of all versions of the algorithm's file that it used
    changed: tuple[str, ...] = ()  # flags that a resume changed; their values tell all in turn

    @property
    def meaning(self) -> dict[str, str]:
        """The flags that decide what is learned, as JSON."""
        return {
            name: json.dumps(value)
            for name, value in self.flags.items()
            if name not in FLAGS_WITHOUT_EFFECT
        }


EVOLVED = "evolved"  # value of a flag that PBT changes


def read_parts(path: Path, metrics: Iterable[str], each_seed: bool = False) -> Iterator[LoggedRun]:
    """Read a run, split into members with equal flags, or into all seeds and members.

    A population with PBT is one part, because its members change their values.

    Args:
        path: The run.
        metrics: Names of the metrics to read.
        each_seed: True to make a part of each seed and member.
    """
    config = read_config(path)
    log = read_log(path, metrics)
    checksum = checksum_of(path)
    flags = config["args"]
    algorithm = config["algorithm"]
    recipe = flags.get("recipe") or ""
    if recipe not in algorithm:
        algorithm += f" ({recipe})"
    algorithm = shortened(printable(algorithm))
    earlier = config.get("earlier_flags", {})
    flags = flags | {name: _in_turn(earlier[name], flags[name]) for name in earlier}
    flags = flags | {"env": shortened(printable(flags["env"]))}
    for name in PARAMS:
        if name in flags:
            flags[name] = _canonical(flags[name])
    members = config.get("members") or _members_by_seed(config["args"])
    alike = {}
    for index, member in enumerate(members):
        values = {name: value for name, value in member.items() if name != "seed"}
        if config["args"].get("pbt"):
            values = dict.fromkeys(values, EVOLVED)
        text = json.dumps(values)
        alike.setdefault((text, index if each_seed else 0), []).append(index)
    for (values, _), indices in alike.items():
        seeds = [members[index]["seed"] for index in indices]
        try:
            part = log.of(indices, len(members))
        except UsageError as error:
            raise UsageError(f"{path}/metrics.jsonl: {error}") from error
        yield LoggedRun(
            path=path,
            algorithm=algorithm,
            flags=flags | json.loads(values) | {"seed": seeds[0]},
            seeds=seeds,
            log=part,
            checksum=checksum,
            codes=_codes(config),
            changed=tuple(name for name in earlier if name not in json.loads(values)),
        )


def flag_text(value: Any) -> str:
    """A flag's value as it is written on the command line."""
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return shortened(printable(text))


def _in_turn(segments: list[list[Any]], newest: Any) -> str:
    """The values of a flag that a resume changed, as `0.001 until step 1,000, then 0.0001`."""
    parts = [f"{flag_text(value)} until step {end:,}" for value, end in segments]
    return ", then ".join([*parts, flag_text(newest)])


def _canonical(env_params: str) -> str:
    """The same parameters of an environment as the same text, however they were typed."""
    try:
        params = read_params(env_params)
    except UsageError:  # such as one for each part of a run
        return env_params
    return json.dumps(params, sort_keys=True) if params else ""


def _members_by_seed(flags: dict[str, Any]) -> list[dict[str, Any]]:
    """Members of a run that differ in their seed only."""
    first = flags.get("seed", 0)
    count = flags.get("num_seeds", 1)
    return [{"seed": seed} for seed in range(first, first + count)]


def _codes(config: dict[str, Any]) -> tuple[str, ...]:
    """The checksums of the algorithm's file in `config.json`, including those before a resume."""
    codes = [config.get("script_sha256")]
    earlier = config.get("earlier_scripts")
    if isinstance(earlier, list):
        codes += earlier
    return tuple(str(code) for code in codes if code)


def once_each(runs: Iterable[LoggedRun]) -> tuple[list[LoggedRun], list[str]]:
    """Leave out repetitions: runs with the same flags, seeds, metrics and final state.

    A repetition says nothing about other seeds, and would make intervals too narrow.

    Returns:
        The other runs, and a note on each repetition.
    """
    places: dict[str, int] = {}
    counted = []
    notes = []
    for run in runs:
        identity = _identity(run)
        if run.checksum and identity in places:
            first = counted[places[identity]]
            counted[places[identity]] = first._replace(copies=(*first.copies, run.path))
            notes.append(
                f"{run.path}: equal to {first.path} in flags, seeds and result, counted once"
            )
        else:
            places[identity] = len(counted)
            counted.append(run)
    return counted, list(dict.fromkeys(notes))


def _identity(run: LoggedRun) -> str:
    """Text that two runs share only if one repeats the other."""
    logged = {
        name: (series.steps.tolist(), series.values.tolist())
        for name, series in run.log.series.items()
    }
    parts = [
        run.algorithm,
        run.flags["env"],
        run.meaning,
        run.seeds,
        run.checksum,
        logged,
    ]
    return json.dumps(parts, sort_keys=True)


FLAGS_WITHOUT_EFFECT = {
    "env",
    "seed",
    "num_seeds",
    "population",
    "sweep",
    "num_devices",
    "sharding",
    "gif",
    "tensorboard",
    "wandb",
    "log_interval",
    "eval_interval",
    "checkpoint_interval",
    "keep_checkpoints",
    "keep_best",
    "log_each",
}
FLAGS_WITHOUT_EFFECT |= {name for name in ONE_TIME if name != "init_from"}
"""Flags that do not change what is learned, or by which runs are grouped anyway."""
