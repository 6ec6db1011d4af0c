"""SAC with actors: what its buffer holds, how often it learns, and whole runs on toy
environments.
"""

import itertools
from fractions import Fraction
from pathlib import Path
from typing import Any

import host_helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sac_pmap as sac
from helpers import (
    collectives_beside_each_other,
    compiled_updates,
    metric_rows,
    relative_difference,
    same_bits,
)
from host_helpers import BOX, TOY, TOYS, made_up, rows_with, states_of
from numpy.testing import assert_array_equal

from pmaprl.actors.batches import over_learners
from pmaprl.actors.threads import HostRollout
from pmaprl.device.interface import PolicyInput
from pmaprl.device.sharding import AXIS
from pmaprl.device.state import TrainState, to_host
from pmaprl.policy import load_policy

SMALL = host_helpers.SMALL | {
    "env": BOX,
    "envs_per_actor": 4,
    "batch_size": 16,
    "buffer_size": 512,
    "learning_starts": 64,
    "utd_ratio": 0.25,
    "total_timesteps": 10 * 2 * 8 * 4,
    "log_interval": 64,
}


def small_args(**flags: Any) -> sac.Args:
    return sac.Args(**SMALL | flags)


class Lab(host_helpers.Lab):
    def __init__(self, **flags: Any):
        super().__init__(sac, small_args(**flags))
        self.init = jax.jit(jax.vmap(self.driver.init, axis_name=AXIS))

    def rollout(self, seed: int, final_obs: bool = False, valid: float = 0.9) -> HostRollout:
        """Observations are numbers that no other has."""
        rng = np.random.default_rng(seed)
        steps = self.args.num_steps
        envs = self.args.envs_per_actor
        numbers_of_steps = np.arange((steps + 1) * envs * 2, dtype=np.float32)
        numbers = 1e6 * seed + numbers_of_steps.reshape(
            steps + 1,
            envs,
            2,
        )
        discrete = self.args.env == TOY
        shape = (steps, envs)
        kept = (
            rng.integers(0, 3, shape).astype(np.int32)
            if discrete
            else rng.uniform(-1, 1, (*shape, 4))
        )
        final = -numbers[1:].astype(np.float32) if final_obs else None
        return made_up(
            seed,
            numbers,
            valid,
            action=kept,
            extras=kept if discrete else kept.astype(np.float32),
            final_obs=final,
        )

    def updated(self, *batches: tuple[HostRollout, ...], devices: int = 1) -> TrainState:
        """The state on the host after learning from these, one after another."""
        state = self.init(jnp.zeros(devices, int))
        for rollouts in batches:
            state, published, _ = self.step(state, over_learners(rollouts, devices))
        self.warming_up = bool(published[1][0])
        return to_host(jax.tree.map(lambda x: x[:, None], state))


def stored(state: TrainState) -> np.ndarray:
    """List what the buffer holds, as rows of everything in a transition, sorted."""
    replay = jax.tree.map(lambda x: x[0], state.actors.replay)
    filled = np.minimum(replay.count, replay.data.reward.shape[1])
    held = np.arange(replay.data.reward.shape[1]) < filled[:, None]
    columns = (np.asarray(x)[held] for x in jax.tree.leaves(replay.data))
    return sorted_rows(*columns)


def sorted_rows(*columns: np.ndarray) -> np.ndarray:
    flat = [column.reshape(len(column), -1).astype(np.float64) for column in columns]
    rows = np.concatenate(
        flat,
        axis=1,
    )
    return rows[np.lexsort(rows.T)]


# --------------------------------------------------------------------------------------------------
# the buffer


