"""Reports of a run: header and footer on the console, `result.json`, the line of --benchmark."""

import math
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np

from pmaprl.cli.env_flags import PREFIX, flags_alone, is_custom, unswept_text
from pmaprl.cli.errors import printable
from pmaprl.cli.files import defaults_of
from pmaprl.cli.run_flags import ONE_TIME, as_command_line
from pmaprl.machine.devices import describe
from pmaprl.runs import estimates
from pmaprl.runs.checkpoints import overall
from pmaprl.runs.console import brief, brief_returns
from pmaprl.runs.intervals import describe_intervals
from pmaprl.runs.metrics import EVALUATION, jsonable, read_log
from pmaprl.runs.results import EvaluationResult, ranked, training_returns

SHOWN_MEMBERS = 5  # best members that the footer lists


def header(run: Any, env: str, notes: dict[str, str], changes: list[str]) -> str:
    """Describe devices, environment, flags, sizes and changes, before anything slow begins.

    Args:
        run: the `Setup`, complete but for its `header`.
        env: name of the environment.
        notes: further lines, by their first word.
        changes: differences from the flags of the run that is resumed.
    """
    args = run.args
    lines = [f"devices  {describe(run.devices)}", f"env      {env}", *flag_lines(args)]
    lines += [f"sizes    {line}" for line in args.sizes(len(run.devices))]
    lines.append(f"due      {describe_intervals(run.intervals)}")
    if args.is_population:
        line = f"members  {args.num_agents:,}"
        if args.members.member_values:
            line += f", which differ in {', '.join(args.members.member_values)}"
        lines.append(line)
    lines += [f"{name:<8} {note}" for name, note in notes.items()]
    if run.total != args.total_timesteps:
        lines.append(
            f"steps    {args.total_timesteps:,} rounded up to {run.total:,}, whole updates"
        )
    if run.dir:
        lines.append(f"run      {run.dir}")
    lines += [f"changed  {change}" for change in changes]
    return "\n".join(map(printable, lines))


def flag_lines(args: Any) -> list[str]:
    """Describe the flags that differ from their defaults, and their origin."""
    entry = args.tuned_entry(args.env) if not args.resume else None
    tuned = entry.flags if entry and args.tuned else {}
    defaults = defaults_of(type(args))
    for name in (*ONE_TIME, "env"):
        defaults.pop(name, None)
    effective = {}  # tuned flags that the run has, and that are no defaults
    for name, value in tuned.items():
        if getattr(args, name) == value != defaults.get(name):
            effective[name] = value
    changed = {"recipe": args.recipe} if args.variant else {}
    for name, value in (defaults | tuned).items():
        if getattr(args, name) != value:
            changed[name] = getattr(args, name)
    lines = []
    if entry and not args.tuned:
        lines.append(
            f"tuned    not taken: {entry}, which is --tuned, or in Python "
            f"Args.for_env({args.env!r})"
        )
    elif not entry and not args.resume:
        lines.append("tuned    none for this environment: these are the defaults")
    elif effective:
        flags = as_command_line(effective)
        lines.append(f"tuned    {flags} (from {entry}; --no-tuned leaves them out)")
    if changed:
        lines.append(f"flags    {as_command_line(changed)}")
    return lines


def footer(run: Any, record: dict[str, Any], more: list[str]) -> str:
    """Describe the evaluation, the files, and the command that goes on.

    Args:
        run: the `Run`.
        record: the value of `result`.
        more: further lines.
    """
    args = run.args
    status = record["status"]
    step = record["env_steps"]
    newest = run.evaluations.newest
    when = f", at step {newest.step:,}" if newest.step < step else ""
    lines = []
    if newest.returns and args.is_population:
        lines = _members(run, newest, when)
    elif newest.returns:
        lines = _seeds(run, newest, when)
    best = _best_evaluation(run, newest)
    if is_clearly_better(best, newest, args.eval_episodes, args.is_population):
        earned = brief(overall(best.returns, args.is_population))
        play = f"python -m pmaprl.play {shlex.quote(str(run.dir))} --step {best.step}"
        lines.append(
            f"better   return {earned} at step {best.step:,} (optimistic: picked by this "
            f"evaluation): {play}"
        )
    lines.append(f"saved    {record['checkpoint'] or 'nothing yet'}")
    lines += filter(None, more)
    command = _resume_command(run)
    end = f"{status} at step {step:,} of {run.total:,}"
    if status != "finished":
        lines.append(end)
        lines.append(f"resume   {_how_to_resume(run)}")
    elif step < run.total:
        lines.append(f"{end}: an evaluation has reached --stop-at-return {args.stop_at_return:g}")
        lines.append(f"longer   {command} --stop-at-return None")
    else:
        lines.append(end)
        lines.append(f"longer   {command} --total-timesteps {2 * run.total}")
    return "\n".join(lines)


