"""APPO and IMPALA: V-trace, the loss, what masks do, and whole runs on toy environments."""

import itertools
import json
import threading
from pathlib import Path
from typing import Any

import appo_pmap as appo
import host_helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    Watch,
    collectives_beside_each_other,
    compiled_updates,
    metric_rows,
    relative_difference,
    replicas_are_identical,
    result_of,
    same_bits,
)
from host_helpers import TOY, TOYS, made_up, rows_with, states_of
from numpy.testing import assert_allclose
from PIL import Image

import pmaprl.actors.host_evaluation
from pmaprl import export, play
from pmaprl.actors.actor import Actor
from pmaprl.actors.batches import over_learners, tally_of
from pmaprl.actors.host_drivers import as_rollout
from pmaprl.actors.threads import Collected, HostRollout, Slot
from pmaprl.cli.errors import TrainingError
from pmaprl.device.evaluation import Episodes
from pmaprl.device.state import TrainState
from pmaprl.policy import load_policy
from pmaprl.runs.run import Run

pytestmark = pytest.mark.usefixtures("shared_programs")

SMALL = host_helpers.SMALL | {
    "envs_per_actor": 8,
    "update_epochs": 1,
    "num_minibatches": 1,
    "total_timesteps": 10 * 2 * 8 * 8,
    "log_interval": 256,
}


def small_args(**flags: Any) -> appo.Args:
    return appo.Args(**SMALL | flags)


# --------------------------------------------------------------------------------------------------
# maths


@pytest.mark.parametrize(
    ("rho", "c", "target", "advantage"),
    [
        (
            1.0,
            1.0,
            [1.0333205, 1.48, 2.0, 1.2460326, 1.2586188],
            [0.8333205, 1.08, 2.1, 0.4460326, 0.9586188],
        ),
        (
            2.0,
            0.8,
            [0.6458574, 0.4161275, 2.0, 0.5532261, 1.2586188],
            [0.4458574, 1.780619, 2.1, 0.8920652, 0.9586188],
        ),
    ],
)
def test_golden_vtrace(rho, c, target, advantage):
    log_rho = np.array([-1, 0.5, 0, 1.5, -0.3])
    reward = np.array([1, -0.5, 2, 0, 1])
    value = np.array([0.2, 0.4, -0.1, 0.8, 0.3])
    next_value = np.array([0.4, -0.1, 0.8, 0.3, 0.6])
    ends = np.arange(5) == 2, np.zeros(5, bool)
    found, unweighted = appo.vtrace(
        log_rho,
        reward,
        value,
        next_value,
        *ends,
        0.99,
        1.0,
        rho,
        c,
    )
    assert_allclose(found, target, atol=1e-6)
    weighted = unweighted * np.minimum(np.exp(log_rho), rho)
    assert_allclose(weighted, advantage, atol=1e-6)


def test_vtrace_is_the_double_sum_of_the_paper():
    """Equation 1, with both kinds of end and both at once; the next value is independent wherever
    an episode ended.

    From it follow the discounted return on policy, and that two episodes in one trace equal two
    traces.
    """
    rng = np.random.default_rng(0)
    steps = 12
    log_rho, reward, value, final = rng.normal(size=(4, steps, 30))
    terminated, truncated = rng.random((2, steps, 30)) < 0.2
    done = terminated | truncated
    rho = np.exp(log_rho)
    following = np.concatenate([value[1:], final[-1:]])
    next_value = np.where(done, final, following)
    bootstrap = np.where(terminated, 0, next_value)
    target, advantage = appo.vtrace(
        log_rho,
        reward,
        value,
        next_value,
        terminated,
        truncated,
        0.9,
        0.8,
        1.3,
        0.7,
    )
    delta = np.minimum(rho, 1.3) * (reward + 0.9 * bootstrap - value)
    decay = 0.9 * 0.8 * np.minimum(rho, 0.7) * ~done
    wanted = value.copy()
    for start, step in itertools.combinations_with_replacement(range(steps), 2):
        weight = decay[start:step].prod(axis=0)
        wanted[start] += weight * delta[step]
    assert_allclose(target, wanted, atol=1e-5)
    blend = 0.8 * wanted[1:] + 0.2 * value[1:]
    mixed = np.concatenate([blend, final[-1:]])
    later = np.where(done, bootstrap, mixed)
    assert_allclose(advantage, reward + 0.9 * later - value, atol=1e-5)


