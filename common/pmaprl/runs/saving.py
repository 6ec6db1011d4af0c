"""Saving of states, and loading of the state from which a run begins.

That is a fresh state, the state of a run that is resumed, or the parameters of another run.
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
from pmaprl.device.state import Arrays, copied, flatten, to_host, unflatten
from pmaprl.machine import multihost
from pmaprl.runs.checkpoints import FOLDER, Checkpoints, Mismatch, sha256
from pmaprl.runs.console import Console
from pmaprl.runs.lock import is_ours
from pmaprl.runs.results import EvaluationResult, has_ended_at, stored_evaluation

TRANSFERRED = (
    "learner/params/",
    "learner/target_params/",
    "learner/obs_stats/",
    "learner/return_stats/",
)
"""Beginnings of the names of arrays that --init-from loads."""
ENVS = "actors/env_state", "actors/seen", "actors/memory", "actors/tracker", "actors/discounted"
REPLAY = "actors/replay/"
RENEWED = (*ENVS, REPLAY)
"""Prefixes of arrays that a checkpoint may lack: those of environments and the replay buffer."""


class InitialState(NamedTuple):
    """State from which a run begins."""

    step: int = 0
    arrays: Arrays = {}  # stored arrays that replace fresh ones; never changed in place
    host: Any = None  # state of a resumed run on the host, with zeros for missing arrays
    newest: EvaluationResult = EvaluationResult(0, {})  # last evaluation; never changed in place
    has_ended: bool = False  # True: the run ended by itself before, and this step was evaluated


def load(args: Any, config: dict[str, Any], like: Any, console: Console) -> InitialState:
    """Load the newest state of --resume's run, or else the parameters of --init-from's.

    Args:
        args: the flags.
        config: the content of `config.json`.
        like: a host state with the shapes of the run.
        console: shows notes and warnings.

    Raises:
        UsageError: the stored arrays do not fit the flags, or none load.
    """
    source = args.resume
    refusal = f"{args.resume} cannot go on with these flags"
    try:
        if source:
            start = _resumed(args, like, console)
            if start:
                return start
        source = config["args"]["init_from"]
        # A path in the config of a resumed run is data, and only the user may name paths
        if source and source != args.init_from:
            flags = (
                f"--resume-or-start --run-dir {shlex.quote(args.resume)} --init-from "
                f"{shlex.quote(source)}"
            )
            raise UsageError(
                f"{args.resume} has no checkpoint yet, and began from another run: name it "
                f"again, {flags}"
            )
        refusal = f"--init-from {source} does not fit"
        if not source:
            return InitialState()
        return InitialState(arrays=_parameters_of(source, like, console))
    except Mismatch as error:
        reasons = [*_reasons(read_config(source), config), str(error)]
        raise UsageError(f"{refusal}: {'; '.join(reasons)}") from error


def _resumed(args: Any, like: Any, console: Console) -> InitialState | None:
    """Load the newest state of --resume's run; None if it has not saved anything yet."""
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
        # A damaged checkpoint must not count as the best
        _, _, damaged_best = saved.load(
            zeros, optional=RENEWED, candidates=lambda: [step, *saved.by_return()]
        )
        damaged += damaged_best
    total = args.num_updates * args.steps_per_update
    if step > total:
        raise UsageError(
            f"--total-timesteps {args.total_timesteps} is less than the {step} steps that "
            f"{path} has done"
        )
    console.say(f"resumed  {path} at step {step:,}")
    by_step = {checkpoint.step: checkpoint for checkpoint in damaged}
    for checkpoint in by_step.values():
        console.warn(saved.set_aside(checkpoint))
    missing = zeros.keys() - stored.keys()
    renewed = [part for part in RENEWED if any(name.startswith(part) for name in missing)]
    if renewed:
        console.say(
            f"resumed  without {', '.join(renewed)}, which the checkpoint does not have: "
            "they begin anew"
        )
    evaluated_at, evaluation = multihost.on_first(stored_evaluation, path, step, args.num_agents)
    newest = EvaluationResult(evaluated_at, evaluation)
    has_ended = newest.step == step and multihost.on_first(has_ended_at, path, step)
    return InitialState(
        step=step,
        arrays=stored,
        host=unflatten(zeros | stored, like),
        newest=newest,
        has_ended=has_ended,
    )


