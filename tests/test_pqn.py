"""PQN, as a user trains it: what its rows say, on the device and on the host, and that it
learns.
"""

import jax.numpy as jnp
import pqn_pmap as pqn
import pytest
from cli_helpers import SMALL, STEPS, in_process, read_result, read_rows
from helpers import make_env, run_updates, small_pqn_args


def test_rows_tell_of_the_exploration_and_of_the_values(tmp_path):
    words = [
        *SMALL,
        "--total-timesteps",
        8 * STEPS,
        "--log-interval",
        STEPS,
        "--epsilon-fraction",
        0.5,
        "--quiet",
    ]
    assert (
        in_process("--env", "helpers:Fussy", *words, "--run-dir", tmp_path / "run", algorithm=pqn)
        == 0
    )
    rows = read_rows(tmp_path / "run")
    line = [1 - 0.95 * min((1 + index) / 4, 1) for index in range(8)]  # of the next rollout
    assert [row["epsilon"] for row in rows] == pytest.approx(line, rel=1e-5)
    assert pqn.optim.epsilon_after(small_pqn_args(epsilon_fraction=0.0), 0) == pytest.approx(0.05)
    assert rows[-1]["q/mean"] > rows[0]["q/mean"], "every legal action is worth 1"
    returns = {row["episode/return_min"] for row in rows} | set(
        read_result(tmp_path / "run")["eval/return_mean"]
    )
    assert returns - {None} == {7.0}, "no illegal action is ever taken"


def test_x7_learning_sees_what_acting_saw(monkeypatch):
    """Before the first gradient step, with the memory of the rollout before, in episodes that begin
    at any step.
    """
    monkeypatch.setattr(pqn, "q_lambda_returns", lambda next_value, **_: next_value)

    def loss(q, batch):
        difference = jnp.where(batch.first[1:], 0.0, jnp.max(q, axis=-1)[1:] - batch.target[:-1])
        return jnp.mean(jnp.square(q - 3)), {
            "found_max": jnp.max(jnp.abs(difference)),
            "first": jnp.mean(batch.first),
        }

    monkeypatch.setattr(pqn, "loss", loss)
    args = small_pqn_args(
        rnn="lstm",
        rnn_size=8,
        update_epochs=1,
        num_minibatches=1,
        normalize_obs=True,
    )
    _, metrics = run_updates(args, make_env("Endings"), 1, 4)
    assert metrics["found_max"] < 1e-5
    assert 0.1 < metrics["first"] < 0.5


def test_a_time_limit_can_count_as_a_termination(monkeypatch):
    monkeypatch.setattr(
        pqn,
        "q_lambda_returns",
        lambda terminated, truncated, **_: 1.0 * (terminated != (terminated | truncated)),
    )
    both = [
        run_updates(small_pqn_args(bootstrap_truncated=x), make_env("Endings"), 1, 4)[1]
        for x in (True, False)
    ]
    assert both[0]["q/target"] > 0 == both[1]["q/target"]


@pytest.mark.slow
@pytest.mark.usefixtures("users_compiler")
@pytest.mark.parametrize(
    ("words", "least"),
    [
        ("--env CartPole-v1 --num-seeds 4 --total-timesteps 200000", 400),
        (
            "--env gymnasium:CartPole-v1 --vectorization sync --total-timesteps 100000 "
            "--eval-episodes 8",
            150,
        ),
        ("--env MemoryChain-bsuite --rnn gru --total-timesteps 60000", 0.9),
    ],
    ids=["device", "host", "memory"],
)
def test_it_learns(words, least, tmp_path):
    flags = [
        "--eval-interval",
        0,
        "--checkpoint-interval",
        0,
        "--quiet",
        "--run-dir",
        tmp_path / "run",
    ]
    assert in_process(*words.split(), *flags, "--seed", 500, algorithm=pqn) == 0
    assert jnp.median(jnp.array(read_result(tmp_path / "run")["eval/return_mean"])) >= least
