"""Flags that one looks for in vain: what to do instead of those that are gone, and of those that others have."""

import dataclasses
import difflib
from typing import Any

from common.cli.checks import shortened

INSTEAD = {
    "anneal_lr": ("lr_schedule", "--lr-schedule linear anneals the learning rate, --lr-schedule constant does not"),
    "num_seeds": ("actor_threads", "one run trains one agent, start a run for each --seed"),
    "num_devices": ("actor_threads", "--actor-devices and --learner-devices name them"),
    "num_envs": ("actor_threads", "--envs-per-actor and --actor-threads say how many there are"),
    "rnn": ("update_epochs", "algos/ppo_rnn_pmap.py is PPO with memory"),
    "opponent": ("num_devices", "algos/ppo_pmap.py has self-play; opponents are random here"),
    "matchmaking": ("opponent", "--opponent members takes its place"),
    "grid": ("sweep", "--sweep without --population trains all combinations of values"),
    "pbt_env_params": ("pbt_evolve", "--pbt-evolve env.NAME takes its place"),
    "coordinator": ("distributed", "--distributed HOST:PORT,ID/COUNT takes its place"),
    "compile_cache": ("env", "JAX_ENABLE_COMPILATION_CACHE=false in the environment turns the cache off"),
    "minibatch_size": ("num_minibatches", "--num-minibatches says into how many the samples of an update are split"),
    "gif": ("actor_threads", "python -m common.play RUN --gif FILE draws an episode afterwards"),
}
INSTEAD |= {"batch_size": INSTEAD["minibatch_size"], "num_processes": INSTEAD["coordinator"]}
for part in ("project", "name", "entity", "run_group"):
    INSTEAD[f"wandb_{part.removeprefix('run_')}"] = "wandb", f"WANDB_{part.upper()} in the environment takes its place"
"""By the name of a flag: a field of the algorithms that this is for, and what to do."""

ELSEWHERE = """
lr=learning_rate policy_lr q_lr, learning_rate=policy_lr q_lr, actor_lr=policy_lr learning_rate, critic_lr=q_lr
learning_rate, n_steps=num_steps, rollout_length=num_steps, unroll_length=num_steps, n_envs=num_envs envs_per_actor,
num_workers=actor_threads num_envs, timesteps=total_timesteps, steps=total_timesteps, num_timesteps=total_timesteps,
total_steps=total_timesteps, n_timesteps=total_timesteps, epochs=update_epochs utd_ratio, n_epochs=update_epochs,
ppo_epoch=update_epochs, minibatch_size=batch_size, clip_coef=clip_eps, clip_range=clip_eps, lam=gae_lambda,
discount=gamma, entropy_coef=ent_coef alpha, ent_coef=alpha, value_coef=vf_coef, gradient_steps=utd_ratio update_epochs,
train_freq=utd_ratio num_steps, net_arch=hidden_sizes, hidden_dim=hidden_sizes, env_id=env, env_name=env,
exp_name=run_dir, log_dir=run_dir, output_dir=run_dir, checkpoint=resume init_from, load=resume init_from, track=wandb,
capture_video=gif
"""
"""Names that CleanRL, Stable-Baselines3, PureJaxRL and others have for flags, and ours, the nearest first."""


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
    ours = dict(pair.split("=") for pair in " ".join(ELSEWHERE.split()).split(", "))
    near = [other for other in ours.get(name.lower(), "").split() if other in known]
    near = near or difflib.get_close_matches(name.lower(), known, n=1)
    near = near or [other for other in known if name and name in other][:1]
    flags = " or ".join(f"--{other.replace('_', '-')}" for other in near)
    hint = f"did you mean {flags}?" if near else "--help lists all flags"
    return f"there is no {shortened(flag)} here: {hint}"
