"""PPO on environments of the host: synchronous, by the file that trains on the device."""

from pathlib import Path
from typing import Any

import host_helpers
import jax
import jax.numpy as jnp
import numpy as np
import ppo_pmap as ppo
import ppo_rnn_pmap as ppo_rnn
import pqn_pmap as pqn
import pytest
from helpers import only_acts, relative_difference, same_bits
from host_helpers import TOY, rows_with
from numpy.testing import assert_allclose, assert_array_equal
from PIL import Image

from pmaprl.actors import threads
from pmaprl.cli.errors import TrainingError, UsageError
from pmaprl.envs.registry import make_host
from pmaprl.recording import record_on_host

SMALL = host_helpers.SMALL | {
    "num_envs": 4,
    "num_minibatches": 2,
    "update_epochs": 2,
    "total_timesteps": 4 * 32,
    "log_interval": 32,
}


def train(folder: Path, algorithm: Any = ppo, **flags: Any) -> Any:
    return algorithm.train(algorithm.Args(**SMALL | {"run_dir": str(folder)} | flags))


def test_every_rollout_is_by_the_newest_policy_and_runs_repeat(tmp_path):
    first = train(tmp_path / "a")
    again = train(tmp_path / "b")
    assert same_bits(first.params, again.params)
    rows = rows_with("policy/lag_max", tmp_path / "a")
    assert rows
    assert all(row["policy/lag_max"] == 0 and row["batch/valid"] == 1 for row in rows)
    several = train(
        tmp_path / "c",
        learner_devices="0,1",
        num_minibatches=1,
        actor_devices="0",
    )
    one = train(tmp_path / "d", num_minibatches=1)
    assert relative_difference(one.params, several.params) < 1e-4


def test_a_time_limit_bootstraps_from_the_true_last_observation(tmp_path, monkeypatch):
    """Toys observe (episode, step) and are truncated after 7 steps: a value that is the step shows
    which is taken.
    """
    seen = []
    next_values = ppo.Rollout.next_values

    def watched(rollout, value, value_of, *more):
        found = next_values(
            rollout,
            rollout.obs[..., 1],
            lambda obs: obs[..., 1],
            *more,
        )
        jax.debug.callback(
            lambda *x: seen.append(x),
            found,
            rollout.truncated,
            rollout.obs[..., 1],
        )
        return next_values(rollout, value, value_of, *more)

    monkeypatch.setattr(ppo.Rollout, "next_values", watched)
    train(tmp_path / "run")
    jax.effects_barrier()
    assert len(seen) == 4
    for next_step, truncated, step in seen:
        assert_array_equal(next_step, step + 1)
        assert (next_step[np.asarray(truncated)] == 7).all()
    assert np.any([truncated for _, truncated, _ in seen])


def test_envpool_resets_within_the_step_that_ends_an_episode():
    envs = make_host("envpool:CartPole-v1", 3, 0, '{"max_episode_steps": 6}', resets_in_step=True)
    before = envs.reset()
    ends = 0
    for _ in range(40):
        out = envs.step(np.array([0, 1, 1]))
        over = out.terminated | out.truncated
        moved = np.abs(out.final_obs - before).max(axis=1)
        assert envs.resets_in_step
        assert out.valid.all()
        assert_array_equal(out.obs[~over], out.final_obs[~over])
        assert (moved < 0.5).all() and (np.abs(out.obs[over]) < 0.051).all(), (
            "where CartPole begins"
        )
        starts = np.abs(out.final_obs[over])
        assert (starts > 0.051).any(axis=1).all()
        before = out.obs
        ends = ends + over.sum()
    envs.close()
    assert ends > 15


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [ppo, ppo_rnn, pqn], ids=lambda module: module.__name__)
def test_it_goes_on_after_a_failed_actor_and_resumes(algorithm, tmp_path):
    memory = {"rnn_size": 8} if algorithm is ppo_rnn else {}
    trouble = f'{{"raise_at": 10, "once": "{tmp_path}/once"}}'
    half = train(
        tmp_path / "run",
        algorithm,
        stop_after=64,
        env_params=trouble,
        **memory,
    )
    args = algorithm.Args.from_run(tmp_path / "run", env=TOY, env_params=trouble)
    whole = algorithm.train(args)
    assert half.env_steps == 64
    assert whole.env_steps == 128
    assert whole.status == "finished"
    assert (
        max(row["actors/restarts"] for row in rows_with("actors/restarts", tmp_path / "run")) == 1
    )
    leaves = jax.tree.leaves(whole.params)
    assert all(np.isfinite(x).all() for x in leaves)


def test_a_gif_shows_an_episode_and_changes_no_number(tmp_path):
    drawn = train(
        tmp_path / "drawn",
        env=host_helpers.TOYS + "DrawnToy-v0",
        gif=True,
    )
    plain = train(tmp_path / "plain", env=host_helpers.TOYS + "DrawnToy-v0")
    assert drawn.state_sha256 == plain.state_sha256
    assert not (tmp_path / "plain" / "policy.gif").exists()
    with Image.open(tmp_path / "drawn" / "policy.gif") as gif:
        assert gif.n_frames == 8
        shades = []
        for step in range(8):
            gif.seek(step)
            shades.append(gif.convert("RGB").getpixel((150, 150))[0])
    assert_allclose(shades, range(8), atol=4)


@pytest.mark.parametrize("toy", ["Toy-v0", pytest.param("SecretiveToy-v0", marks=pytest.mark.slow)])
def test_a_gif_of_what_has_no_renderer_shows_observations_and_says_so(toy, tmp_path, capsys):
    result = train(
        tmp_path / "run",
        env=host_helpers.TOYS + toy,
        gif=True,
        total_timesteps=32,
    )
    assert result.status == "finished"
    assert "drawn from observations" in capsys.readouterr().err
    with Image.open(tmp_path / "run" / "policy.gif") as gif:
        assert gif.n_frames == 8


def test_an_environment_that_hangs_while_it_is_drawn_is_given_up(monkeypatch):
    args = ppo.Args(**SMALL | {"env_params": '{"hang_at": 3}', "step_timeout": 0.01})

    algorithm = only_acts(lambda learner, seen, key: jnp.zeros(len(seen.first), jnp.int32))
    monkeypatch.setattr(threads, "GRACE", 0.1)
    with pytest.raises(TrainingError, match="--step-timeout"):
        record_on_host(
            args,
            algorithm,
            learner=(),
            stopped=lambda: False,
        )
    assert record_on_host(args, algorithm, learner=(), stopped=lambda: True) is None


class OddMetric(ppo.PPO):
    """PPO with a metric that is no number."""

    def update(self, *inputs):
        learner, metrics = super().update(*inputs)
        return learner, metrics | {"my/odd": jnp.zeros(3)}


def test_a_metric_that_is_no_number_is_refused_by_name(tmp_path):
    args = ppo.Args(**SMALL, run_dir=str(tmp_path / "run"))
    with pytest.raises(UsageError, match="'my/odd'.*3"):
        ppo.run_algorithm(args, ppo.__file__, OddMetric)
