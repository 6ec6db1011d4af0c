"""What a run says of itself: the header and the footer on the console, and `result.json`."""

import json
import math
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from common.device.devices import describe
from common.runs.metrics import jsonable
from common.runs.directory import write_json
from common.cli.env_names import is_custom


def print_header(run: Any) -> None:
    """Devices, environment and derived sizes, before anything slow begins."""
    say, args = run.console.say, run.args
    say(f"devices  {describe(run.devices)}")
    say(f"env      {run.env.name}")
    for line in args.sizes(len(run.devices)):
        say(f"sizes    {line}")
    for name, note in run.notes.items():
        say(f"{name:<8} {note}")
    if run.total != args.total_timesteps:
        say(f"steps    {args.total_timesteps:,} rounded up to {run.total:,}, whole updates")
    if run.dir:
        say(f"run      {run.dir}")


def print_footer(run: Any, status: str) -> None:
    """The evaluation, where everything is, and the command that goes on; with --benchmark one line of JSON instead."""
    if run.args.benchmark:
        print(json.dumps(_benchmark_record(run)))
        return
    say, args = run.console.say, run.args
    for seed, mean in enumerate(run.evaluation.get("eval/return_mean", [])):
        std, low, high = (run.evaluation[f"eval/return_{name}"][seed] for name in ("std", "min", "max"))
        who = f" of seed {args.seed + seed}" if args.num_seeds > 1 else ""
        spread = f"{mean:.1f} ± {std:.1f} (min {low:.1f}, max {high:.1f})"
        say(f"greedy   return{who} {spread} over {args.eval_episodes} episodes")
    say(f"saved    {_last_checkpoint(run) or 'nothing yet'}")
    say(f"curve    {run.dir / 'curve.png'}")
    if args.gif and (run.dir / "policy.gif").exists():
        say(f"gif      {run.dir / 'policy.gif'}")
    for remark in run.remarks:
        say(remark)
    command = _resume_command(run)
    if status == "finished":
        say(f"finished at step {run.steps:,}; train longer: {command} --total-timesteps {2 * run.total}")
    else:
        say(f"{status} at step {run.steps:,} of {run.total:,}; continue: {command}")


def write_result(run: Any, status: str, **more: Any) -> None:
    """Write `result.json`."""
    record = {
        "status": status,
        "env_steps": run.steps,
        "updates": run.steps // run.args.steps_per_update,
        **{name: [jsonable(x) for x in values] for name, values in run.evaluation.items()},
        "eval/episodes": run.args.eval_episodes,
        "wall_seconds": round(run.wall_seconds, 3),
        "compile_seconds": round(run.seconds["compile"], 3),
        "steps_per_second": round((run.steps - run.first_step) / run.trained_seconds, 1),
        "state_sha256": run.sha256,
        "checkpoint": _last_checkpoint(run),
    }
    write_json(run.dir / "result.json", record | run.measured | more)


def draw_policy(run: Any, act: Callable, learners: Any) -> None:
    """Write `policy.gif`: an episode with the policy of the first of `learners` [S, ...]."""
    path = run.dir / "policy.gif"
    try:
        from common.play import record_with_bar, save_gif
        from common.policy import Policy

        path.unlink(missing_ok=True)
        policy = Policy(act, jax.tree.map(lambda x: x[0], learners), run.env.spec)
        episode = record_with_bar(policy, run.env, jax.random.key(run.args.seed), run.console)
        save_gif(run.env, episode, path, run.console)
    except Exception as error:  # all is saved by now: a picture that fails does not make the run a failure
        run.console.warn(f"policy.gif could not be drawn: {error}")


def stored_evaluation(directory: Path) -> dict[str, list[float]]:
    """The last evaluation in `result.json`, if there is one."""
    try:
        record = json.loads((directory / "result.json").read_text())
    except (OSError, ValueError):
        return {}
    stored = {name: value for name, value in record.items() if name.startswith("eval/") and name != "eval/episodes"}
    return {name: [math.nan if x is None else x for x in values] for name, values in stored.items()}


def _benchmark_record(run: Any) -> dict[str, Any]:
    flags = {name: getattr(run.args, name) for name in ("env", "num_envs", "num_seeds", "total_timesteps")}
    where = {name: run.config[name] for name in ("algorithm", "versions", "devices")}
    speed = {
        "compile_seconds": round(run.seconds["compile"], 2),
        "steps_per_second": round(run.steps / run.trained_seconds),
    }
    return where | flags | speed | run.measured


def _last_checkpoint(run: Any) -> str | None:
    saved = run.checkpoints.steps() if run.checkpoints else []
    return str(run.dir / "checkpoints" / str(saved[-1])) if saved else None


def _resume_command(run: Any) -> str:
    called = run.config["command"][0]
    script = called if Path(called).stem == run.config["algorithm"] else run.config["script"]
    env = run.config["args"]["env"]
    again = f" --env {shlex.quote(env)}" if is_custom(env) else ""
    return f"python {shlex.quote(script)} --resume {shlex.quote(str(run.dir))}{again}"
