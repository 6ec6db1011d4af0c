"""The promises that PPO, recurrent PPO, PQN, DQN and SAC keep: X1 to X6 and X8 to X11 of
CONTRIBUTING.md.
"""

import functools
import re
import shutil

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    Watch,
    calls_of_gae,
    collectives_beside_each_other,
    dqn,
    init_over,
    make_env,
    metric_rows,
    over_devices,
    ppo,
    ppo_rnn,
    pqn,
    programs,
    relative_difference,
    replicas_are_identical,
    result_of,
    run_updates,
    sac,
    same_bits,
    small_args,
    small_dqn_args,
    small_pqn_args,
    small_rnn_args,
    small_sac_args,
)
from numpy.testing import assert_array_equal

from pmaprl.cli.device_flags import block_width
from pmaprl.cli.env_flags import flags_alone
from pmaprl.device.agents import acting_part
from pmaprl.device.keys import rollout_keys
from pmaprl.device.minibatches import minibatch_indices
from pmaprl.device.sharding import global_ids
from pmaprl.device.state import members_on_devices, to_host
from pmaprl.envs.variation import run_env

EASY = {"normalize_obs": True, "decorrelate": True, "lr_schedule": "kl-adaptive"}
BLOCKS_OF_TWO = {"num_minibatches": 16, "exploration_loss": "symmetric-kl", "reset_pool": 6}
RECURRENT = {"bptt_length": 4, "obs_prev_action_reward": True, "normalize_obs": True}
# Groups of two
RECIPE = {
    "batch_size": 8,
    "utd_ratio": 0.125,
    "hidden_sizes": (8, 8),
    "critic_hidden_sizes": (8, 8),
}
CASES = {
    "ppo": (small_args, "CartPole-v1", EASY, 4),
    "memory": (small_rnn_args, "Endings", RECURRENT, 4),
    "pqn": (small_pqn_args, "Endings", {"normalize_obs": True, "rnn": "gru", "rnn_size": 8}, 4),
    "sac": (
        small_sac_args,
        "Pendulum-v1",
        RECIPE | {"recipe": "xqc", "critic_bins": 5, "policy_frequency": 2},
        4,
    ),
    "ppo, multidiscrete": (small_args, "TwoDials", BLOCKS_OF_TWO, 2),
    "ppo, masked": (small_args, "Fussy", {"normalize_obs": True, "decorrelate": True}, 2),
    "memory, continuous": (small_rnn_args, "Pendulum-v1", {"rnn": "lstm", "share_torso": True}, 2),
    "pqn, masked": (small_pqn_args, "Fussy", {"num_minibatches": 16, "decorrelate": True}, 2),
    "dqn": (small_dqn_args, "Fussy", {"batch_size": 8, "distribution": "c51", "n_steps": 2}, 4),
    "sac, masked": (small_sac_args, "Fussy", {"policy_frequency": 2, "target_frequency": 3}, 4),
    "sac, crossq": (small_sac_args, "CartPole-v1", RECIPE | {"recipe": "crossq"}, 4),
    "sac, simba": (small_sac_args, "Pendulum-v1", RECIPE | {"recipe": "simba"}, 2),
}
DEFAULT = "ppo", "memory", "pqn", "sac", "dqn"
BY_CASE = [
    pytest.param(case, marks=[] if case in DEFAULT else [pytest.mark.slow]) for case in CASES
]


@functools.cache
def programs_of(case: str, num_devices: int, num_seeds: int):
    args, name, flags, _ = CASES[case]
    return programs(args(num_seeds=num_seeds, **flags), make_env(name), num_devices)


def after(updates: int, case: str, num_devices: int, seed: int, num_seeds: int = 1):
    """State on the devices and metrics; all seeds are given to one program."""
    init, update = programs_of(case, num_devices, num_seeds)
    members = CASES[case][0](num_seeds=num_seeds, seed=seed).members
    begun = init.func(members_on_devices(members, num_devices))
    state, outcome = update(begun, np.int32(updates))
    return state, outcome.fetch(updates).metrics


