"""Soft Actor-Critic (Haarnoja et al. 2018), data-parallel over every device; docs/sac.md explains this file.

python algos/sac_pmap.py --env Pendulum-v1
python algos/sac_pmap.py --help
"""

import math
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.cli.checks import AdamBeta, Count, Counts, Discount, Positive, Scale, Share, Steps, Temperature
from common.cli.command import main, parse
from common.cli.errors import UsageError
from common.cli.replay_flags import DeviceReplayArgs


@dataclass(kw_only=True)
class Args(DeviceReplayArgs):
    """Train SAC on a gymnax-style environment. All sizes are global: --num-envs 8 is 8 over all devices together."""

    env: str = "Pendulum-v1"
    total_timesteps: Steps = 15_000
    num_envs: Count = 1

    # optimiser
    policy_lr: Positive = 3e-4
    """Adam's learning rate of the policy."""
    q_lr: Positive = 1e-3
    """Adam's learning rate of the Q functions and of the temperature."""
    adam_b1: AdamBeta = 0.9
    """Adam's beta1."""
    adam_b2: AdamBeta = 0.999
    """Adam's beta2."""
    policy_frequency: Count = 1
    """Updates of the Q functions per update of policy and temperature."""
    target_frequency: Count = 1
    """Updates of the Q functions per update of the target networks."""

    # loss
    gamma: Discount = 0.99
    """Discount factor."""
    tau: Share = 0.005
    """Polyak averaging coefficient of the target networks."""
    autotune: bool = True
    """Automatic tuning of the temperature, towards the target entropy."""
    alpha: Temperature = 0.2
    """Entropy temperature: its first value with --autotune, else that of the whole run."""
    target_entropy_scale: Scale | None = None
    """Target entropy, in units of -|A| for Box actions (default: 1), of log n for n discrete ones (default: 0.5)."""

    # normalisation
    normalize_obs: bool = False
    """Normalisation of observations by the mean and standard deviation of all stored so far."""

    # network
    critic_layer_norm: bool = False
    """Layer normalisation in the Q functions, which allows for a --utd-ratio well above 1."""
    activation: Literal["tanh", "relu", "swish", "gelu"] = "relu"
    """Activation of the hidden layers."""
    hidden_sizes: Counts = (256, 256)
    """Widths of the hidden layers of the policy and of each Q function."""

    def __post_init__(self):
        super().__post_init__()
        if self.target_entropy_scale is not None and not self.autotune:
            raise UsageError("--target-entropy-scale needs --autotune: with --no-autotune nothing steers to it")


if __name__ == "__main__":
    ARGS = parse(Args)  # before the slow imports: --help and usage errors answer at once

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import struct

from common.device.episodes import EpisodeTracker, RecentEpisodes, count_episodes, new_recent, new_tracker
from common.device.hyper import hyper_of
from common.device.programs import Algorithm, TrainState
from common.device.reductions import Tally, across_devices
from common.device.replay import Replay, check_memory, new_replay, num_groups
from common.device.sampling import keys_of, split_keys
from common.device.seeds import same_for_all_seeds
from common.device.sharding import AXIS, flat_pmean, same_on_all_devices, varying_like
from common.device.stepping import reset_envs, step_envs
from common.device.update_loop import do_where, repeat_and_add
from common.envs.environment import Env
from common.envs.masks import largest_entropy, legal_actions, legal_metrics
from common.envs.privileged import for_policies
from common.envs.requirements import need_fitting_spaces, need_squashable_actions
from common.envs.spaces import Discrete, Space, batch_shape, zeros
from common.envs.spec import EnvSpec
from common.envs.unit_actions import empty_action, to_env, uniform_action
from common.envs.varied import for_member
from common.nets.distributions import LOG_2PI, Categoricals, Normal, action_noise
from common.nets.normalizers import merge, normalize, obs_stats
from common.nets.torso import MLP, Features
from common.training import Callback, TrainResult, train_on_devices

