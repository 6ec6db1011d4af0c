"""What a run saves, and what it begins from: a fresh state, a run that it resumes, or the
parameters of another run.
"""

import hashlib
import shlex
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from pmaprl.cli.errors import TrainingError, UsageError
from pmaprl.cli.files import read_config
from pmaprl.cli.run_flags import ONE_TIME, differences
from pmaprl.device import multihost
from pmaprl.device.sharding import Arrays, copied, flatten, to_host, unflatten
from pmaprl.runs.checkpoints import FOLDER, Checkpoints, Mismatch, sha256
from pmaprl.runs.console import Console
from pmaprl.runs.lock import is_ours
from pmaprl.runs.results import EvaluationResult, has_ended_at, stored_evaluation

TRANSFERRED = tuple(
    f"learner/{name}/" for name in ("params", "target_params", "obs_stats", "return_stats")
)
"""What --init-from takes over."""
ENVS = "actors/env_state", "actors/seen", "actors/memory", "actors/tracker", "actors/discounted"
REPLAY = "actors/replay/"
RENEWED = (*ENVS, REPLAY)
"""Beginnings of the names of arrays, of environments and the replay buffer, without which a
checkpoint still loads.
"""


class InitialState(NamedTuple):
    """What a run begins from."""

    step: int = 0
    arrays: Arrays = {}  # of another state, in place of fresh ones; not to be changed
    host: Any = None  # that state on the host, where a run is resumed, with zeros for what it lacks
    newest: EvaluationResult = EvaluationResult(0, {})  # the last evaluation; not to be changed
    has_ended: bool = False  # there before: nothing cut it short, and this step was evaluated


def load(args: Any, config: dict[str, Any], like: Any, console: Console) -> InitialState:
    """The newest state, `like` this, of the run that --resume names, or else the parameters that
    --init-from names.
    """
    source = args.resume
    wrong = f"{args.resume} cannot go on with these flags"
    try:
        if source and (start := _resumed(args, like, console)):
            return start
        source = config["args"]["init_from"]
        # The run that is resumed says it: nobody but the user names paths
        if source and source != args.init_from:
            again = (
                f"--resume-or-start --run-dir {shlex.quote(args.resume)} --init-from "
                f"{shlex.quote(source)}"
            )
            raise UsageError(
                f"{args.resume} has no checkpoint yet, and began from another run: name it "
                f"again, {again}"
            )
        wrong = f"--init-from {source} does not fit"
        return (
            InitialState(arrays=_parameters_of(source, like, console)) if source else InitialState()
        )
    except Mismatch as error:
        reasons = [*_reasons(read_config(source), config), str(error)]
        raise UsageError(f"{wrong}: {'; '.join(reasons)}") from error


def _resumed(args: Any, like: Any, console: Console) -> InitialState | None:
    """None where that run has not saved anything yet."""
    path = Path(args.resume)
    zeros = flatten(like)
    saved = Checkpoints(path / FOLDER, is_population=args.is_population)
    if not multihost.on_first(saved.steps):
        if multihost.on_first((path / "DONE").exists):
            raise UsageError(
                f"{path} has finished, but its checkpoints are gone: nothing is left to resume"
            )
        console.warn(f"{path} has no checkpoint yet: starting it from step 0")
        return None
    step, stored, damaged = saved.load(zeros, optional=RENEWED)
    if args.keep_best and multihost.on_first(saved.by_return)[-1:] not in ([], [step]):
        # A damaged one must not count as the best
        damaged += saved.load(
            zeros, optional=RENEWED, candidates=lambda: [step, *saved.by_return()]
        )[2]
    total = args.num_updates * args.steps_per_update
    if step > total:
        raise UsageError(
            f"--total-timesteps {args.total_timesteps} is less than the {step} steps that "
            f"{path} has done"
        )
    console.say(f"resumed  {path} at step {step:,}")
    for one in {one.step: one for one in damaged}.values():
        console.warn(saved.set_aside(one))
    missing = zeros.keys() - stored.keys()
    if renewed := [part for part in RENEWED if any(name.startswith(part) for name in missing)]:
        console.say(
            f"resumed  without {', '.join(renewed)}, which the checkpoint does not have: "
            "they begin anew"
        )
    newest = EvaluationResult(*multihost.on_first(stored_evaluation, path, step, args.num_agents))
    has_ended = newest.step == step and multihost.on_first(has_ended_at, path, step)
    return InitialState(
        step=step,
        arrays=stored,
        host=unflatten(zeros | stored, like),
        newest=newest,
        has_ended=has_ended,
    )


