"""Flags that one looks for in vain: what to do instead of those that are gone, and of those that others have."""

import dataclasses
import difflib
from typing import Any

from common.cli.checks import shortened

INSTEAD = {
    "anneal_lr": ("lr_schedule", "--lr-schedule linear anneals the step size, --lr-schedule constant does not"),
    "normalize_rewards": ("normalize_returns", "--normalize-returns, which is on by default, takes its place"),
    "reward_scale": ("normalize_returns", "--normalize-returns, which is on by default, finds the scale by itself"),
    "ent_schedule": ("ent_fraction", "--ent-fraction 1 does what --ent-schedule linear did"),
    "num_seeds": ("actor_threads", "one run trains one agent, start a run for each --seed"),
    "num_devices": ("actor_threads", "--actor-devices and --learner-devices name them"),
    "num_envs": ("actor_threads", "--envs-per-actor and --actor-threads say how many there are"),
    "rnn": ("update_epochs", "algos/ppo_rnn_pmap.py is PPO with memory"),
    "opponent": ("num_devices", "algos/ppo_pmap.py has it, and plays against its past; here others move at random"),
    "matchmaking": ("num_devices", "algos/ppo_pmap.py has it, where members of a population play games"),
    "gif": ("actor_threads", "python -m common.play RUN --gif FILE draws an episode afterwards"),
}
"""By the name of a flag: a field of the algorithms that this is for, and what to do."""


def instead_of(args_class: Any, name: str) -> str:
    """What to do instead of the flag `name`, if that is known."""
    field, advice = INSTEAD.get(name, ("", ""))
    return advice if hasattr(args_class, field) else ""


def explain(args_class: Any, flag: str) -> str:
    """Why `args_class` has no such flag, or what may have been meant, in one sentence."""
    name = flag.lstrip("-").replace("-", "_").removeprefix("no_")
    if advice := instead_of(args_class, name):
        return f"there is no --{name.replace('_', '-')} here: {advice}"
    known = [field.name for field in dataclasses.fields(args_class)]
    near = difflib.get_close_matches(name, known, n=1) or [other for other in known if name and name in other][:1]
    hint = f"did you mean --{near[0].replace('_', '-')}?" if near else "--help lists all flags"
    return f"there is no {shortened(flag)} here: {hint}"