@pytest.mark.parametrize("case", BY_CASE)
def test_x1_x3_x8_an_experiment_is_the_same_on_any_devices_and_beside_other_seeds(case):
    """After twelve updates, in ten of which SAC learns: seeds 5 and 6 alone on a device, and
    together on several.
    """
    start, _ = after(0, case, 1, 5)
    together, metrics = after(12, case, CASES[case][3], 5, num_seeds=2)
    assert replicas_are_identical(together)
    both = [jax.tree.map(lambda x, i=i: x[i][None], to_host(together)) for i in range(2)]
    for place, (ours, others) in enumerate((both, both[::-1])):
        one, one_metrics = after(12, case, 1, 5 + place)
        one = to_host(one)
        assert relative_difference(one.learner.params, ours.learner.params) < 1e-5
        assert relative_difference(one.run.recent, ours.run.recent) < 1e-5
        assert relative_difference(one.actors.tracker, ours.actors.tracker) < 1e-5
        assert relative_difference(one, ours) < 1e-4  # the replay buffer, too
        assert relative_difference(one.learner.params, others.learner.params) > 0.01
        assert (
            relative_difference(acting_part(one.learner), acting_part(to_host(start).learner))
            > 1e-3
        )
        names = {"sac": "loss/q1", "pqn": "loss/q", "dqn": "loss/q"}
        loss = names.get(case[:3], "loss/total")
        wanted = float(one_metrics[loss][0])
        assert metrics[loss][place] == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize("case", BY_CASE)
def test_x9_every_collective_waits_for_the_one_before_it(case):
    """Two at once take all threads of XLA's runtime for CPUs: the devices wait for each other until
    it ends them.
    """
    _, update = programs_of(case, CASES[case][3], 2)
    assert not collectives_beside_each_other(update)


def test_x8_no_orthogonal_matrix_is_made_for_several_seeds_at_once():
    """Several batched QR decompositions in one program deadlock for ever with jax 0.10 on a CPU."""
    for args in (small_args, small_rnn_args):
        init = init_over(args(num_seeds=4, num_devices=2), make_env("CartPole-v1"), 2)
        shapes = re.findall(r"f32\[([0-9,]+)\] = qr\[", str(jax.make_jaxpr(init)()))
        assert shapes and all(shape.count(",") == 1 for shape in shapes), shapes


