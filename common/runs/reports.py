"""What a run says of itself: the header and the footer on the console, `result.json`, the line of --benchmark."""

import json
import math
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from common.cli.env_flags import is_custom
from common.cli.files import defaults_of, read_text
from common.cli.run_flags import ONE_TIME, as_command_line
from common.device.devices import describe
from common.runs.directory import write_json
from common.runs.metrics import jsonable
from common.runs.ranking import DISTINCT, describe_episodes, ranking

SHOWN = {f"eval/return_{name}" for name in ("mean", "std", "min", "max")}
"""What the footer shows of an evaluation."""
NUMBERS = {"eval/env_steps", "eval/episodes"}
"""What `result.json` says of an evaluation as a whole."""


class Score(NamedTuple):
    """The metrics of an evaluation, a number per seed each."""

    step: int  # of what was evaluated
    evaluation: dict[str, list[float]]  # empty where there was none

    def mean(self) -> float:
        """Over seeds and episodes."""
        return float(np.mean(self.evaluation["eval/return_mean"]))

    def clearly_above(self, other: dict[str, list[float]], num_episodes: int) -> bool:
        """Whether the return is higher than in the `other` evaluation, by more than two standard errors.

        Of equal episodes one counts. A single episode does not tell.
        """
        both = self.evaluation, other
        means, deviations = (np.array([x[f"eval/return_{name}"] for x in both]) for name in ("mean", "std"))  # [2, S]
        counts = np.array([x.get(DISTINCT, np.full(means.shape[1], num_episodes)) for x in both])
        error = np.sqrt(np.sum(deviations**2 / counts)) / means.shape[1]
        return num_episodes > 1 and bool(np.subtract(*means.mean(axis=1)) > 2 * error)


class Outcome(NamedTuple):
    """What became of a run."""

    status: str  # "finished", "stopped", "interrupted" or "failed"
    env_steps: int
    updates: int
    newest: Score
    confirmed: list[Score]  # of checkpoints to choose from, the best first, in other episodes
    lost: Score | None  # the best one, where there is no checkpoint of it
    eval_episodes: int  # of an evaluation
    wall_seconds: float
    compile_seconds: float
    steps_per_second: float  # of training, since the start: without compilation, evaluation and saving
    state_sha256: str | None
    checkpoint: str | None  # path of the newest one
    figures: dict[str, Any]  # those of host workers

    @property
    def best(self) -> Score | None:
        """Of the best checkpoint, in episodes by which it was not chosen."""
        return self.confirmed[0] if self.confirmed and self.confirmed[0].evaluation else None


@dataclass
class TrainResult:
    """What `train` returns."""

    params: Any  # host arrays with a leading seed axis
    evaluation: dict[str, Any]  # the last evaluation, such as `eval/return_mean`: one number per seed
    env_steps: int
    run_dir: Path | None
    state_sha256: str
    status: str  # "finished" or "stopped"


def header(
    args: Any,
    env: str,
    devices: list[jax.Device],
    notes: dict[str, str],
    total: int,
    run_dir: Path | None,
    changes: list[str],
) -> str:
    """Devices, environment, flags, derived sizes, and what a resumed run changes, before anything slow begins."""
    lines = [f"devices  {describe(devices)}", f"env      {env}", *_flags(args)]
    lines += [f"sizes    {line}" for line in args.sizes(len(devices))]
    lines += [f"{name:<8} {note}" for name, note in notes.items()]
    if total != args.total_timesteps:
        lines.append(f"steps    {args.total_timesteps:,} rounded up to {total:,}, whole updates")
    if run_dir:
        lines.append(f"run      {run_dir}")
    return "\n".join([*lines, *(f"changed  {change}" for change in changes)])


def footer(args: Any, config: dict[str, Any], run_dir: Path, total: int, outcome: Outcome, more: list[str]) -> str:
    """The evaluation, where everything is, `more`, and the command that goes on."""
    lines = ranking(args, run_dir, outcome) if args.is_population else _agents(args, run_dir, outcome)
    lines += [f"saved    {outcome.checkpoint or 'nothing yet'}", *filter(None, more)]
    command, where = _resume_command(config, run_dir), f"{outcome.status} at step {outcome.env_steps:,} of {total:,}"
    if outcome.status != "finished":
        again = "run the same command again" if args.resume_or_start else command
        lines += [where, f"resume   {again}"]
    elif outcome.env_steps < total:
        lines.append(f"{where}: an evaluation has reached --stop-at-return {args.stop_at_return:g}")
        lines.append(f"longer   {command} --stop-at-return None")
    else:
        lines += [where, f"longer   {command} --total-timesteps {2 * total}"]
    return "\n".join(lines)


def _agents(args: Any, run_dir: Path, outcome: Outcome) -> list[str]:
    """What every agent earns, and what was better before."""
    lines, (evaluated, evaluation) = [], outcome.newest
    when = f", at step {evaluated:,}" if evaluated < outcome.env_steps else ""
    for seed, mean in enumerate(evaluation.get("eval/return_mean", [])):
        std, low, high = (evaluation[f"eval/return_{name}"][seed] for name in ("std", "min", "max"))
        who = f" of seed {args.seed + seed}" if args.num_agents > 1 else ""
        spread = f"{mean:.1f} ± {std:.1f} (min {low:.1f}, max {high:.1f})"
        won = [f", {x[seed]:.0%} won" for name, x in evaluation.items() if name == "eval/win_rate"]
        how = describe_episodes(outcome.eval_episodes, evaluation.get(DISTINCT, [])[seed : seed + 1])
        lines.append(f"greedy   return{who} {spread} over {how}{''.join(won)}{when}")
    return lines + _better_before(run_dir, outcome)