def _parameters_of(source: str, like: Any, console: Console) -> Arrays:
    """Load parameters and normalizer statistics of the newest state of another run."""
    wanted = {name: x for name, x in flatten(like).items() if name.startswith(TRANSFERRED)}
    step, arrays, damaged = Checkpoints(Path(source) / FOLDER).load(wanted, TRANSFERRED)
    for checkpoint in damaged:
        console.warn(str(checkpoint))
    console.say(f"started from the parameters of {source} at step {step:,}")
    return arrays


def _reasons(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Differences between two configurations that may be why their arrays differ."""
    if then["algorithm"] != now["algorithm"]:
        return [f"it was made by {then['algorithm']}"]
    recipe = differences(then["args"], now["args"], ["recipe"])
    if recipe:
        return recipe
    irrelevant = {*ONE_TIME, "total_timesteps"}
    flags = [name for name in now["args"] if name in then["args"] and name not in irrelevant]
    return differences(then["args"], now["args"], flags)


class Saver:
    """Saves states, each once, with their evaluations. All processes have to call it together."""

    def __init__(self, directory: Path | None, args: Any, start: InitialState):
        """Prepare the checkpoints of a run.

        Args:
            directory: the run's directory; None: save nothing.
            args: the flags.
            start: the state from which the run begins.
        """
        self._directory = directory
        self._unsaved: tuple[str, ...] = ()  # beginnings of the names of arrays that are not saved
        if not getattr(args, "save_envs", True):
            self._unsaved += ENVS
        if not getattr(args, "save_buffer", True):
            self._unsaved += (REPLAY,)
        self.checkpoints = Checkpoints(
            directory and directory / FOLDER,
            keep=args.keep_checkpoints,
            keep_best=args.keep_best,
            is_population=args.is_population,
        )
        self.checkpoints.delete_leftovers()
        self._saved = {start.step}
        self._newest = start.host
        self._returns: dict[int, list[float]] = {}  # returns of the newest evaluation, by its step

    def add_evaluation(self, step: int, evaluation: dict[str, list[float]]) -> None:
        """Store an evaluation's returns with its step's checkpoint, now or once that is saved."""
        self._returns = {step: evaluation["eval/return_mean"]}
        if step in self._saved:
            self.checkpoints.add_evaluation(step, self._returns[step])

    @property
    def newest_step(self) -> int:
        """The last step that is saved, or that the run began from."""
        return max(self._saved)

    def is_due(self, step: int) -> bool:
        """True if the state at this step has not been saved yet."""
        return step not in self._saved

    def to_host(self, state: Any) -> Any:
        """Copy the saved part of a state from the devices to the host."""
        return to_host(state, self._unsaved)

    def copied(self, state: Any) -> Callable[[], Any] | None:
        """Begin to copy the saved part of a state on the devices, see `state.copied`."""
        return copied(state, self._unsaved)

    def save(self, step: int, fetch: Callable[[], Any]) -> None:
        """Start to save a state, unless that is done.

        Args:
            step: environment steps.
            fetch: returns the state on the host; called in the background.

        Raises:
            TrainingError: the save before has failed, or the directory is not this run's any more.
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
        """Delete checkpoints that a save has written to a directory that was deleted meanwhile."""
        if self._directory is None or not multihost.is_first() or not self._directory.is_dir():
            return
        names = {path.name for path in self._directory.iterdir()}
        if names != {FOLDER}:
            return  # it has other files, so it was not deleted
        for step in self._saved:
            shutil.rmtree(self.checkpoints.path(step), ignore_errors=True)
        self.checkpoints.delete_leftovers()
        with suppress(OSError):  # it does not exist, or has other files
            (self._directory / FOLDER).rmdir()
            self._directory.rmdir()

    def finish(self, state: Any) -> tuple[Any, str]:
        """Wait until all is on disk.

        Args:
            state: a state on the devices, for a run that has neither saved nor loaded anything.

        Returns:
            The newest state on the host, and the checksum of its saved part. That of several
            processes is the checksum of their checksums.
        """
        self.checkpoints.wait()
        host = to_host(state, self._unsaved) if self._newest is None else self._newest
        checksum = sha256(flatten(host, self._unsaved))
        if multihost.count() > 1:
            of_all = "".join(multihost.allgather(checksum))
            checksum = hashlib.sha256(of_all.encode()).hexdigest()
        return host, checksum

    def last_good(self) -> str:
        """Name the checkpoint from which a run that broke can go on, in words."""
        with suppress(TrainingError):
            self.checkpoints.wait()
        steps = self.checkpoints.steps()
        if not steps:
            return "there is no checkpoint yet"
        return f"the last good checkpoint is at step {steps[-1]}"
