"""What a run says of itself: the header and the footer on the console, `result.json`, the line of
--benchmark.
"""

import math
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pmaprl.cli.env_flags import as_flags, is_custom
from pmaprl.cli.errors import printable
from pmaprl.cli.files import defaults_of
from pmaprl.cli.run_flags import ONE_TIME, as_command_line
from pmaprl.device.devices import describe
from pmaprl.runs import estimates
from pmaprl.runs.checkpoints import overall
from pmaprl.runs.console import brief, brief_returns
from pmaprl.runs.intervals import describe_intervals
from pmaprl.runs.metrics import jsonable, read_log
from pmaprl.runs.results import EvaluationResult, ranked, training_returns

SHOWN_MEMBERS = 5


@dataclass
class TrainResult:
    """What `train` returns."""

    params: Any  # host arrays with a leading seed axis
    # The last evaluation, such as `eval/return_mean`: one number per seed
    evaluation: dict[str, Any]
    env_steps: int
    run_dir: Path | None
    state_sha256: str
    status: str  # "finished" or "stopped"


# ---------------------------------------------------------------------------------------- what a
# `Run` says of itself


def header(run: Any, env: str, notes: dict[str, str], changes: list[str]) -> str:
    """Devices, environment, flags, derived sizes, and what a resumed run changes, before anything
    slow begins.
    """
    args = run.args
    lines = [f"devices  {describe(run.devices)}", f"env      {env}", *flag_lines(args)]
    lines += [f"sizes    {line}" for line in args.sizes(len(run.devices))]
    lines.append(f"due      {describe_intervals(run.intervals)}")
    if args.is_population:
        differ = (
            f", which differ in {', '.join(args.members.member_values)}"
            if args.members.member_values
            else ""
        )
        lines.append(f"members  {args.num_agents:,}{differ}")
    lines += [f"{name:<8} {note}" for name, note in notes.items()]
    if run.total != args.total_timesteps:
        lines.append(
            f"steps    {args.total_timesteps:,} rounded up to {run.total:,}, whole updates"
        )
    if run.dir:
        lines.append(f"run      {run.dir}")
    return "\n".join(map(printable, [*lines, *(f"changed  {change}" for change in changes)]))


def flag_lines(args: Any) -> list[str]:
    """The flags that differ from their defaults, and where they come from."""
    entry = args.tuned_entry(args.env) if not args.resume else None
    found = entry.flags if entry and args.tuned else {}
    defaults = {
        name: value
        for name, value in defaults_of(type(args)).items()
        if name not in (*ONE_TIME, "env")
    }
    usual = defaults | found
    others = {"recipe": args.recipe} if args.variant else {}
    others |= {name: getattr(args, name) for name in usual if getattr(args, name) != usual[name]}
    tuned = {
        name: value
        for name, value in found.items()
        if getattr(args, name) == value != defaults.get(name)
    }
    lines = (
        [f"tuned    {as_command_line(tuned)} (from {entry}; --no-tuned leaves them out)"]
        if tuned
        else []
    )
    if entry and not args.tuned:
        lines = [
            f"tuned    not taken: {entry}, which is --tuned, or in Python "
            f"Args.for_env({args.env!r})"
        ]
    elif not entry and not args.resume:
        lines = ["tuned    none for this environment: these are the defaults"]
    return lines + ([f"flags    {as_command_line(others)}"] if others else [])


def footer(run: Any, record: dict[str, Any], more: list[str]) -> str:
    """The evaluation, where everything is, `more`, and the command that goes on. `record` is what
    `result` gives.
    """
    args = run.args
    status = record["status"]
    step = record["env_steps"]
    newest = run.evaluations.newest
    when = f", at step {newest.step:,}" if newest.step < step else ""
    lines = (
        (_members if args.is_population else _seeds)(run, newest, when) if newest.returns else []
    )
    best_step, returns = run.saver.checkpoints.best()
    best, now = (overall(x, args.is_population) for x in (returns, newest.returns))
    if newest.returns and best_step < newest.step and best > now:
        play = f"python -m pmaprl.play {shlex.quote(str(run.dir))} --step {best_step}"
        lines.append(f"better   return {brief(best)} at step {best_step:,}: {play}")
    lines += [f"saved    {record['checkpoint'] or 'nothing yet'}", *filter(None, more)]
    command = _resume_command(run)
    where = f"{status} at step {step:,} of {run.total:,}"
    if status != "finished":
        lines += [
            where,
            f"resume   {'run the same command again' if args.resume_or_start else command}",
        ]
    elif step < run.total:
        lines.append(f"{where}: an evaluation has reached --stop-at-return {args.stop_at_return:g}")
        lines.append(f"longer   {command} --stop-at-return None")
    else:
        lines += [where, f"longer   {command} --total-timesteps {2 * run.total}"]
    return "\n".join(lines)


LISTED_SEEDS = 5  # at most are told one by one


def _seeds(run: Any, newest: EvaluationResult, when: str) -> list[str]:
    """Lines on the returns of each seed, and where there are several on all together."""
    args = run.args
    evaluation = newest.evaluation
    lines = []
    count = len(newest.returns)
    for seed, mean in enumerate(newest.returns if count <= LISTED_SEEDS else ()):
        std, low, high = (evaluation[f"eval/return_{name}"][seed] for name in ("std", "min", "max"))
        who = f" of seed {args.seed + seed}" if count > 1 else ""
        spread = f"{brief(mean)} ± {brief(std)} (min {brief(low)}, max {brief(high)})"
        lines.append(
            f"greedy   return{who} {spread} over {args.eval_episodes} "
            f"episodes{_won(evaluation, seed)}{when}"
        )
    if count > 1:
        lines.append(
            f"seeds    return {summary_of_seeds(np.array(newest.returns), args.seed)}{when}"
        )
    return lines