# --------------------------------------------------------------------------------------------------
# the update


class Lab(host_helpers.Lab):
    def __init__(self, **flags: Any):
        flags |= {"rnn_size": 8} if "rnn" in flags else {}
        super().__init__(
            appo,
            small_args(**{"learning_rate": 0.01, "lr_schedule": "constant"} | flags),
        )
        self.learner, self.run = self.driver.begin(jax.random.key(0), jax.random.key(1))

    def rollout(
        self, seed: int, final_obs: bool = False, steps: int = 8, envs: int = 8
    ) -> HostRollout:
        rng = np.random.default_rng(100 + seed)
        obs, final = rng.normal(size=(2, steps + 1, envs, 2)).astype(np.float32)
        return made_up(
            seed,
            obs,
            action=rng.integers(0, 3, (steps, envs)).astype(np.int32),
            extras=np.log(rng.uniform(0.1, 0.9, (steps, envs))).astype(np.float32),
            final_obs=final[1:] if final_obs else None,
            memory=jax.tree.map(lambda x: rng.normal(size=(1, *x.shape)), self.driver.memory(envs)),
        )

    def outputs(self, obs: np.ndarray) -> tuple[Any, np.ndarray]:
        """Policies and values of observations [T, N, ...] without any memory of them."""
        network = appo.Network(self.args, self.spec)
        first = np.ones(obs.shape[:2], bool)
        memory = self.driver.memory(obs.shape[1])
        return network.apply(self.learner.params, obs, first, memory)[:2]

    def update(
        self, *rollouts: HostRollout, devices: int = 1, updates: int = 1
    ) -> tuple[Any, dict[str, Any]]:
        """Parameters and metrics after learning from the same rollouts again and again."""
        state = jax.tree.map(
            lambda x: jnp.stack([x] * devices),
            TrainState(self.learner, (), self.run),
        )
        for _ in range(updates):
            state, _, tally = self.step(state, over_learners(rollouts, devices))
        params = jax.device_get(state.learner.params)
        assert all(np.ptp(x, axis=0).max(initial=0) < 1e-6 for x in jax.tree.leaves(params))
        of_first = jax.tree.map(lambda x: x[0], params)
        return of_first, jax.tree.map(lambda x: x[0], tally.metrics())