@pytest.mark.parametrize(("final_obs", "slots"), [(False, 64), (True, 10)])
def test_the_buffer_has_the_newest_valid_steps_with_their_true_next_observations(final_obs, slots):
    """Also at time limits, and at the border of two rollouts; steps that only reset never enter
    it.
    """
    lab = Lab(buffer_size=8 * slots)  # a ring for each of two times four environments
    rollouts = [lab.rollout(seed, final_obs) for seed in range(4)]
    wanted = []
    for place, env in np.ndindex(2, 4):
        parts = []
        for rollout in rollouts[place::2]:
            next_obs = rollout.final_obs if final_obs else rollout.obs[1:]
            columns = (
                rollout.obs[:-1],
                rollout.extras,
                rollout.reward,
                rollout.terminated,
                next_obs,
                rollout.version,
            )
            parts.append([x[:, env][rollout.valid[:, env]] for x in columns])
        wanted.append([np.concatenate(x)[-slots:] for x in zip(*parts, strict=True)])
    assert slots == 64 or sum(len(one[2]) == slots for one in wanted) > 4, "most rings are full"
    state = lab.updated(tuple(rollouts[:2]), tuple(rollouts[2:]))
    assert_array_equal(stored(state), sorted_rows(*map(np.concatenate, zip(*wanted, strict=True))))
    assert state.run.env_steps[0] == sum(rollout.valid.sum() for rollout in rollouts)


NORMALISED = {
    "normalize_obs": True,
    "normalize_rewards": True,
    "critic_norm": "renorm",
    "actor_norm": "batch",
}


@pytest.mark.slow
@pytest.mark.parametrize("flags", [NORMALISED, {"env": TOY, "envs_per_actor": 8}], ids=str)
def test_any_number_of_devices_learns_the_same(flags):
    lab = Lab(**flags, utd_ratio=0.5, learning_starts=8)
    batches = [tuple(lab.rollout(seed + place) for place in range(2)) for seed in (0, 2, 4)]
    alone = lab.updated(*batches)
    for devices in (2, 4):
        for rollout in itertools.chain(*batches):  # steps that only reset mean nothing
            rollout.reward[~rollout.valid] += 100.0
        check_alike(alone, lab.updated(*batches, devices=devices))


def check_alike(state: TrainState, other: TrainState) -> None:
    assert state.run.gradient_updates[0] > 30
    assert relative_difference(state.learner.params, other.learner.params) < 1e-4
    assert_array_equal(stored(state), stored(other))


@pytest.mark.slow
def test_devices_of_two_processes_learn_the_same_from_whole_rollouts():
    """One process with two actor devices does so from halves of each."""
    flags = {
        "utd_ratio": 0.5,
        "learning_starts": 8,
        "batch_size": 16,
        "actor_threads": 1,
    }
    one = Lab(**flags, actor_devices="0,1")
    two = Lab(**flags, distributed="a:1,0/2")
    batches = [tuple(one.rollout(seed + place) for place in range(2)) for seed in (0, 2, 4)]
    side_by_side = [
        (jax.tree.map(lambda *x: np.concatenate(x, axis=1), *rollouts),) for rollouts in batches
    ]
    check_alike(one.updated(*batches, devices=2), two.updated(*side_by_side, devices=2))


def test_the_ratio_to_valid_steps_is_exact(ratio=2.3):
    lab = Lab(utd_ratio=ratio, learning_starts=40)
    batches = [
        (lab.rollout(seed, valid=0.5), lab.rollout(100 + seed, valid=0.9)) for seed in range(4)
    ]
    steps = 0
    for count, batch in enumerate(batches, 1):
        steps += sum(rollout.valid.sum() for rollout in batch)
        run = lab.updated(*batches[:count]).run
        learning_steps = max(int(steps) - 40, 0)
        assert run.gradient_updates[0] == int(Fraction(str(ratio)) * learning_steps)
        assert run.updates[0] == count  # which batches and noise are drawn by
        assert lab.warming_up == (steps < 40), "whether actors still act at random"


# --------------------------------------------------------------------------------------------------
# runs


def train(folder: Path, **flags: Any):
    return sac.train(small_args(run_dir=str(folder), **flags))


def test_lockstep_repeats_and_counts_every_step(tmp_path):
    one = train(tmp_path / "a", lockstep=True, normalize_obs=True)
    other = train(tmp_path / "b", lockstep=True, normalize_obs=True)
    assert one.state_sha256 == other.state_sha256
    rows = rows_with("replay/stored", tmp_path / "a")  # the last has an evaluation only
    assert len(rows) == 10
    for row in rows:
        assert row["replay/stored"] == row["env_steps"]  # the toys reset within the step
        assert row["gradient_updates"] == max(row["env_steps"] - 64, 0) // 4
    policy = load_policy(tmp_path / "a")
    assert np.isfinite(policy(np.zeros((3, 2)))).all()