RETURN_STD = "eval/return_std"
MARGIN = 3.0  # standard errors: the best of a hundred equal states is rarely above that


def _best_evaluation(run: Any, newest: EvaluationResult) -> EvaluationResult:
    """The best evaluation that is stored with a checkpoint, with its deviations over episodes."""
    step, returns = run.saver.checkpoints.best()
    deviations = newest.evaluation.get(RETURN_STD, [])
    series = read_log(run.dir, [RETURN_STD]).series.get(RETURN_STD)
    if series is not None and step in series.steps:
        row = np.flatnonzero(series.steps == step)[-1]
        deviations = series.values[row].tolist()
    return EvaluationResult(step, {EVALUATION: returns, RETURN_STD: deviations})


def is_clearly_better(
    best: EvaluationResult, newest: EvaluationResult, episodes: int, is_population: bool
) -> bool:
    """True if an earlier evaluation is above the newest one by more than chance explains.

    Args:
        best: the earlier evaluation.
        newest: the newest one.
        episodes: episodes of each agent in an evaluation.
        is_population: the best member counts, not the mean of seeds.
    """
    if not newest.returns or not best.returns or best.step >= newest.step:
        return False
    gain = overall(best.returns, is_population) - overall(newest.returns, is_population)
    variances = [_variance(found, episodes, is_population) for found in (best, newest)]
    return gain > MARGIN * math.sqrt(sum(variances))


def _variance(found: EvaluationResult, episodes: int, is_population: bool) -> float:
    """The squared standard error, over episodes, of the return that counts; 0 if it is unknown."""
    returns = np.array(found.returns)
    deviations = np.array(found.evaluation.get(RETURN_STD, []))
    if len(deviations) != len(returns):
        return 0.0
    of_agents = deviations**2 / episodes
    if is_population:
        ranks = np.where(np.isfinite(returns), returns, -np.inf)
        return float(np.nan_to_num(of_agents[ranks.argmax()]))
    return float(np.nansum(of_agents) / len(returns) ** 2)


LISTED_SEEDS = 5  # most seeds that have a line each


def _seeds(run: Any, newest: EvaluationResult, when: str) -> list[str]:
    """Lines on the returns of each seed, and on all of several together."""
    args = run.args
    evaluation = newest.evaluation
    lines = []
    count = len(newest.returns)
    for seed, mean in enumerate(newest.returns if count <= LISTED_SEEDS else ()):
        std = brief(evaluation["eval/return_std"][seed])
        low = brief(evaluation["eval/return_min"][seed])
        high = brief(evaluation["eval/return_max"][seed])
        of_seed = f" of seed {args.seed + seed}" if count > 1 else ""
        lines.append(
            f"greedy   return{of_seed} {brief(mean)} ± {std} (min {low}, max {high}) over "
            f"{args.eval_episodes} episodes{_won(evaluation, seed)}{when}"
        )
    if count > 1:
        summary = summary_of_seeds(np.array(newest.returns), args.seed)
        lines.append(f"seeds    return {summary}{when}")
    return lines


def summary_of_seeds(returns: np.ndarray, first_seed: int) -> str:
    """Describe the returns [S] of seeds: estimate, interval, best seed and worst seed."""
    known = np.flatnonzero(np.isfinite(returns))
    broken = ""
    if len(known) < len(returns):
        broken = f", {len(returns) - len(known)} of {len(returns)} seeds broke"
    if not len(known):
        return f"-{broken}"
    finite = returns[known]
    name = estimates.estimate_name("iqm", len(finite))
    middle = brief(float(estimates.estimate(finite)))
    interval = estimates.interval(finite)
    ends = ""
    if interval:
        low = brief(float(interval.low))
        high = brief(float(interval.high))
        ends = f" [{low}, {high}] (95% bootstrap interval)"
    best = known[finite.argmax()]
    worst = known[finite.argmin()]
    return (
        f"{name} {middle}{ends} over {len(finite)} seeds, "
        f"best {brief(float(returns[best]))} (seed {first_seed + best}), "
        f"worst {brief(float(returns[worst]))} (seed {first_seed + worst}){broken}"
    )