def _flags(args: Any) -> list[str]:
    """The flags that differ from their defaults, and where they come from."""
    entry = args.tuned_entry(args.env) if args.tuned and not args.resume else None
    defaults = {name: value for name, value in defaults_of(type(args)).items() if name not in (*ONE_TIME, "env")}
    values = {name: getattr(args, name) for name in defaults if getattr(args, name) != defaults[name]}
    found = entry.flags if entry else {}
    values |= {name: getattr(args, name) for name in found if getattr(args, name) != found[name]}  # given against it
    tuned = {name: value for name, value in found.items() if values.get(name) == value}
    lines = []
    if tuned:
        lines.append(f"tuned    {as_command_line(tuned)} (from {entry}; --no-tuned leaves them out)")
    if others := {name: value for name, value in values.items() if name not in tuned}:
        lines.append(f"flags    {as_command_line(others)}")
    return lines


def _better_before(run_dir: Path, outcome: Outcome) -> list[str]:
    """That evaluations before were clearly better than the last one, and how to load the best of them."""
    lines, before, episodes, best = [], outcome.newest.evaluation, outcome.eval_episodes, outcome.best
    if best and best.step < outcome.env_steps and best.clearly_above(before, episodes):
        before = best.evaluation
        found = f"better   return {best.mean():.1f} at step {best.step:,} over {episodes} other episodes"
        play = f"python -m common.play {shlex.quote(str(run_dir))} --step {best.step}"
        lines.append(f"{found}: load_policy({str(run_dir)!r}, {best.step}), or {play}")
    if outcome.lost and outcome.lost.clearly_above(before, episodes):
        lost = f"return {outcome.lost.mean():.1f} at step {outcome.lost.step:,}"
        lines.append(f"lost     {lost}, of which there is no checkpoint: --keep-best keeps one")
    return lines


def write_result(run_dir: Path, outcome: Outcome, **more: Any) -> None:
    """Write `result.json`."""
    record = {
        "status": outcome.status,
        "env_steps": outcome.env_steps,
        "updates": outcome.updates,
        **{name: [jsonable(x) for x in values] for name, values in outcome.newest.evaluation.items()},
        "eval/env_steps": outcome.newest.step,
        "eval/episodes": outcome.eval_episodes,
        "wall_seconds": round(outcome.wall_seconds, 3),
        "compile_seconds": round(outcome.compile_seconds, 3),
        "steps_per_second": round(outcome.steps_per_second, 1),
        "state_sha256": outcome.state_sha256,
        "checkpoint": outcome.checkpoint,
    }
    if best := outcome.best:
        record["best/env_steps"] = best.step
        record["best/return_mean"] = [jsonable(x) for x in best.evaluation["eval/return_mean"]]
    write_json(run_dir / "result.json", record | outcome.figures | more)


def benchmark_record(args: Any, config: dict[str, Any], outcome: Outcome) -> dict[str, Any]:
    """What --benchmark prints."""
    where = {name: config[name] for name in ("algorithm", "versions", "devices")}
    flags = {name: getattr(args, name) for name in ("env", "num_envs", "num_agents", "total_timesteps")}
    speed = {
        "compile_seconds": round(outcome.compile_seconds, 2),
        "steps_per_second": round(outcome.steps_per_second),
    }
    return where | flags | speed | outcome.figures


def stored_status(run_dir: Path) -> str | None:
    """The status in `result.json`, if there is one."""
    try:
        return json.loads(read_text(run_dir / "result.json"))["status"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def has_ended_at(run_dir: Path, step: int) -> bool:
    """Whether `result.json` is of this step, and says that nothing cut the run short there."""
    try:
        record = json.loads(read_text(run_dir / "result.json"))
        return record["status"] in ("finished", "stopped") and record["env_steps"] == step
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def stored_evaluation(run_dir: Path, step: int) -> Score:
    """The last evaluation in `result.json`, if there is one that is whole, and the run was at `step` then."""
    try:
        record = json.loads(read_text(run_dir / "result.json"))
        stored = {name: x for name, x in record.items() if name.startswith("eval/") and name not in NUMBERS}
        values = {name: [math.nan if x is None else float(x) for x in values] for name, values in stored.items()}
        whole = values.keys() >= SHOWN and record["env_steps"] == step
        evaluated = int(record.get("eval/env_steps", step))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return Score(step, {})
    whole = whole and len({len(x) for x in values.values()}) == 1
    return Score(evaluated, values) if whole else Score(step, {})


def _resume_command(config: dict[str, Any], run_dir: Path) -> str:
    called = config["command"][0]
    script = called if Path(called).stem == config["algorithm"] else config["script"]
    env = config["args"]["env"]
    again = f" --env {shlex.quote(env)}" if is_custom(env) else ""
    if meeting := config["args"]["distributed"]:
        again += f" --distributed {re.sub('[0-9]+/', '.../', meeting)}"
    return f"python {shlex.quote(script)} --resume {shlex.quote(str(run_dir))}{again}"