TERMINATING = {
    "env_params": '{"terminates": true}',
    "learner_devices": "0,1",
    "vectorization": "async",
}


@pytest.mark.parametrize(
    "flags",
    [
        {"env_params": '{"raise_at": 20}', "max_restarts": 100},
        pytest.param(TERMINATING, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_buffer_of_a_run_has_steps_as_the_environments_took_them(flags, tmp_path, monkeypatch):
    """The toys observe their episode and their step, which is the limit of seven at the end."""
    states = states_of(monkeypatch, "finish")
    updates = compiled_updates(monkeypatch)
    train(tmp_path, **flags)
    if "learner_devices" in flags:
        assert not collectives_beside_each_other(updates[0])
    replay = jax.tree.map(
        lambda x: x.reshape(-1, *x.shape[3:]),
        to_host(states[0]).actors.replay.data,
    )
    there = replay.next_obs[:, 1] > 0  # slots that are not in use have zeros
    assert there.sum() == 512
    (episode, step), (next_episode, next_step) = replay.obs[there].T, replay.next_obs[there].T
    assert_array_equal(next_episode, episode)
    assert_array_equal(next_step, step + 1)
    assert set(next_step) == set(range(1, 8))
    assert_array_equal(replay.terminated[there], (next_step == 7) & ("terminates" in str(flags)))


def test_a_resumed_run_has_its_exact_learner_and_buffer_without_another_warm_up(tmp_path):
    part = train(tmp_path, lockstep=True, stop_after=320)
    kept = sac.train(sac.Args.from_run(tmp_path, env=BOX, stop_after=320))
    assert same_bits(*(jax.tree.leaves(result.params) for result in (part, kept)))
    assert kept.state_sha256 == part.state_sha256
    longer = sac.train(sac.Args.from_run(tmp_path, env=BOX))
    row = rows_with("replay/stored", tmp_path)[-1]
    assert row["replay/stored"] == longer.env_steps == 640
    assert row["gradient_updates"] == (640 - 64) // 4


@pytest.mark.slow
@pytest.mark.parametrize("toy", ["ImageToy", "DictToy"])
def test_images_and_parts_with_masks(toy, tmp_path):
    """No illegal action is taken, whether at random, by the policy, or in evaluations."""
    result = train(tmp_path, env=f"{TOYS}{toy}-v0")
    leaves = jax.tree.leaves(result.params)
    assert all(np.isfinite(x).all() for x in leaves)
    assert (
        min(row["episode/return_min"] for row in metric_rows(tmp_path) if row.get("episode/count"))
        >= 0
    )
    assert result.evaluation["eval/return_min"][0] >= 0


def test_actions_are_uniform_and_held_at_first():
    lab = Lab(envs_per_actor=256, buffer_size=10**5, hold_random=3)
    learner, run = lab.driver.begin(jax.random.key(0), jax.random.key(1))
    key = jax.random.key_data(jax.random.key(2))
    seen = PolicyInput.at_start(np.zeros((256, 2), np.float32))
    published = lab.driver.publish(learner, run)
    outputs = [
        lab.driver.act_on_host(published, (), key, jnp.uint32(step), seen) for step in range(5)
    ]
    first = outputs[0][0]
    actions = [kept for _, kept, _ in outputs]
    are_equal = [(a == b).all() for a, b in itertools.pairwise(actions)]
    assert are_equal == [True, True, False, True]
    assert len(np.unique(actions[0])) > 1000, "of each environment others"
    assert abs(np.mean(actions[0])) < 0.1
    assert 0.5 < np.std(actions[0]) < 0.65
    assert np.abs(actions[0]).max() <= 1
    assert first.shape == (256, 4) and -2 <= first.min() < -1.9 and 0.9 < first.max() <= 1, (
        "the toy's Box"
    )
    learned = lab.driver.publish(learner, run.replace(env_steps=jnp.int32(64)))
    others = lab.driver.act_on_host(learned, (), key, jnp.uint32(0), seen)[1]
    assert np.abs(others - actions[0]).max() > 0.1
