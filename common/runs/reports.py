"""What a run says of itself: the header and the footer on the console, `result.json`, the line of --benchmark."""

import json
import math
import re
import shlex
from collections.abc import Sequence
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


class Outcome(NamedTuple):
    """What became of a run."""

    record: dict[str, Any]  # as `result.json` has it
    newest: Score
    confirmed: Sequence[Score]  # of checkpoints to choose from, the best first, in other episodes

    @property
    def best(self) -> Score | None:
        """Of the best checkpoint, in episodes by which it was not chosen."""
        return best_of(self.confirmed)


def best_of(confirmed: Sequence[Score]) -> Score | None:
    """The first of what was evaluated once more, if it was."""
    return confirmed[0] if confirmed and confirmed[0].evaluation else None


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
    status, step, checkpoint = (outcome.record[name] for name in ("status", "env_steps", "checkpoint"))
    lines = ranking(args, run_dir, outcome) if args.is_population else _agents(args, run_dir, outcome)
    lines += [f"saved    {checkpoint or 'nothing yet'}", *filter(None, more)]
    command, where = _resume_command(config, run_dir), f"{status} at step {step:,} of {total:,}"
    if status != "finished":
        again = "run the same command again" if args.resume_or_start else command
        lines += [where, f"resume   {again}"]
    elif step < total:
        lines.append(f"{where}: an evaluation has reached --stop-at-return {args.stop_at_return:g}")
        lines.append(f"longer   {command} --stop-at-return None")
    else:
        lines += [where, f"longer   {command} --total-timesteps {2 * total}"]
    return "\n".join(lines)


def _agents(args: Any, run_dir: Path, outcome: Outcome) -> list[str]:
    """What every agent earns, and which checkpoint was better before."""
    (step, evaluation), best, lines = outcome.newest, outcome.best, []
    when = f", at step {step:,}" if step < outcome.record["env_steps"] else ""
    for seed, mean in enumerate(evaluation.get("eval/return_mean", [])):
        std, low, high = (evaluation[f"eval/return_{name}"][seed] for name in ("std", "min", "max"))
        who = f" of seed {args.seed + seed}" if args.num_agents > 1 else ""
        spread = f"{mean:.1f} ± {std:.1f} (min {low:.1f}, max {high:.1f})"
        won = f", {evaluation['eval/win_rate'][seed]:.0%} won" if "eval/win_rate" in evaluation else ""
        how = describe_episodes(args.eval_episodes, evaluation.get(DISTINCT, [])[seed : seed + 1])
        lines.append(f"greedy   return{who} {spread} over {how}{won}{when}")
    if best and evaluation and best.step < outcome.record["env_steps"] and best.mean() > outcome.newest.mean():
        found = f"better   return {best.mean():.1f} at step {best.step:,} over {args.eval_episodes} other episodes"
        play = f"python -m common.play {shlex.quote(str(run_dir))} --step {best.step}"
        lines.append(f"{found}: load_policy({str(run_dir)!r}, {best.step}), or {play}")
    return lines


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


def write_result(run_dir: Path, outcome: Outcome, **more: Any) -> None:
    """Write `result.json`."""
    write_json(run_dir / "result.json", outcome.record | more)


def evaluation_record(args: Any, newest: Score, confirmed: Sequence[Score]) -> dict[str, Any]:
    """What `result.json` says of the evaluations."""
    record = {name: [jsonable(x) for x in values] for name, values in newest.evaluation.items()}
    record |= {"eval/env_steps": newest.step, "eval/episodes": args.eval_episodes}
    if best := best_of(confirmed):
        record["best/env_steps"] = best.step
        record["best/return_mean"] = [jsonable(x) for x in best.evaluation["eval/return_mean"]]
    return record


def benchmark_record(args: Any, config: dict[str, Any], record: dict[str, Any], figures: dict[str, Any]) -> dict:
    """What --benchmark prints."""
    where = {name: config[name] for name in ("algorithm", "versions", "devices")}
    flags = {name: getattr(args, name) for name in ("env", "num_envs", "num_agents", "total_timesteps")}
    return where | flags | {name: record[name] for name in ("compile_seconds", "steps_per_second")} | figures


def stored_result(run_dir: Path) -> dict[str, Any]:
    """What `result.json` says; nothing where it is not there, or damaged."""
    try:
        record = json.loads(read_text(run_dir / "result.json"))
    except (OSError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def has_ended_at(run_dir: Path, step: int) -> bool:
    """Whether `result.json` is of this step, and says that nothing cut the run short there."""
    record = stored_result(run_dir)
    return record.get("status") in ("finished", "stopped") and record.get("env_steps") == step


def stored_evaluation(run_dir: Path, step: int) -> Score:
    """The last evaluation in `result.json`, if there is one that is whole, and the run was at `step` then."""
    record = stored_result(run_dir)
    stored = {name: x for name, x in record.items() if name.startswith("eval/") and name not in NUMBERS}
    try:
        values = {name: [math.nan if x is None else float(x) for x in values] for name, values in stored.items()}
        whole = values.keys() >= SHOWN and record["env_steps"] == step and len(set(map(len, values.values()))) == 1
        return Score(int(record.get("eval/env_steps", step)), values) if whole else Score(step, {})
    except (ValueError, KeyError, TypeError, OverflowError):
        return Score(step, {})


def _resume_command(config: dict[str, Any], run_dir: Path) -> str:
    called = config["command"][0]
    script = called if Path(called).stem == config["algorithm"] else config["script"]
    env = config["args"]["env"]
    again = f" --env {shlex.quote(env)}" if is_custom(env) else ""
    if meeting := config["args"]["distributed"]:
        again += f" --distributed {re.sub('[0-9]+/', '.../', meeting)}"
    return f"python {shlex.quote(script)} --resume {shlex.quote(str(run_dir))}{again}"