def minibatches_over(num_devices, num_steps, num_envs, num_minibatches, epochs=2, seed=0):
    """Global (step, env) of every sample, [E, M, samples, 2] with the devices' parts one after the
    other.
    """
    local = num_envs // num_devices
    key = jax.random.key(seed)
    indices = over_devices(
        lambda: minibatch_indices(key, num_steps, local, epochs, num_minibatches),
        num_devices,
    )
    indices = np.moveaxis(np.asarray(indices), 0, 2)  # [E, M, D, samples]
    samples = np.stack(
        [indices // local, indices % local + local * np.arange(num_devices)[:, None]],
        axis=-1,
    )
    return samples.reshape(epochs, num_minibatches, -1, 2)


@pytest.mark.parametrize(
    "sizes",
    [
        (8, 16, 4),
        (8, 16, 16),
        (5, 16, 2),
    ],
    ids=str,
)
def test_x2_every_sample_is_in_one_minibatch_of_each_epoch_on_any_number_of_devices(sizes):
    num_steps, num_envs, num_minibatches = sizes
    width = block_width(num_steps, num_minibatches)
    one, *several = (
        minibatches_over(count, *sizes) for count in (1, 2, 8) if num_envs // width % count == 0
    )
    numbers = one @ [num_envs, 1]  # each sample as a number, [E, M, samples]
    for samples in several:
        assert_array_equal(np.sort(samples @ [num_envs, 1]), np.sort(numbers))
    for epoch in numbers:
        assert_array_equal(np.sort(epoch, axis=None), np.arange(num_steps * num_envs))
    for minibatch in one.reshape(-1, *one.shape[2:]):
        assert len(set(np.bincount(minibatch[:, 1] // width))) == 1, "an equal part of every block"
    assert not np.array_equal(one[0], one[1])
    assert not np.array_equal(one, minibatches_over(1, *sizes, seed=1))
    if sizes == (8, 16, 16):
        places = set(map(tuple, one[0, 0] % [num_steps, width]))
        assert len(places) > 1, "blocks are permuted independently"


def test_x2_many_steps_do_not_stay_in_the_order_of_time():
    """The earlier one of two neighbours in the shuffled order comes first in half of all cases."""
    order = minibatches_over(1, 65_536, 1, 1)[:, 0, :, 0]
    assert_array_equal(np.sort(order), [range(65_536)] * 2)
    is_later = np.diff(order) > 0
    assert np.mean(is_later) == pytest.approx(0.5, abs=0.03)


def test_x2_environment_ids_and_keys_are_global():
    init = init_over(small_args(hidden_sizes=(4,)), make_env("Toy"), 4)
    starts = to_host(init()).actors.seen.obs
    assert len(set(starts[0, :, 0])) == 16
    root = jax.random.fold_in(jax.random.key(3), 4)
    for devices in (1, 2, 8):
        local = 16 // devices
        ids = over_devices(lambda local=local: global_ids(local), devices)
        assert_array_equal(ids.ravel(), np.arange(16))
        keys = over_devices(
            lambda n=local: jax.random.key_data(rollout_keys(jax.random.key(3), 5, n)),
            devices,
        )
        by_step = np.moveaxis(np.asarray(keys), 0, 1)
        keys = by_step.reshape(5, 16, 2)  # [T, N, 2]
        all_keys = set(map(tuple, keys.reshape(-1, 2)))
        assert len(all_keys) == 5 * 16
        wanted = jax.random.key_data(jax.random.fold_in(root, 11))
        assert_array_equal(keys[4, 11], wanted)


ADAPTIVE = {
    "env": "Pendulum-v1",
    "normalize_obs": True,
    "lr_schedule": "kl-adaptive",
    "decorrelate": True,
}
ANNEALED = {"env_params": '{"max_steps_in_episode": 30}', "bptt_length": 4, "ent_fraction": 0.9}
# Epsilon, until the fifth update
FALLING = {"env_params": '{"max_steps_in_episode": 30}', "num_seeds": 2}
RINGS = {"num_seeds": 2}  # of 20 slots: wrapped once when it stops, and again at its end
RINGS |= {"recipe": "crossq", "critic_hidden_sizes": (9,), "normalize_rewards": True}
RUNS = {
    "ppo": (ppo, small_args, 128, 2 * 128, 10, 6, ADAPTIVE),
    "memory": (ppo_rnn, small_rnn_args, 128, 2 * 128, 10, 5, ANNEALED),  # stops between two rows
    "pqn": (pqn, small_pqn_args, 128, 2 * 128, 10, 3, FALLING),
    "sac": (sac, small_sac_args, 16, 7 * 16, 41, 24, RINGS),
    "dqn": (dqn, small_dqn_args, 16, 7 * 16, 41, 24, {"num_seeds": 2, "n_steps": 2}),
}


def check_runs(case, moved_to_four, tmp_path, monkeypatch):
    """All updates at once, or some (then logged, evaluated and saved) and the rest, on the same 2
    devices or on 4.
    """
    algorithm, small, update, chunk, updates, stop, flags = RUNS[case]
    flags = flags | {
        "total_timesteps": updates * update - 3,
        "log_interval": chunk,
        "eval_interval": 3 * chunk,
    }
    # No other test has nets of this size compiled
    flags = flags | {"num_devices": 2, "hidden_sizes": (9,)}

    def run(name, **more):
        return algorithm.train(small(**flags | more, run_dir=str(tmp_path / name)))

    with Watch(monkeypatch) as watch:
        whole = run("whole")
    end = updates * update
    assert watch.steps == sorted({*range(chunk, end, chunk), end})
    programs = [chunks for name, chunks in watch.compiled if "_fun" in str(name)]
    assert programs == [0, 0, 0], "init, update and evaluate, each once and before the first chunk"
    result = result_of(whole.run_dir)
    rows = metric_rows(whole.run_dir)
    assert whole.env_steps == result["env_steps"] == update * result["updates"] == end
    assert [
        row["env_steps"] for row in rows if {"params/norm", "loss/q1", "loss/q"} & row.keys()
    ] == watch.steps
    assert algorithm not in (sac, dqn) or rows[-1]["gradient_updates"] == [(end - 32) // 8] * 2

    part = run("part", stop_after=stop * update)
    assert part.status == "stopped"
    assert part.env_steps == stop * update
    shutil.copytree(part.run_dir, tmp_path / "other")
    same = algorithm.train(algorithm.Args.from_run(part.run_dir, quiet=True))
    assert same.status == "finished"
    assert same.env_steps == end
    assert same.run_dir == part.run_dir
    assert same.state_sha256 == whole.state_sha256 == result["state_sha256"] != part.state_sha256
    assert same_bits(same.params, whole.params)
    assert same.evaluation == whole.evaluation
    assert stop * update % chunk or metric_rows(part.run_dir) == rows
    with Watch(monkeypatch) as watch:
        another = run("another", seed=1, eval_interval=0)
    assert another.state_sha256 != whole.state_sha256
    assert watch.bytes[1] == watch.bytes[3], "memory grows from chunk to chunk"

    if moved_to_four:
        moved = algorithm.train(
            algorithm.Args.from_run(tmp_path / "other", quiet=True, num_devices=4)
        )
        assert relative_difference(whole.params, moved.params) < (
            1e-4 if algorithm in (sac, dqn) else 1e-5
        )
        assert result_of(moved.run_dir)["updates"] == updates


@pytest.mark.usefixtures("shared_programs")
@pytest.mark.parametrize("case", RUNS)
def test_x4_x5_x10_x11_a_run_counts_compiles_once_stays_small_and_resumes_exactly(
    case, tmp_path, monkeypatch
):
    check_runs(case, case == "memory", tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.usefixtures("users_compiler", "shared_programs")
@pytest.mark.parametrize("case", RUNS)
def test_x4_x5_x10_x11_hold_as_programs_are_compiled_for_users(case, tmp_path, monkeypatch):
    check_runs(case, case == "sac", tmp_path, monkeypatch)


class OracleCritic(nn.Module):
    """V = 100 id + step, so that a value tells which observation it is of."""

    args: ppo.Args
    obs_space: object

    def __call__(self, obs):
        return 100 * obs[..., 0] + obs[..., 1]


@pytest.mark.parametrize(
    ("num_seeds", "backend"),
    [
        (1, "cpu"),
        (1, "gpu"),
        pytest.param(3, "cpu", marks=pytest.mark.slow),
    ],
)
def test_x6_bootstrap_through_the_whole_update(monkeypatch, num_seeds, backend):
    """Several seeds are under vmap; a GPU computes values at time limits in another way, which a
    CPU can follow.
    """
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    args = small_args(num_seeds=num_seeds, hidden_sizes=(4,))
    for reward, value, next_value, terminated, truncated in calls_of_gae(
        monkeypatch,
        args,
        OracleCritic,
        2,
    ):
        episode = value // 100
        step = value % 100
        for kind, is_kind in enumerate(
            [terminated & ~truncated, truncated & ~terminated, terminated & truncated]
        ):
            assert is_kind.sum() > 5
            assert set(episode[is_kind] % 3) == {kind}
        assert_array_equal(reward, episode % 7 + 0.5 * (step + 1))
        # the value of the observation that truly follows: the same episode, one step on, never that
        # of a reset
        assert_array_equal(next_value[~terminated], value[~terminated] + 1)


class OracleQ(nn.Module):
    """An oracle of every action's value."""

    args: pqn.Args
    env: object
    num_actions: int

    @nn.compact
    def __call__(self, obs, first, memory):
        self.param("unused", nn.initializers.zeros, ())
        numbers = 100 * obs[..., :1] + obs[..., 1:]
        return jnp.repeat(numbers, self.num_actions, axis=-1), memory


@pytest.mark.parametrize("backend", ["cpu", pytest.param("gpu", marks=pytest.mark.slow)])
def test_x6_q_learning_bootstraps_from_what_truly_follows(monkeypatch, backend):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    for reward, next_value, terminated, _ in calls_of_gae(
        monkeypatch,
        small_pqn_args(),
        OracleQ,
        2,
    ):
        episode, step = (part[~terminated] for part in np.divmod(next_value, 100))
        assert_array_equal(reward[~terminated], episode % 7 + 0.5 * step)


@pytest.mark.slow
def test_what_is_learned_does_not_depend_on_the_scale_of_rewards():
    def learned(factor, **flags):
        env = make_env("Endings")
        advance = env.advance
        env.advance = lambda *inputs: (out := advance(*inputs))._replace(reward=factor * out.reward)
        state = run_updates(small_args(**flags), env, 2, 10)[0]
        return to_host(state).learner.params

    cases = (({}, (0, 1e-3)), ({"normalize_returns": False}, (0.1, np.inf)))
    for flags, allowed in cases:
        assert (
            allowed[0]
            <= relative_difference(learned(0.01, **flags), learned(100.0, **flags))
            < allowed[1]
        )


@pytest.mark.slow
@pytest.mark.usefixtures("users_compiler")
def test_every_seed_learns_cartpole_and_keeps_it(tmp_path):
    """Twelve with two fifths of the default steps; what 200 seeds do is in docs/ppo.md."""
    flags = {
        "num_seeds": 12,
        "seed": 500,
        "total_timesteps": 200_000,
        "eval_interval": 50_000,
        "eval_episodes": 16,
    }
    result = ppo.train(
        ppo.Args(**flags, quiet=True, checkpoint_interval=0, run_dir=str(tmp_path / "run"))
    )
    rows = [
        row["eval/return_mean"] for row in metric_rows(result.run_dir) if "eval/return_mean" in row
    ]
    assert len(rows) == 4
    assert min(rows[-1]) >= 495
    assert np.mean(rows[2]) > 480


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "env", "swept"),
    [
        (small_args, "BribedEndings", ("learning_rate=log:1e-3:1e-2", "env.bonus=uniform:-5:5")),
        (
            small_rnn_args,
            "BribedEndings",
            ("learning_rate=log:1e-3:1e-2", "env.bonus=uniform:-5:5"),
        ),
        (
            small_pqn_args,
            "BribedEndings",
            ("learning_rate=log:1e-3:1e-2", "env.bonus=uniform:-5:5"),
        ),
        (
            small_sac_args,
            "Pendulum-v1",
            ("q_lr=log:1e-3:1e-2", "alpha=uniform:0.05:0.5", "env.g=log:3:30"),
        ),
        (
            small_dqn_args,
            "BribedEndings",
            ("learning_rate=log:1e-3:1e-2", "env.bonus=uniform:-5:5"),
        ),
    ],
    ids=["ppo", "memory", "pqn", "sac", "dqn"],
)
def test_x8_a_member_equals_the_single_run_with_its_values(args, env, swept):
    """In flags and environment, with the flags that a population prints at its end; that no flag is
    taken from elsewhere than the learner is traced in test_flags.py.
    """
    population = args(population=2, sweep=swept, seed=5)
    together, _ = run_updates(
        population,
        run_env(population, make_env(env)),
        2,
        3,
    )
    single = args(**flags_alone(population.flags_of_members()[1]))
    assert single.env_params == population.env_params, "as that is what evaluations have"
    alone, _ = run_updates(
        single,
        run_env(single, make_env(env)),
        2,
        3,
    )
    others, ours = (jax.tree.map(lambda x, i=i: x[i][None], to_host(together)) for i in range(2))
    assert relative_difference(to_host(alone).learner.params, ours.learner.params) < 1e-4
    assert relative_difference(to_host(alone).learner.params, others.learner.params) > 0.01