LOG_STD_MIN, LOG_STD_MAX = -5.0, 2.0
ENVS_PER_CPU_DEVICE = math.inf  # a single CPU device uses all cores for these networks; more only wait for each other

# ---------------------------------------------------------------------------------------------------------- networks


class SquashedNormal(NamedTuple):
    """The policy for Box actions: tanh of a normal. Actions here are within -1 .. 1, and flat, [..., A]."""

    mean: jax.Array  # [..., A] of the normal
    log_std: jax.Array  # [..., A]

    def sample(self, noise: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Actions from standard normal `noise` [..., A], and their log-probabilities [...], densities within -1 .. 1.

        The change of variables is taken at the unsquashed u, as 1 - tanh(u)^2 = 4 exp(-2u) / (1 + exp(-2u))^2: exact
        where tanh(u) rounds to 1.
        """
        u = self.mean + jnp.exp(self.log_std) * noise
        normal = -0.5 * (noise**2 + LOG_2PI) - self.log_std
        slope = 2 * (math.log(2) - u - jax.nn.softplus(-2 * u))
        return jnp.tanh(u), jnp.sum(normal - slope, axis=-1)

    def mode(self) -> jax.Array:
        return jnp.tanh(self.mean)

    def kl(self, other: "SquashedNormal") -> jax.Array:
        """KL(self || other) in nats, [...]: squashing both alike does not change it."""
        return Normal(self.mean, self.log_std).kl(Normal(other.mean, other.log_std))


class Actor(nn.Module):
    """The policy: a distribution over actions."""

    args: Args
    obs_space: Space
    action_space: Space

    @nn.compact
    def __call__(self, obs: jax.Array) -> Categoricals | SquashedNormal:
        args, layer = self.args, {"dtype": self.args.dtype}
        x = MLP(args.hidden_sizes, args.activation, layer)(Features(self.obs_space, args.activation, layer)(obs))
        if isinstance(self.action_space, Discrete):
            policy = Categoricals(nn.Dense(self.action_space.n)(x), self.action_space.nvec, scalar=True)
            return policy.only(legal_actions(obs))
        mean, log_std = jnp.split(nn.Dense(2 * math.prod(self.action_space.shape))(x), 2, axis=-1)
        log_std = LOG_STD_MIN + 0.5 * (LOG_STD_MAX - LOG_STD_MIN) * (jnp.tanh(log_std) + 1)
        return SquashedNormal(mean, log_std)


class Critics(nn.Module):
    """Both Q functions: [2, B] of a Box action, or [2, B, n] of all discrete actions."""

    args: Args
    obs_space: Space
    action_space: Space

    @nn.compact
    def __call__(self, obs: jax.Array, action: jax.Array | None = None) -> jax.Array:
        return jnp.stack([self.one(obs, action) for _ in range(2)])

    def one(self, obs: jax.Array, action: jax.Array | None) -> jax.Array:
        args, layer = self.args, {"dtype": self.args.dtype}
        x = Features(self.obs_space, args.activation, layer)(obs)
        layers = MLP(args.hidden_sizes, args.activation, layer, args.critic_layer_norm)
        if isinstance(self.action_space, Discrete):
            return nn.Dense(self.action_space.n)(layers(x))
        return nn.Dense(1)(layers(jnp.concatenate([x, action], axis=-1)))[..., 0]


# ----------------------------------------------------------------------------------------------------------- records


class Params(NamedTuple):
    actor: Any
    critics: Any
    targets: Any  # slowly following `critics`
    log_alpha: jax.Array  # [] logarithm of the temperature


class OptStates(NamedTuple):
    actor: optax.OptState
    critics: optax.OptState
    log_alpha: optax.OptState


class Learner(struct.PyTreeNode):
    """What is identical on every device."""

    params: Params
    opt_states: OptStates
    hyper: dict[str, jax.Array]  # [] flags of its own, of a member of a population
    obs_stats: Any  # RunningStats of each part of observations, or None
    recent: RecentEpisodes
    key: jax.Array  # root of all randomness; never advanced, only folded
    updates: jax.Array  # [] updates done, each a step of every environment
    gradient_updates: jax.Array  # [] gradient updates done


class Transition(NamedTuple):
    """What the replay buffer keeps of a step."""

    obs: jax.Array
    action: jax.Array  # Box actions within -1 .. 1, flat
    reward: jax.Array
    terminated: jax.Array  # not set by a time limit
    next_obs: jax.Array  # the true next observation, also where a time limit struck


class Shard(struct.PyTreeNode):
    """This device's share of the running environments, N of them, and of the replay buffer."""

    env_state: Any  # [N, ...]
    obs: jax.Array  # [N, ...]
    tracker: EpisodeTracker  # [N]
    replay: Replay  # [N, C, ...]


# ------------------------------------------------------------------------------------------------------------- maths


def td_target(reward, terminated, next_q, next_entropy, alpha, gamma: float) -> jax.Array:
    """What the Q functions learn (Haarnoja et al. 2018b, eq. 2 and 3): reward, and the soft value of what follows."""
    return reward + gamma * jnp.where(terminated, 0.0, next_q + alpha * next_entropy)


def adam(learning_rate: float | jax.Array, hyper: Any) -> optax.GradientTransformation:
    """The optimizer (Kingma & Ba 2015), with the averages that `hyper` says."""
    return optax.adam(learning_rate, hyper.adam_b1, hyper.adam_b2)


def target_entropy(space: Space, scale: float | None) -> float:
    """Entropy in nats that --autotune steers to: -|A| for a Box, half of the largest one for discrete actions.

    That of a Box is of actions within -1 .. 1, as log-probabilities are: it means the same whatever the bounds.
    """
    if isinstance(space, Discrete):
        return (0.5 if scale is None else scale) * math.log(space.n)
    return -(1.0 if scale is None else scale) * math.prod(space.shape)


# --------------------------------------------------------------------------------------------------------- algorithm


def make_sac(args: Args, env: Env) -> Algorithm:
    """SAC for `env` as pure functions. Raises UsageError for spaces that it cannot act in."""
    need_fitting_spaces(args, env)
    need_squashable_actions(env, "algos/ppo_pmap.py")
    discrete = isinstance(env.action_space, Discrete)
    actor = Actor(args, for_policies(env.observation_space), env.action_space)
    critics = Critics(args, env.observation_space, env.action_space)
    scales = [scale for scale in args.values_of("target_entropy_scale") if scale is not None]
    if discrete and max(scales, default=0) > 1:
        raise UsageError(f"--target-entropy-scale {max(scales)}: no policy has more entropy than log n, scale 1")
    groups = num_groups(args.num_envs, args.batch_size)

    def update(state: TrainState) -> tuple[TrainState, Tally, Any]:
        """One step of every environment, and the gradient updates that are due after it."""
        learner, shard = state.learner, state.shard
        act_key, learn_key = jax.random.split(jax.random.fold_in(learner.key, learner.updates))

        shard, out, transition = collect(learner, shard, act_key)
        one_step = jax.tree.map(lambda x: x[None], out._replace(state=()))  # [1, N, ...]
        tracker, recent, episodes = count_episodes(shard.tracker, learner.recent, one_step, AXIS)
        shard = shard.replace(tracker=tracker, replay=shard.replay.add(transition))
        stats = merge(learner.obs_stats, jax.tree.map(lambda x: x[None], transition.obs), AXIS)
        learner = learner.replace(obs_stats=stats, recent=recent, updates=learner.updates + 1)
        learner, tally = learn(learner, shard.replay, learn_key)
        # Learning may meet a broken number long after it was stored: these show it at once, before it can be saved.
        magnitudes = [jnp.mean(jnp.abs(x * 1.0)) for x in jax.tree.leaves(transition.next_obs)]
        seen = {"env/reward": jnp.mean(out.reward), "env/obs_magnitude": sum(magnitudes) / len(magnitudes)}
        tally |= Tally.of(flat_pmean(seen) | legal_metrics(transition.obs, env.action_space, AXIS))
        return TrainState(learner, shard), tally, episodes

    def collect(learner: Learner, shard: Shard, key: jax.Array):
        """Step every environment once: at random until --learning-starts, then with the current policy."""
        num_envs = shard.tracker.ret.size
        policy_keys, env_keys = split_keys(keys_of(key, num_envs), 2)
        noise = jax.vmap(partial(action_noise, space=env.action_space))(policy_keys)
        policy = actor.apply(learner.params.actor, normalize(learner.obs_stats, shard.obs))
        action = policy.sample(noise) if discrete else policy.sample(noise)[0]
        # Below zero are keys that no update has; each serves for as long as an action is held.
        held = jax.random.fold_in(learner.key, -1 - learner.updates // args.hold_random)
        random = partial(uniform_action, space=env.action_space)
        random_action = jax.vmap(random)(keys_of(held, num_envs), legal=legal_actions(shard.obs))
        warming_up = learner.updates * args.num_envs < args.learning_starts
        action = jnp.where(warming_up, random_action, action)

        out = step_envs(for_member(env, learner.hyper), env_keys, shard.env_state, to_env(action, env.action_space))
        transition = Transition(shard.obs, action, out.reward, out.terminated, out.final_obs)
        return shard.replace(env_state=out.state, obs=out.obs), out, transition

    def learn(learner: Learner, replay: Replay, key: jax.Array) -> tuple[Learner, Tally]:
        """The gradient updates that are due after the newest transitions."""
        stored = same_on_all_devices(replay.added) * args.num_envs
        due = args.ratio.due(stored) - args.ratio.due(stored - args.num_envs)

        return repeat_and_add(partial(gradient_update, replay=replay, key=key), learner, due)

    def gradient_update(index: jax.Array, learner: Learner, replay: Replay, key: jax.Array) -> tuple[Learner, Tally]:
        """One step of both Q functions, of their targets, and, when it is due, of policy and temperature."""
        batch, next_noise, noise = draw(learner, replay, jax.random.fold_in(key, index))
        critic_params, opt_state, tally = update_critics(learner, batch, next_noise)
        targets = learner.params.targets
        done = same_for_all_seeds(learner.gradient_updates) + 1
        tau = jnp.where(done % args.target_frequency == 0, hyper_of(args, learner).tau, 0.0)
        targets = jax.tree.map(lambda old, new: old + tau * (new - old), targets, critic_params)
        learner = learner.replace(
            params=learner.params._replace(critics=critic_params, targets=targets),
            opt_states=learner.opt_states._replace(critics=opt_state),
            gradient_updates=done,
        )
        due = done % args.policy_frequency == 0
        learner, policy_tally = do_where(due, lambda learner: update_policy(learner, batch, noise), learner)
        return learner, tally | policy_tally

    def draw(learner: Learner, replay: Replay, key: jax.Array) -> tuple[Transition, jax.Array, jax.Array]:
        """This device's share B of a batch, and noise for actions after it and in it, [B, A]."""
        per_group = args.batch_size // groups
        keys = keys_of(key, groups // jax.lax.axis_size(AXIS))
        sample_keys, next_keys, noise_keys = split_keys(keys, 3)
        batch = replay.sample(sample_keys, per_group)
        obs, next_obs = (normalize(learner.obs_stats, x) for x in (batch.obs, batch.next_obs))
        batch = batch._replace(obs=obs, next_obs=next_obs)
        if discrete:  # expectations over all actions need no noise
            return batch, None, None
        normal = jax.vmap(lambda key: jax.random.normal(key, (per_group, *batch.action.shape[1:])))
        return batch, *(normal(keys).reshape(batch.action.shape) for keys in (next_keys, noise_keys))

    def update_critics(learner: Learner, batch: Transition, noise: jax.Array):
        """One gradient step of both Q functions; returns parameters, optimizer state and metrics."""
        params, hyper = learner.params, hyper_of(args, learner)
        next_q, next_entropy = soft_value(params.actor, params.targets, batch.next_obs, noise)
        target = td_target(batch.reward, batch.terminated, next_q, next_entropy, temperature(learner), hyper.gamma)

        def loss(critic_params):
            if discrete:
                q = critics.apply(critic_params, batch.obs)
                q = jnp.take_along_axis(q, batch.action[None, :, None], axis=-1)[..., 0]
            else:
                q = critics.apply(critic_params, batch.obs, batch.action)
            losses = jnp.mean(jnp.square(q - target), axis=-1)  # [2]
            means = jnp.mean(q, axis=-1)
            return jnp.sum(losses), {
                "loss/q1": losses[0],
                "loss/q2": losses[1],
                "q/mean1": means[0],
                "q/mean2": means[1],
                "q/target": jnp.mean(target),
                "q/td_error": jnp.mean(jnp.abs(q - target)),
            }

        grads, metrics = across_devices(*jax.grad(loss, has_aux=True)(varying_like(batch, params.critics)))
        changes, opt_state = adam(hyper.q_lr, hyper).update(grads, learner.opt_states.critics)
        metrics |= {"grad/q_norm": optax.global_norm(grads)}
        return optax.apply_updates(params.critics, changes), opt_state, Tally.of(metrics)

    def update_policy(learner: Learner, batch: Transition, noise: jax.Array) -> tuple[Learner, Tally]:
        """One gradient step of the policy and, with --autotune, of the temperature."""
        params, opt_states, hyper = learner.params, learner.opt_states, hyper_of(args, learner)
        alpha = temperature(learner)
        entropy_wanted = target_entropy(env.action_space, hyper.target_entropy_scale)
        legal = legal_actions(batch.obs)  # of fewer actions less entropy is wanted
        scale = entropy_wanted / math.log(env.action_space.n) if discrete else 1.0
        wanted = {} if legal is None else {"policy/target_entropy": scale * jnp.mean(largest_entropy(legal))}

        def loss(actor_params):
            q, entropy = soft_value(actor_params, params.critics, batch.obs, noise)
            value = -jnp.mean(q + alpha * entropy)
            return value, {"loss/policy": value, "policy/entropy": jnp.mean(entropy)} | wanted

        grads, metrics = across_devices(*jax.grad(loss, has_aux=True)(varying_like(batch, params.actor)))
        changes, actor_state = adam(hyper.policy_lr, hyper).update(grads, opt_states.actor)
        params = params._replace(actor=optax.apply_updates(params.actor, changes))
        opt_states = opt_states._replace(actor=actor_state)
        if args.autotune:  # the gradient of log_alpha * (entropy - entropy_wanted)
            gradient = metrics["policy/entropy"] - metrics.get("policy/target_entropy", entropy_wanted)
            change, alpha_state = adam(hyper.q_lr, hyper).update(gradient, opt_states.log_alpha)
            params = params._replace(log_alpha=params.log_alpha + change)
            opt_states = opt_states._replace(log_alpha=alpha_state)
        metrics |= {"policy/alpha": alpha, "grad/policy_norm": optax.global_norm(grads)}
        return learner.replace(params=params, opt_states=opt_states), Tally.of(metrics)

    def temperature(learner: Learner) -> jax.Array:
        return jnp.exp(learner.params.log_alpha) if args.autotune else jnp.float32(hyper_of(args, learner).alpha)

    def soft_value(actor_params, critic_params, obs, noise) -> tuple[jax.Array, jax.Array]:
        """The smaller Q of the policy's actions [B], and the policy's entropy [B], both in expectation."""
        policy = actor.apply(actor_params, obs)
        if discrete:
            q = jnp.min(critics.apply(critic_params, obs), axis=0)  # [B, n]
            return jnp.sum(jax.nn.softmax(policy.logits) * q, axis=-1), policy.entropy()
        action, log_prob = policy.sample(noise)
        return jnp.min(critics.apply(critic_params, obs, action), axis=0), -log_prob

    def init(seed: jax.Array, hyper=None) -> TrainState:
        params_key, envs_key, key = jax.random.split(jax.random.key(seed), 3)
        num_envs = args.num_envs // jax.lax.axis_size(AXIS)
        obs, env_state = reset_envs(for_member(env, hyper), keys_of(envs_key, num_envs))
        tracker, replay = new_tracker(env, num_envs), new_replay(example_transition(env), num_envs, args.capacity)
        return TrainState(new_learner(params_key, key, hyper), Shard(env_state, obs, tracker, replay))

    def new_learner(params_key: jax.Array, key: jax.Array, hyper=None) -> Learner:
        hyper = hyper or {}
        example = example_transition(env)
        obs, action = jax.tree.map(lambda x: x[None], (example.obs, example.action))
        actor_key, critics_key = jax.random.split(params_key)
        critic_params = critics.init(critics_key, obs, action)
        log_alpha = jnp.log(jnp.float32(hyper.get("alpha", args.alpha)))
        params = Params(actor.init(actor_key, obs), critic_params, critic_params, log_alpha)
        return Learner(
            params=params,
            opt_states=OptStates(*map(adam(args.q_lr, args).init, (params.actor, critic_params, log_alpha))),
            hyper=hyper,
            obs_stats=obs_stats(env.observation_space) if args.normalize_obs else None,
            recent=new_recent(env),
            key=key,
            updates=jnp.int32(0),
            gradient_updates=jnp.int32(0),
        )

    def act(learner: Learner, obs: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Actions [B, ...] for raw observations [B, ...]: sampled with a key, else the most likely ones."""
        policy = actor.apply(learner.params.actor, normalize(learner.obs_stats, obs))
        if key is None:
            return to_env(policy.mode(), env.action_space)
        action = policy.sample(action_noise(key, env.action_space, batch_shape(obs)))
        return to_env(action if discrete else action[0], env.action_space)

    def gauges(state: TrainState) -> dict[str, jax.Array]:
        """How things stand at the end of an interval."""
        learner, replay = state.learner, state.shard.replay
        learned_from = learner.updates * args.num_envs - args.learning_starts
        fill = jnp.mean(jnp.where(replay.filled == replay.capacity, 1.0, replay.filled / replay.capacity))
        return {
            "gradient_updates": learner.gradient_updates,
            "replay/fill": same_on_all_devices(fill),
            "replay/ratio": learner.gradient_updates / jnp.maximum(learned_from, 1),
        }

    return Algorithm(init, update, new_learner, act, gauges)


make_algorithm = make_sac  # the name by which `load_policy` knows it


def example_transition(env: EnvSpec) -> Transition:
    """One transition of zeros, which says what the replay buffer has to hold."""
    obs = zeros(env)
    return Transition(obs, empty_action(env.action_space), jnp.float32(0), jnp.bool_(False), obs)


# --------------------------------------------------------------------------------------------------------------- run


def train(args: Args, env: Any = None, callback: Callback | None = None) -> TrainResult:
    """Train as the command line does, also on an environment object or with a callback; see `train_on_devices`."""

    def replay_note(env: Env, devices: list[jax.Device]) -> dict[str, str]:
        return {"replay": check_memory(args, jax.eval_shape(lambda: example_transition(env)), devices)}

    return train_on_devices(
        args, __file__, make_sac, env, replay_note, callback, envs_per_cpu_device=ENVS_PER_CPU_DEVICE
    )


if __name__ == "__main__":
    sys.exit(main(train, ARGS))
