"""Trains Stable-Baselines3, or SBX where that is asked for: python train_sb3.py RUN_DIR"""

import importlib
import sys
from typing import Any

import numpy as np
import torch
from rows import Rows, evaluation_points, run_of
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize

NO_ARGUMENTS = ("class", "n_envs", "normalize")  # flags that are not the algorithm's own


def train(rows: Rows) -> None:
    """Train one agent, and write what it earns."""
    args = rows.args
    torch.set_num_threads(1)  # in networks of this size more of them wait for each other
    model = make_model(args)
    evaluation = Evaluation(rows)
    if args["library"] == "sbx":
        import jax

        rows.begin(jax.default_backend(), jax.devices())
        update = model.n_envs * (
            model.n_steps if hasattr(model, "n_steps") else model.train_freq.frequency
        )
        # In another model: what is compiled is kept for all in a process
        with rows.spent_on("compiling"):
            make_model(args).learn(args["flags"].get("learning_starts", 100) + 2 * update)
    else:
        kind = model.device.type
        rows.begin("gpu" if kind == "cuda" else kind, [model.device])
    model.learn(args["total_timesteps"], callback=evaluation, log_interval=None)


def make_model(args: dict[str, Any]) -> BaseAlgorithm:
    """The algorithm with its environments, with flags as RL Zoo's files have them."""
    flags = args["flags"]
    seed = args["seed"]
    env = make_vec_env(args["env"].rpartition(":")[2], flags.get("n_envs", 1), seed=seed)
    if flags.get("normalize", False):
        env = VecNormalize(env, gamma=flags.get("gamma", 0.99))
    chosen = {name: value_of(value) for name, value in flags.items() if name not in NO_ARGUMENTS}
    algorithm = getattr(
        importlib.import_module(args["library"]), flags.get("class", args["algorithm"].upper())
    )
    return algorithm("MlpPolicy", env, seed=seed, **chosen)


def value_of(value: Any) -> Any:
    """A flag's value; "lin_0.1" falls from 0.1 to 0."""
    if not str(value).startswith("lin_"):
        return value
    first = float(value.removeprefix("lin_"))
    return lambda remaining: remaining * first


class Evaluation(BaseCallback):
    """Evaluates between updates, about once in an interval, and at the end."""

    def __init__(self, rows: Rows):
        super().__init__()
        self._rows = rows
        args = rows.args
        self._envs = make_vec_env(args["env"].rpartition(":")[2], args["eval_episodes"])
        self._starts = rows.config["starts"]
        self._points = evaluation_points(args["total_timesteps"], args["eval_interval"])

    def _on_rollout_start(self) -> None:
        if self.num_timesteps >= self._points[0]:
            self._evaluate()

    def _on_training_end(self) -> None:
        self._evaluate()

    def _on_step(self) -> bool:
        return True

    def _evaluate(self) -> None:
        with self._rows.spent_on("evaluating"):
            earned = self._mean_return()
        self._rows.write(self.num_timesteps, [earned])
        self._points = [point for point in self._points if point > self.num_timesteps]

    def _begin(self) -> np.ndarray:
        """First observations of episodes that are the same in all evaluations: the kit's, where
        there are starts.
        """
        self._envs.seed(self._rows.args["eval_seed"])
        obs = self._envs.reset()
        for index, start in enumerate(self._starts or []):
            env = self._envs.envs[index].unwrapped
            env.state = np.array(start)
            observe = getattr(env, "_get_obs", None) or getattr(
                env, "_get_ob", lambda env=env: env.state
            )
            obs[index] = observe()
        return obs

    def _mean_return(self) -> float:
        """Mean return of greedy episodes, one in each environment."""
        normalizer = self.model.get_vec_normalize_env()
        obs = self._begin()
        returns = np.zeros(self._envs.num_envs)
        going = np.ones(self._envs.num_envs, bool)
        while going.any():
            actions, _ = self.model.predict(
                normalizer.normalize_obs(obs) if normalizer else obs, deterministic=True
            )
            obs, rewards, dones, _ = self._envs.step(actions)
            returns += rewards * going
            going &= ~dones
        return returns.mean()


if __name__ == "__main__":
    with run_of(sys.argv) as rows:
        train(rows)