def _parameters_of(source: str, like: Any, console: Console) -> Arrays:
    """Parameters and normaliser statistics of the newest state of another run."""
    wanted = {name: x for name, x in flatten(like).items() if name.startswith(TRANSFERRED)}
    step, arrays, damaged = Checkpoints(Path(source) / FOLDER).load(wanted, TRANSFERRED)
    for one in damaged:
        console.warn(str(one))
    console.say(f"started from the parameters of {source} at step {step:,}")
    return arrays


def _reasons(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """How two configurations differ, whose arrays do."""
    flags = [
        name
        for name in now["args"]
        if name in then["args"] and name not in (*ONE_TIME, "total_timesteps")
    ]
    if then["algorithm"] != now["algorithm"]:
        return [f"it was made by {then['algorithm']}"]
    return differences(then["args"], now["args"], ["recipe"]) or differences(
        then["args"], now["args"], flags
    )


class Saver:
    """Saves states, each once, with the evaluations that belong to them; all processes do at the
    same time.
    """

    def __init__(self, directory: Path | None, args: Any, start: InitialState):
        """Checkpoints go into the run's `directory`, or nowhere."""
        self._directory = directory
        of_envs = () if getattr(args, "save_envs", True) else ENVS
        self._unsaved = of_envs if getattr(args, "save_buffer", True) else (*of_envs, REPLAY)
        keep = args.keep_checkpoints, args.keep_best
        self.checkpoints = Checkpoints(
            directory and directory / FOLDER, *keep, is_population=args.is_population
        )
        self.checkpoints.delete_leftovers()
        self._saved = {start.step}
        self._newest = start.host
        self._returns: dict[int, list[float]] = {}  # of the newest evaluation, by its step

    def add_evaluation(self, step: int, evaluation: dict[str, list[float]]) -> None:
        """Store the returns of an evaluation with the checkpoint of this step, now or once that is
        saved.
        """
        self._returns = {step: evaluation["eval/return_mean"]}
        if step in self._saved:
            self.checkpoints.add_evaluation(step, self._returns[step])

    @property
    def newest_step(self) -> int:
        """The last step that is saved, or that the run began from."""
        return max(self._saved)

    def is_due(self, step: int) -> bool:
        """Tell if the state at this step has not been saved yet."""
        return step not in self._saved

    def to_host(self, state: Any) -> Any:
        """What is saved of a state on the devices."""
        return to_host(state, self._unsaved)

    def copied(self, state: Any) -> Callable[[], Any] | None:
        """The same from a copy that is begun here, see `copied`."""
        return copied(state, self._unsaved)

    def save(self, step: int, fetch: Callable[[], Any]) -> None:
        """Start saving what `fetch`, which is called in the background, gives; unless that is done.

        Raises TrainingError where the save before has failed, or the directory is not this run's
        any more.
        """
        if self._directory and multihost.is_first() and not is_ours(self._directory):
            raise TrainingError(
                f"{self._directory} was deleted or moved: nothing more can be saved"
            )

        def arrays() -> Arrays:
            self._newest = fetch()
            return flatten(self._newest, self._unsaved)

        if self.is_due(step):
            self._saved.add(step)
            self.checkpoints.save(step, arrays, self._returns.get(step))

    def withdraw(self) -> None:
        """Delete what a save has made anew of a directory that was deleted in the middle of it."""
        if self._directory is None or not multihost.is_first():
            return
        if not self._directory.is_dir() or {path.name for path in self._directory.iterdir()} != {
            FOLDER
        }:
            return  # it is not there, or something else is in it: it was not deleted
        for step in self._saved:
            shutil.rmtree(self.checkpoints.path(step), ignore_errors=True)
        self.checkpoints.delete_leftovers()
        with suppress(OSError):  # it is not there, or has something else in it
            (self._directory / FOLDER).rmdir()
            self._directory.rmdir()

    def finish(self, state: Any) -> tuple[Any, str]:
        """Once all is on disk, the newest state on the host, and the checksum of what checkpoints
        hold of it.

        It is the one that was saved last, or that the run goes on from, else a copy of `state`. The
        checksum of several processes is that of their own checksums.
        """
        self.checkpoints.wait()
        host = to_host(state, self._unsaved) if self._newest is None else self._newest
        checksum = sha256(flatten(host, self._unsaved))
        if multihost.count() > 1:
            checksum = hashlib.sha256("".join(multihost.allgather(checksum)).encode()).hexdigest()
        return host, checksum

    def last_good(self) -> str:
        """In words, where a run that broke can go on."""
        with suppress(TrainingError):
            self.checkpoints.wait()
        newest = self.checkpoints.steps()[-1:]
        return (
            f"the last good checkpoint is at step {newest[0]}"
            if newest
            else "there is no checkpoint yet"
        )