def summary_of_seeds(returns: np.ndarray, first_seed: int) -> str:
    """The estimate over the finite returns [S] of seeds with its uncertainty, the best seed and the
    worst one.
    """
    known = np.flatnonzero(np.isfinite(returns))
    broken = (
        f", {len(returns) - len(known)} of {len(returns)} seeds broke"
        if len(known) < len(returns)
        else ""
    )
    if not len(known):
        return f"-{broken}"
    finite = returns[known]
    name = estimates.estimate_name("iqm", len(finite))
    band = estimates.interval(finite)
    ends = (
        f" [{brief(float(band.low))}, {brief(float(band.high))}] (95% bootstrap interval)"
        if band
        else ""
    )
    best = known[finite.argmax()]
    worst = known[finite.argmin()]
    extremes = [
        f"{word} {brief(returns[i])} (seed {first_seed + i})"
        for word, i in (("best", best), ("worst", worst))
    ]
    middle = f"{name} {brief(float(estimates.estimate(finite)))}{ends} over {len(finite)} seeds"
    return f"{middle}, {', '.join(extremes)}{broken}"


def _members(run: Any, newest: EvaluationResult, when: str) -> list[str]:
    """What the best members of a population earn, and with which flags."""
    args = run.args
    means = newest.returns
    order = ranked(means, training_returns(run.dir, newest.step))
    order = [member for member in order if math.isfinite(means[member])]
    broken = f", of which {len(means) - len(order)} broke," if len(order) < len(means) else ""
    spread = brief_returns(means, is_population=True)
    of_all = f"{spread} of {len(means)} members{broken} over {args.eval_episodes} episodes{when}"
    told = "their flags by now" if args.exchange_interval else "the flags that train each alone"
    lines = [f"greedy   return {of_all}"]
    shown = min(len(order), SHOWN_MEMBERS)
    lines.append(f"ranked   the {shown} best (optimistic: picked by this evaluation), and {told}:")
    evolved = (
        [f"hyper/{name}" for name in args.members.member_values] if args.exchange_interval else []
    )
    series = read_log(run.dir, evolved).series
    flags = args.flags_of_members()
    for place, member in enumerate(order[:SHOWN_MEMBERS], start=1):
        now = {
            name.removeprefix("hyper/"): float(x.values[-1, member]) for name, x in series.items()
        }
        who = as_command_line(as_flags(flags[member] | now, args.env_params))
        spread = f"{brief(means[member])} ± {brief(newest.evaluation['eval/return_std'][member])}"
        lines.append(
            f"{place:>6}.  return {spread}{_won(newest.evaluation, member)}, member {member}: {who}"
        )
    return lines


def _won(evaluation: dict[str, list[float]], agent: int) -> str:
    return (
        f", {evaluation['eval/win_rate'][agent]:.0%} won" if "eval/win_rate" in evaluation else ""
    )


def _resume_command(run: Any) -> str:
    config = run.config
    called = run.config["command"][0]
    script = called if Path(called).stem == config["algorithm"] else config["script"]
    env = config["args"]["env"]
    again = f" --env {shlex.quote(env)}" if is_custom(env) else ""
    if meeting := config["args"]["distributed"]:
        again += f" --distributed {re.sub('[0-9]+/', '.../', meeting)}"
    return f"python {shlex.quote(script)} --resume {shlex.quote(str(run.dir))}{again}"


def result(run: Any, status: str, sha256: str | None = None) -> dict[str, Any]:
    """What `result.json` holds."""
    checkpoints = run.saver.checkpoints
    newest = run.evaluations.newest
    clock = run.clock
    (best_step, best), saved = checkpoints.best(), checkpoints.steps()
    return {
        "status": status,  # "finished", "stopped", "interrupted" or "failed"
        "env_steps": run.steps,
        "updates": run.steps // run.args.steps_per_update,
        **{name: [jsonable(x) for x in values] for name, values in newest.evaluation.items()},
        "eval/env_steps": newest.step,
        "eval/episodes": run.args.eval_episodes,
        **(
            {"best/env_steps": best_step, "best/return_mean": [jsonable(x) for x in best]}
            if best
            else {}
        ),
        "wall_seconds": round(clock.wall, 3),
        "compile_seconds": round(clock.seconds["compile"], 3),
        "steps_per_second": round((run.steps - run.first_step) / clock.trained, 1),
        "state_sha256": sha256,
        "checkpoint": str(checkpoints.path(saved[-1])) if saved else None,  # the newest
        **run.figures,
    }


def benchmark_line(run: Any, record: dict[str, Any]) -> dict[str, Any]:
    """What --benchmark prints; `record` is what `result` gives."""
    about = {name: run.config[name] for name in ("algorithm", "command", "versions", "devices")}
    about |= {
        name: getattr(run.args, name)
        for name in ("env", "num_envs", "num_agents", "total_timesteps")
    }
    return (
        about
        | {name: record[name] for name in ("compile_seconds", "steps_per_second")}
        | run.figures
    )