def _members(run: Any, newest: EvaluationResult, when: str) -> list[str]:
    """Lines on the best members of a population: their returns and flags."""
    args = run.args
    means = newest.returns
    evolves = bool(args.exchange_interval)
    order = ranked(means, training_returns(run.dir, newest.step))
    order = [member for member in order if math.isfinite(means[member])]
    broken = f", of which {len(means) - len(order)} broke," if len(order) < len(means) else ""
    spread = brief_returns(means, is_population=True)
    shown = order[:SHOWN_MEMBERS]
    kind = "their flags by now" if evolves else "the flags that train each alone"
    lines = [
        f"greedy   return {spread} of {len(means)} members{broken} over {args.eval_episodes} "
        f"episodes{when}",
        f"ranked   the {len(shown)} best (optimistic: picked by this evaluation), and {kind}:",
    ]
    swept = [name for name in args.members.member_values if name.startswith(PREFIX)]
    if swept:
        lines.insert(1, f"         {unswept_text(swept, args.env_params)}")
    evolving = [f"hyper/{name}" for name in args.members.member_values] if evolves else []
    series = read_log(run.dir, evolving).series
    flags = args.flags_of_members()
    for place, member in enumerate(shown, start=1):
        now = {}
        for name, history in series.items():
            now[name.removeprefix("hyper/")] = float(history.values[-1, member])
        command = as_command_line(flags_alone(flags[member] | now))
        mean = brief(means[member])
        std = brief(newest.evaluation["eval/return_std"][member])
        won = _won(newest.evaluation, member)
        lines.append(f"{place:>6}.  return {mean} ± {std}{won}, member {member}: {command}")
    return lines


def _won(evaluation: dict[str, list[float]], agent: int) -> str:
    if "eval/win_rate" not in evaluation:
        return ""
    return f", {evaluation['eval/win_rate'][agent]:.0%} won"


def last_words(run: Any) -> str:
    """Say what is saved, and how to resume, of a run whose process ends at once."""
    if not run.dir:
        return ""
    saved = run.saver.checkpoints.steps()
    if not saved:
        return "exited at once, with nothing saved yet"
    return (
        f"exited at once, saved is step {saved[-1]:,} of {run.total:,}; to resume: "
        f"{_how_to_resume(run)}"
    )


def _how_to_resume(run: Any) -> str:
    return "run the same command again" if run.args.resume_or_start else _resume_command(run)


def _resume_command(run: Any) -> str:
    config = run.config
    called = config["command"][0]
    script = called if Path(called).stem == config["algorithm"] else config["script"]
    env = config["args"]["env"]
    command = f"python {shlex.quote(script)} --resume {shlex.quote(str(run.dir))}"
    if is_custom(env):
        command += f" --env {shlex.quote(env)}"
    rendezvous = config["args"]["distributed"]
    if rendezvous:
        command += f" --distributed {re.sub('[0-9]+/', '.../', rendezvous)}"
    return command


def result(run: Any, status: str, sha256: str | None = None) -> dict[str, Any]:
    """Collect the content of `result.json`.

    Args:
        run: the `Run`.
        status: "finished", "stopped", "interrupted" or "failed".
        sha256: checksum of the final state.
    """
    checkpoints = run.saver.checkpoints
    newest = run.evaluations.newest
    clock = run.clock
    best_step, best = checkpoints.best()
    saved = checkpoints.steps()
    record = {
        "status": status,
        "env_steps": run.steps,
        "updates": run.steps // run.args.steps_per_update,
    }
    for name, values in newest.evaluation.items():
        record[name] = [jsonable(x) for x in values]
    record["eval/env_steps"] = newest.step
    record["eval/episodes"] = run.args.eval_episodes
    if best:
        record["best/env_steps"] = best_step
        record["best/return_mean"] = [jsonable(x) for x in best]
    record["wall_seconds"] = round(clock.wall, 3)
    record["compile_seconds"] = round(clock.seconds["compile"], 3)
    record["steps_per_second"] = round((run.steps - run.first_step) / clock.trained, 1)
    record["state_sha256"] = sha256
    record["checkpoint"] = str(checkpoints.path(saved[-1])) if saved else None
    return record | run.extra_results


def benchmark_line(run: Any, record: dict[str, Any]) -> dict[str, Any]:
    """Collect the line that --benchmark prints.

    Args:
        run: the `Run`.
        record: the value of `result`.
    """
    line = {name: run.config[name] for name in ("algorithm", "command", "versions", "devices")}
    for name in ("env", "num_envs", "num_agents", "total_timesteps"):
        line[name] = getattr(run.args, name)
    for name in ("compile_seconds", "steps_per_second"):
        line[name] = record[name]
    return line | run.extra_results
