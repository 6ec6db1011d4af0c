"""What a run begins from, nothing, a run that it resumes or parameters of another one, and what it saves."""

import hashlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from common.cli.errors import TrainingError, UsageError
from common.cli.files import read_config
from common.cli.run_flags import ONE_TIME
from common.device import multihost
from common.device.sharding import Arrays, flatten, to_host, unflatten
from common.runs.checkpoints import FOLDER, Checkpoints, Damaged, Mismatch, sha256
from common.runs.console import Console
from common.runs.directory import differences
from common.runs.lock import is_ours
from common.runs.reports import Score, has_ended_at, stored_evaluation

TRANSFERRED = tuple(f"learner/{name}/" for name in ("params", "target_params", "obs_stats", "return_stats"))
"""What --init-from takes over."""


class Start(NamedTuple):
    """What a run begins from."""

    step: int = 0
    arrays: Arrays = {}  # of another state, in place of fresh ones; not to be changed
    host: Any = None  # that state on the host, where a run is resumed
    newest: Score = Score(0, {})  # the last evaluation; not to be changed
    damaged: tuple[Damaged, ...] = ()  # checkpoints that do not load


def load(args: Any, config: dict[str, Any], like: Any, console: Console) -> Start:
    """The newest state, `like` this, of the run that --resume names, or else the parameters that --init-from names."""
    path, source = Path(args.resume), config["args"]["init_from"]
    saved = Checkpoints(path / FOLDER, read_only=True, is_population=args.is_population)
    if not args.resume or not _has_saved(saved, path, console):
        return Start(arrays=_parameters_of(source, config, like, console)) if source else Start()
    zeros = flatten(like)
    try:
        step, stored, damaged = saved.load(zeros, optional=args.renewed)
        if args.keep_best and multihost.on_first(lambda: saved.by_return()[-1:]) not in ([], [step]):
            # A damaged one must not count as the best
            damaged += saved.load(zeros, optional=args.renewed, candidates=lambda: [step, *saved.by_return()])[2]
    except Mismatch as error:
        why = explain_mismatch(error, read_config(path), config)
        raise UsageError(f"{path} cannot go on with these flags: {why}") from error
    total = args.num_updates * args.steps_per_update
    if step > total:
        raise UsageError(f"--total-timesteps {args.total_timesteps} is less than the {step} steps that {path} has done")
    console.say(f"resumed  {path} at step {step:,}")
    missing = zeros.keys() - stored.keys()
    renewed = tuple(part for part in args.renewed if any(name.startswith(part) for name in missing))
    if renewed:
        console.say(f"resumed  without {', '.join(renewed)}, which the checkpoint does not have: they begin anew")
    whole = zeros | stored
    return Start(
        step=step,
        arrays={name: x for name, x in whole.items() if not name.startswith(renewed)},
        host=unflatten(whole, like),
        newest=Score(*multihost.on_first(stored_evaluation, path, step)),
        damaged=tuple({one.step: one for one in damaged}.values()),
    )


def _has_saved(saved: Checkpoints, path: Path, console: Console) -> bool:
    """Whether the run at `path` has `saved` anything that it can go on from."""
    has_saved, has_finished = multihost.on_first(lambda: (bool(saved.steps()), (path / "DONE").exists()))
    if has_finished and not has_saved:
        raise UsageError(f"{path} has finished, but its checkpoints are gone: nothing is left to resume")
    if not has_saved:
        console.warn(f"{path} has no checkpoint yet: starting it from step 0")
    return has_saved


def _parameters_of(source: str, config: dict[str, Any], like: Any, console: Console) -> Arrays:
    """Parameters and normaliser statistics of the newest state of another run."""
    theirs, others = read_config(Path(source)), Checkpoints(Path(source) / FOLDER, read_only=True)
    wanted = {name: x for name, x in flatten(like).items() if name.startswith(TRANSFERRED)}
    try:
        step, arrays, damaged = others.load(wanted, TRANSFERRED)
    except Mismatch as error:
        why = explain_mismatch(error, theirs, config)
        raise UsageError(f"--init-from {source} does not fit: {why}") from error
    for one in damaged:
        console.warn(str(one))
    console.say(f"started from the parameters of {source} at step {step:,}")
    return arrays


def explain_mismatch(error: Mismatch, then: dict[str, Any], now: dict[str, Any]) -> str:
    """How two configurations, `then` and `now`, whose arrays differ, differ themselves, and the first such array."""
    flags = [name for name in now["args"] if name in then["args"] and name not in ONE_TIME]
    other = [f"it was made by {then['algorithm']}"] if then["algorithm"] != now["algorithm"] else []
    return "; ".join([*other, *differences(then["args"], now["args"], flags), str(error)])


class Saver:
    """Saves states, each once, with the evaluations that belong to them."""

    def __init__(self, directory: Path | None, args: Any, start: Start, warn: Callable[[str], None]):
        """Checkpoints go into the run's `directory`, or nowhere.

        All processes save at the same time. What the first finds in the directory the others are told.
        """
        self._directory = directory
        keep = args.keep_checkpoints, args.keep_best
        self.checkpoints = Checkpoints(directory and directory / FOLDER, *keep, is_population=args.is_population)
        for damaged in start.damaged:
            warn(self.checkpoints.set_aside(damaged))
        self._unsaved = args.unsaved
        self._saved, self._newest = {start.step}, start.host
        self._returns: dict[int, list[float]] = {}  # of the newest evaluation, by its step

    def add_evaluation(self, step: int, evaluation: dict[str, list[float]]) -> None:
        """Store the returns of an evaluation with the checkpoint of this step, now or once that is saved."""
        returns = evaluation["eval/return_mean"]
        self._returns = {step: returns}
        if step in self._saved:
            self.checkpoints.add_evaluation(step, returns)

    def save(self, step: int, state: Any) -> None:
        """Start saving, unless that is done.

        Raises TrainingError where it fails, or the save before did, or where the directory is not this run's any more.
        """
        if self._directory and multihost.is_first() and not is_ours(self._directory):
            raise TrainingError(f"{self._directory} was deleted or moved: nothing more can be saved")
        if step not in self._saved:
            self._newest = to_host(state, self._unsaved)
            self._saved.add(step)
            self.checkpoints.save(step, flatten(self._newest, self._unsaved), self._returns.get(step))

    def newest(self, state: Any) -> Any:
        """The state on the host: the one that was saved last, or that the run goes on from, else a copy of `state`."""
        return to_host(state, self._unsaved) if self._newest is None else self._newest

    def sha256(self, host: Any) -> str:
        """Checksum of what checkpoints hold of a state; of several processes that of their own checksums."""
        own = sha256(flatten(host, self._unsaved))
        return own if multihost.count() == 1 else hashlib.sha256("".join(multihost.allgather(own)).encode()).hexdigest()

    def is_judged(self, step: int) -> bool:
        """Whether the run has ended at this step before, all evaluations included: nothing cut it short."""
        if step not in multihost.on_first(lambda: [*self.checkpoints.evaluations()]):
            return False
        return multihost.on_first(has_ended_at, self._directory, step)

    def last_good(self) -> str:
        """In words, where a run that broke can go on."""
        with suppress(TrainingError):
            self.checkpoints.wait()
        newest = self.checkpoints.steps()[-1:]
        return f"the last good checkpoint is at step {newest[0]}" if newest else "there is no checkpoint yet"

    def close(self) -> None:
        """Wait, and raise TrainingError as that does."""
        self.checkpoints.wait()
        self.checkpoints.close()