@pytest.mark.parametrize(
    "flags",
    [
        {
            "update_epochs": 2,
            "num_minibatches": 2,
            "clip_vloss": True,
            "normalize_obs": True,
        },
        pytest.param({"loss": "impala", "normalize_obs": True}, marks=pytest.mark.slow),
        # Of cells that last far longer than these rollouts, gradients are so small that Adam makes
        # steps of rounding
        pytest.param(
            {
                "update_epochs": 2,
                "num_minibatches": 2,
                "rnn": "gru",
                "rnn_span": 16,
            },
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_any_number_of_devices_learns_the_same(flags):
    lab = Lab(envs_per_actor=16, **flags)
    # Of seeds 0 and 1 a gradient of --loss impala is so small that Adam makes steps of rounding,
    # too
    rollouts = [lab.rollout(seed, final_obs="loss" in flags, envs=16) for seed in (4, 5)]
    one, _ = lab.update(*rollouts, updates=3)
    several, _ = lab.update(*rollouts, devices=4, updates=3)
    assert relative_difference(one, several) < 1e-5


def test_masked_steps_teach_nothing():
    lab = Lab(max_policy_lag=3)
    rollout = lab.rollout(0)
    rng = np.random.default_rng(1)
    old = rng.random(rollout.valid.shape) < 0.2
    rollout = rollout._replace(version=np.where(old, -4, -3).astype(np.int32))
    # An end before a masked step, so that no advantage before it sums over it
    ends = (old | ~rollout.valid)[1:]
    ended = np.append(ends, np.zeros((1, 8), bool), axis=0)
    rollout = rollout._replace(terminated=rollout.terminated | ended)
    masked = old | ~rollout.valid
    reward = np.where(masked, 1e3, rollout.reward).astype(np.float32)
    other = rollout._replace(
        reward=reward,
        action=np.where(masked, 2, rollout.action),
        extras=np.where(masked, -5, rollout.extras).astype(np.float32),
    )
    params, _ = lab.update(rollout)
    assert relative_difference(params, lab.update(other)[0]) < 1e-6
    rewards = np.where(masked, rollout.reward, 1e3)
    changed = rollout._replace(reward=rewards.astype(np.float32))
    assert relative_difference(params, lab.update(changed)[0]) > 1e-3
    metrics = tally_of(
        Collected(0, rollout, []),
        version=0,
        max_lag=lab.args.max_policy_lag,
    ).metrics()
    too_old = (old & rollout.valid).mean()
    shares = {"batch/valid": rollout.valid.mean(), "batch/too_old": too_old}
    assert {name: metrics[name] for name in shares} == pytest.approx(shares)


GAE = {"advantage": "gae", "normalize_obs": True, "normalize_returns": False}


@pytest.mark.parametrize(
    "flags",
    [
        {},
        pytest.param({"rnn": "lstm", "rnn_layers": 2}, marks=pytest.mark.slow),
        pytest.param(GAE | {"rnn": "gru", "share_torso": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_both_kinds_of_reset_teach_the_same(flags):
    """The same experience as a suite records it that resets within a step, and as one that takes a
    step of its own.
    """
    lab = Lab(**flags)
    within = lab.rollout(0, final_obs=True, steps=6, envs=8)
    truncated, terminated = np.zeros((2, 6, 8), bool)
    truncated[2, :4] = True
    terminated[2, 4:] = True
    within = within._replace(
        valid=np.ones((6, 8), bool),
        truncated=truncated,
        terminated=terminated,
    )
    over = (truncated | terminated)[..., None]
    final = np.where(over, within.final_obs, within.obs[1:])
    within = within._replace(final_obs=final)
    apart = jax.tree.map(
        lambda x: np.insert(x, 3, 0, axis=0),
        within._replace(final_obs=None, first=(), memory=()),
    )
    obs = np.insert(within.obs, 3, within.final_obs[2], axis=0)
    apart = apart._replace(
        obs=obs,
        first=within.first,
        memory=within.memory,
    )
    assert not apart.valid[3].any()
    params = lab.update(within, updates=2)[0]
    params_apart = lab.update(apart, updates=2)[0]
    assert relative_difference(params, params_apart) < 1e-5


def test_a_truncated_step_bootstraps_from_its_final_observation_a_terminated_one_does_not():
    lab = Lab(vf_coef=1.0)
    # Values begin at 0
    moved = jax.tree.map(lambda x: x + 0.1, lab.learner.params)
    lab.learner = lab.learner.replace(params=moved)
    rollout = lab.rollout(0, final_obs=True, steps=1)._replace(valid=np.ones((1, 8), bool))
    for truncated, terminated in ((True, False), (False, True), (True, True)):
        case = rollout._replace(
            truncated=np.full((1, 8), truncated),
            terminated=np.full((1, 8), terminated),
        )
        # Weights over 1, so that they are clipped to it
        unlikely = np.full((1, 8), -9, np.float32)
        case = case._replace(extras=unlikely)
        value = np.asarray(lab.outputs(case.final_obs)[1][0])
        target = case.reward[0] + 0.99 * (0 if terminated else value)
        metrics = lab.update(case)[1]
        assert_allclose(metrics["value/target"], target.mean(), rtol=1e-4)
    value_of_next = lab.outputs(rollout.obs[1:])[1][0]
    assert np.abs(value - value_of_next).mean() > 0.01, "or nothing would be seen"


@pytest.mark.parametrize(
    ("env", "limit", "flags"),
    [
        ("envpool:CartPole-v1", "max_episode_steps", {"rnn": "gru"}),
        pytest.param(
            TOYS + "HybridToy-v0",
            "limit",
            {"rnn": "lstm", "rnn_layers": 2},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_x7_learners_see_the_probabilities_of_actors_over_many_rollouts(env, limit, flags):
    """Episodes of five steps and less end at every position of a rollout; `envpool` resets in a
    step of its own.
    """
    lab = Lab(
        env=env,
        env_params=json.dumps({limit: 5}),
        num_steps=7,
        envs_per_actor=3,
        **flags,
    )
    params = lab.driver.publish(lab.learner, lab.run)
    act = jax.jit(lab.driver.act_on_host)
    actor = Actor(
        0,
        None,
        lab.args,
        act,
        lab.driver.memory(3),
        version=0,
    )
    actor.start()
    network = appo.Network(lab.args, lab.spec)
    for _ in range(5):
        rollout = as_rollout(actor.collect(lambda slot: Slot(0, params)).rollout)
        policy = network.apply(lab.learner.params, rollout.obs, rollout.seen.first, rollout.memory)[
            0
        ]
        assert_allclose(policy.log_prob(rollout.action), rollout.extras, atol=1e-5)
    actor.close()


@pytest.mark.slow
def test_both_losses_agree_on_policy():
    rollouts = []
    for loss in ("appo", "impala"):
        lab = Lab(loss=loss, norm_adv=False)
        rollout = lab.rollout(0)
        policy = lab.outputs(rollout.obs[:-1])[0]
        log_prob = policy.log_prob(rollout.action)
        on_policy = rollout._replace(extras=np.asarray(log_prob))
        rollouts.append(lab.update(on_policy)[0])
    assert relative_difference(*rollouts) < 1e-5


def test_ratios_beyond_the_clamp_stay_finite_and_impala_learns_from_them():
    lab = Lab(loss="impala", vf_coef=0.0, ent_coef=0.0)
    impossible = lab.rollout(0)._replace(extras=np.full((8, 8), -200, np.float32))
    params, metrics = lab.update(impossible)
    assert metrics["policy/rho"] == pytest.approx(20.0)
    leaves = jax.tree.leaves(params)
    assert all(np.isfinite(x).all() for x in leaves)
    assert metrics["grad/norm"] > 0


# --------------------------------------------------------------------------------------------------
# whole runs


def train(folder: Path, **flags: Any) -> Any:
    return appo.train(small_args(run_dir=str(folder), **flags))


def rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run but those of evaluations; in each, every rollout is accounted for."""
    found = rows_with("rollouts/produced", folder)
    for row in (*found, result_of(folder)):
        counts = [row[f"rollouts/{name}"] for name in ("trained", "discarded", "waiting", "held")]
        assert row["rollouts/produced"] == sum(counts)
    return found


PASSES = {"update_epochs": 2, "num_minibatches": 2}


@pytest.fixture(scope="module")
def lockstep(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lockstep") / "run"
    return train(folder, lockstep=True, **PASSES), folder


def test_lockstep_repeats_itself(lockstep, tmp_path):
    again = train(tmp_path / "again", lockstep=True, **PASSES)
    other = train(tmp_path / "other", lockstep=True, seed=1, **PASSES)
    assert lockstep[0].state_sha256 == again.state_sha256 != other.state_sha256


def lags(folder: Path) -> list[list[float]]:
    """The least, mean and largest lag of every row."""
    return [[row[f"policy/lag{end}"] for end in ("_min", "", "_max")] for row in rows(folder)]


def test_lag_is_exactly_one_in_lockstep(lockstep):
    """But in the first of two updates in the first row, with the parameters that the run began
    with.
    """
    wanted = [[0, 0.5, 1]] + [[1, 1, 1]] * 4
    assert lags(lockstep[1]) == wanted


@pytest.mark.slow
def test_numbers_in_infos_are_logged(tmp_path):
    """Sixteen steps of episodes of seven, in each of sixteen environments of two actors."""
    logged = {
        "time": 59 / 16,
        "time_sum": 16 * 59,
        "time_max": 7,
        "time_min": 1,
        "time_last": 2,
    }
    logged |= {"end": 70, "end_last": 70, "even_sum": 16 * 7}
    train(
        tmp_path / "run",
        env=TOYS + "ChattyToy-v0",
        lockstep=True,
        total_timesteps=256,
        log_info=tuple(logged),
    )
    (row,) = rows(tmp_path / "run")
    assert {name: row[f"env/{name}"] for name in logged} == logged


@pytest.mark.slow
def test_learners_on_other_devices_learn_the_same(lockstep, tmp_path, monkeypatch):
    states = states_of(monkeypatch, "finish")
    flags = PASSES | {"actor_threads": 1}
    updates = compiled_updates(monkeypatch)
    split = train(
        tmp_path / "split",
        lockstep=True,
        actor_devices="0,3",
        learner_devices="1,2",
        **flags,
    )
    assert relative_difference(split.params, lockstep[0].params) < 1e-5
    assert replicas_are_identical(states[-1])
    assert not collectives_beside_each_other(updates[0])
    config = json.loads((tmp_path / "split" / "config.json").read_text())
    assert config["devices"] == [
        "cpu:1",
        "cpu:2",
    ]


def test_one_compilation_and_no_growing_memory(tmp_path, monkeypatch):
    jax.random.key(0)  # compiles once in a process, whoever asks first
    with Watch(monkeypatch) as watch:
        train(
            tmp_path / "run",
            total_timesteps=40 * 128,
            log_interval=128,
        )
    names = sorted(name for name, chunks in watch.compiled)
    # `init`, `update`; playing, acting
    assert names == ["jit(_fun)", "jit(_fun)", "jit(act)", "jit(act_on_host)"]
    # A few versions of the parameters come and go
    assert max(watch.bytes[5:]) < 2 * min(watch.bytes[5:])


def test_resume_continues_with_the_same_learner(tmp_path):
    folder = tmp_path / "run"
    flags = {"normalize_obs": True, "checkpoint_interval": 256}
    part = train(folder, stop_after=512, **flags)
    with pytest.MonkeyPatch.context() as patch:
        states = states_of(patch, "start")
        resumed = appo.Args.from_run(folder, env=TOY, quiet=True)
        rest = appo.train(resumed)
    assert part.status == "stopped"
    assert states[0].run.updates == 4
    assert same_bits(part.params, states[0].learner.params)
    assert float(states[0].learner.obs_stats.stats.count[0]) == 512
    assert rest.env_steps == 1280
    last = rows(folder)[-1]
    assert last["updates"] == 10
    assert last["rollouts/trained"] == 12


def test_commands_for_policies_know_host_environments(lockstep, tmp_path):
    _, folder = lockstep
    episodes = play.play(play.Args(run=str(folder), env=TOY, episodes=3))
    assert episodes.length.tolist() == [7, 7, 7]
    for env in (TOY, TOYS + "DrawnToy-v0"):  # observations over time, and what the suite draws
        args = play.Args(run=str(folder), env=env, gif=str(tmp_path / "x.gif"))
        play.play(args)
        assert Image.open(tmp_path / "x.gif").n_frames == 8
    args = export.Args(run=str(folder), out=str(tmp_path / "policy.stablehlo"))
    export.export(args)
    assert (tmp_path / "policy.stablehlo").stat().st_size > 1000


def test_evaluations_go_on_beside_the_training(tmp_path, monkeypatch):
    """One that takes long is written where it belongs, and its checkpoint is the best."""
    released = threading.Event()
    returns = iter([5.0, 2.0, 1.0])
    advance = Run.advance

    def evaluate(evaluation, learner, worker):
        released.wait(300)
        returned = np.full(4, next(returns))
        return Episodes(returned, np.ones(4))

    def watched(run, *report):
        advance(run, *report)
        if run.steps == 20 * 128:
            released.set()

    monkeypatch.setattr(pmaprl.actors.host_evaluation.HostEvaluation, "_play", evaluate)
    monkeypatch.setattr(Run, "advance", watched)
    folder = tmp_path / "run"
    train(
        folder,
        eval_interval=1280,
        keep_best=True,
        keep_checkpoints=1,
        total_timesteps=21 * 128,
    )
    found = {
        row["env_steps"]: row["eval/return_mean"] for row in rows_with("eval/length_mean", folder)
    }
    assert found == {1280: 5.0, 2560: 2.0, 21 * 128: 1.0}
    assert load_policy(folder, "best").step == 1280
    assert load_policy(folder).step == 21 * 128
    assert load_policy(folder, 1280).evaluation == 5.0


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path):
    with pytest.raises(TrainingError, match="not finite"):
        train(tmp_path / "run", learning_rate=1e30, max_grad_norm=1e30)
    assert result_of(tmp_path / "run")["status"] == "failed"


@pytest.mark.slow
def test_a_restart_does_not_change_what_lockstep_means(tmp_path, capfd):
    """Every rollout still has the parameters that its place in the order says."""
    flags = {"rollouts_per_update": 3, "env_params": '{"raise_at": 20}', "max_restarts": 100}
    flags |= {"total_timesteps": 6 * 192, "log_interval": 192}
    hashes = {
        train(tmp_path / name, lockstep=True, **flags).state_sha256 for name in ("one", "other")
    }
    assert len(hashes) == 1
    assert "restarts (1 of 100)" in capfd.readouterr().err
    wanted = [[0, 0, 0]] + [[1, 1, 1]] * 5
    assert lags(tmp_path / "one") == wanted


def test_observations_with_parts_and_a_mask(tmp_path):
    """Parts reach the networks as the suite gives them, and no illegal action is ever taken, in
    evaluations neither.
    """
    flags = {"env": TOYS + "DictToy-v0", "vectorization": "async", "eval_interval": 640}
    result = train(tmp_path / "run", **flags, normalize_obs=True)
    for row in metric_rows(tmp_path / "run"):
        assert row.get("episode/return_min", row.get("eval/return_min")) >= 0
    assert result.evaluation["eval/return_min"][0] >= 0
    numbers = (np.ones((2, 2)), [3, 4])
    frames = np.ones((2, 12, 12, 2), int)
    obs = {
        "numbers": numbers,
        "frames": frames,
        "action_mask": np.eye(3)[:2] > 0,
    }
    assert load_policy(result.run_dir)(obs).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("toy", "trouble", "message"),
    [("DictToy", "no_action_at", "legal"), ("TellingToy", "tells_nothing_at", "action_mask")],
)
def test_a_state_without_any_legal_action_or_without_its_mask_is_an_error(
    toy, trouble, message, tmp_path
):
    with pytest.raises(TrainingError, match=f"{toy}-v0 .*{message}"):
        train(
            tmp_path / "run",
            env=f"{TOYS}{toy}-v0",
            env_params=json.dumps({trouble: 3}),
            max_restarts=0,
        )


@pytest.mark.slow
@pytest.mark.usefixtures("users_compiler")
def test_cartpole_is_learned(tmp_path):
    run = {
        "eval_interval": 50_000,
        "stop_at_return": 475,
        "quiet": True,
        "run_dir": str(tmp_path / "run"),
    }
    result = appo.train(
        appo.Args(env="envpool:CartPole-v1", total_timesteps=300_000, checkpoint_interval=0, **run)
    )
    assert result.evaluation["eval/return_mean"][0] >= 475
