"""What a run says of itself: the header and the footer on the console, `result.json`, the line of --benchmark."""

import math
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from common.cli.env_flags import as_flags, is_custom
from common.cli.files import defaults_of, read_json, write_json
from common.cli.run_flags import ONE_TIME, as_command_line
from common.device.devices import describe
from common.runs.checkpoints import overall
from common.runs.metrics import jsonable, read_log

NUMBERS = {"eval/env_steps", "eval/episodes"}
"""What `result.json` says of an evaluation as a whole."""


class Score(NamedTuple):
    """The metrics of an evaluation, a number per seed each."""

    step: int  # of what was evaluated
    evaluation: dict[str, list[float]]  # empty where there was none


class Outcome(NamedTuple):
    """What became of a run."""

    record: dict[str, Any]  # as `result.json` has it
    newest: Score
    best: tuple[int, float, list[float]]  # of checkpoints, see `Checkpoints.best`


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
    if args.is_population:
        differ = f", which differ in {', '.join(args.members.hyper)}" if args.members.hyper else ""
        lines.append(f"members  {args.num_agents:,}{differ}")
    lines += [f"{name:<8} {note}" for name, note in notes.items()]
    if total != args.total_timesteps:
        lines.append(f"steps    {args.total_timesteps:,} rounded up to {total:,}, whole updates")
    if run_dir:
        lines.append(f"run      {run_dir}")
    return "\n".join([*lines, *(f"changed  {change}" for change in changes)])


def footer(args: Any, config: dict[str, Any], run_dir: Path, total: int, outcome: Outcome, more: list[str]) -> str:
    """The evaluation, where everything is, `more`, and the command that goes on."""
    status, step, checkpoint = (outcome.record[name] for name in ("status", "env_steps", "checkpoint"))
    lines = _members(args, run_dir, outcome) if args.is_population else _agents(args, outcome)
    (at, best, _), returns = outcome.best, outcome.newest.evaluation.get("eval/return_mean")
    if returns and at < outcome.newest.step and best > overall(returns, args.is_population):
        play = f"python -m common.play {shlex.quote(str(run_dir))} --step {at}"
        lines.append(f"better   return {best:.1f} at step {at:,}: {play}")
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


def _agents(args: Any, outcome: Outcome) -> list[str]:
    """What every agent earns."""
    step, evaluation = outcome.newest
    when, lines = f", at step {step:,}" if step < outcome.record["env_steps"] else "", []
    for seed, mean in enumerate(evaluation.get("eval/return_mean", [])):
        std, low, high = (evaluation[f"eval/return_{name}"][seed] for name in ("std", "min", "max"))
        who = f" of seed {args.seed + seed}" if args.num_agents > 1 else ""
        won = f", {evaluation['eval/win_rate'][seed]:.0%} won" if "eval/win_rate" in evaluation else ""
        spread = f"{mean:.1f} ± {std:.1f} (min {low:.1f}, max {high:.1f})"
        lines.append(f"greedy   return{who} {spread} over {args.eval_episodes} episodes{won}{when}")
    return lines


SHOWN_MEMBERS = 5


def ranked(returns: list[float]) -> list[int]:
    """Members by their return, the best first; those without a finite one are last."""
    known = [x if math.isfinite(x) else -math.inf for x in returns]
    return sorted(range(len(known)), key=lambda member: -known[member])


