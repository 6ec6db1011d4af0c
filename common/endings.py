"""What is drawn when a run ends. Each function returns a line for the console; one that fails costs a warning, see
`Run.finish`.
"""

from pathlib import Path
from typing import Any

import jax

from common.device.memory import Agent
from common.drawing.figure import draw_curve
from common.drawing.population import draw_population
from common.envs.environment import Env
from common.runs.ranking import ranked
from common.runs.reports import stored_evaluation
from common.runs.run import Run


def draw_metrics(run: Run, env: Any, learners: Any, status: str) -> str:
    """Draw the metrics of a run to a picture."""
    title = f"{env.name}, {run.config['algorithm']}"
    if run.args.is_population:
        return f"picture  {draw_population(run.dir, title, run.args.members.hyper)}"
    return f"curve    {draw_curve(run.dir, title)}"


def draw_policy(run: Run, env: Env, agent: Agent, learners: Any, status: str) -> str:
    """With --gif, draw an episode with the policy of the first of `learners` [S, ...] to `policy.gif`."""
    path = run.dir / "policy.gif"
    if not run.args.gif:
        return ""
    if status != "interrupted":
        _play_and_draw(run, env, agent, learners, path)
    return f"gif      {path}" if path.exists() else ""


def _play_and_draw(run: Run, env: Env, agent: Agent, learners: Any, path: Path) -> None:
    from common.play import record_with_bar, save_gif  # slow, and needed with --gif only
    from common.policy import Policy

    path.unlink(missing_ok=True)
    returns = stored_evaluation(run.dir, run.steps).evaluation.get("eval/return_mean", [])
    member = ranked(returns)[0] if run.args.is_population and returns else 0
    policy = Policy(agent, jax.tree.map(lambda x: x[member], learners), env.spec)
    episode = record_with_bar(policy, env, jax.random.key(run.args.seed), run.console)
    save_gif(env, episode, path, run.console)