def _members(args: Any, run_dir: Path, outcome: Outcome) -> list[str]:
    """What the best members of a population earn, and with which flags."""
    step, evaluation = outcome.newest
    if not (means := evaluation.get("eval/return_mean")):
        return []
    order = [member for member in ranked(means) if math.isfinite(means[member])]
    broken = f", of which {len(means) - len(order)} broke," if len(order) < len(means) else ""
    when = f" at step {step:,}" if step < outcome.record["env_steps"] else ""
    told = "their flags by now" if args.exchange_interval else "what to add to your flags for each of them alone"
    lines = [
        f"greedy   return {summary(means)} of {len(means)} members{broken} over {args.eval_episodes} episodes{when}"
    ]
    lines.append(f"ranked   by that return, which selection flatters, and {told}:")
    flags, evolved = args.flags_of_members(), args.members.hyper if args.exchange_interval else ()
    series = read_log(run_dir, [f"hyper/{name}" for name in evolved]).series
    for place, member in enumerate(order[:SHOWN_MEMBERS], start=1):
        now = {name: float(series[f"hyper/{name}"].values[-1, member]) for name in evolved if f"hyper/{name}" in series}
        won = [f", {x[member]:.0%} won" for name, x in evaluation.items() if name == "eval/win_rate"]
        spread = f"{means[member]:.1f} ± {evaluation['eval/return_std'][member]:.1f}{''.join(won)}"
        who = as_command_line(as_flags(flags[member] | now, args.env_params))
        lines.append(f"{place:>6}.  return {spread}, member {member}: {who}")
    return lines


def summary(returns: float | list[float | None] | None) -> str:
    """The best, the median and the worst return, of those that have one."""
    every = returns if isinstance(returns, list) else [returns]
    finite = [x for x in every if x is not None and math.isfinite(x)]
    if not finite:
        return "-"
    return f"best {max(finite):.1f}, median {np.median(finite):.1f}, worst {min(finite):.1f}"


def _flags(args: Any) -> list[str]:
    """The flags that differ from their defaults, and where they come from."""
    entry = args.tuned_entry(args.env) if args.tuned and not args.resume else None
    defaults = {name: value for name, value in defaults_of(type(args)).items() if name not in (*ONE_TIME, "env")}
    values = {name: getattr(args, name) for name in defaults if getattr(args, name) != defaults[name]}
    values = ({"recipe": args.recipe} if args.variant else {}) | values
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


def evaluation_record(args: Any, newest: Score, best: tuple[int, float, list[float]]) -> dict[str, Any]:
    """What `result.json` says of the evaluations."""
    record = {name: [jsonable(x) for x in values] for name, values in newest.evaluation.items()}
    record |= {"eval/env_steps": newest.step, "eval/episodes": args.eval_episodes}
    step, _, returns = best
    return record | ({"best/env_steps": step, "best/return_mean": [jsonable(x) for x in returns]} if returns else {})


def benchmark_record(args: Any, config: dict[str, Any], record: dict[str, Any], figures: dict[str, Any]) -> dict:
    """What --benchmark prints."""
    where = {name: config[name] for name in ("algorithm", "versions", "devices")}
    flags = {name: getattr(args, name) for name in ("env", "num_envs", "num_agents", "total_timesteps")}
    return where | flags | {name: record[name] for name in ("compile_seconds", "steps_per_second")} | figures


def stored_result(run_dir: Path) -> dict[str, Any]:
    """What `result.json` says; nothing where it is not there, or damaged."""
    return read_json(run_dir / "result.json") or {}


def has_ended_at(run_dir: Path, step: int) -> bool:
    """Whether `result.json` is of this step, and says that nothing cut the run short there."""
    record = stored_result(run_dir)
    return record.get("status") in ("finished", "stopped") and record.get("env_steps") == step


def stored_evaluation(run_dir: Path, step: int) -> Score:
    """The last evaluation in `result.json`, if there is one and the run was at `step` then."""
    record = stored_result(run_dir)
    if record.get("env_steps") != step:
        return Score(step, {})
    stored = {name: x for name, x in record.items() if name.startswith("eval/") and name not in NUMBERS}
    values = {name: [math.nan if x is None else x for x in values] for name, values in stored.items()}
    return Score(record["eval/env_steps"], values)


def _resume_command(config: dict[str, Any], run_dir: Path) -> str:
    called = config["command"][0]
    script = called if Path(called).stem == config["algorithm"] else config["script"]
    env = config["args"]["env"]
    again = f" --env {shlex.quote(env)}" if is_custom(env) else ""
    if meeting := config["args"]["distributed"]:
        again += f" --distributed {re.sub('[0-9]+/', '.../', meeting)}"
    return f"python {shlex.quote(script)} --resume {shlex.quote(str(run_dir))}{again}"
