"""Soft Actor-Critic (Haarnoja et al. 2018), data-parallel over every device; docs/sac.md explains this file.

python algos/sac_pmap.py --env Pendulum-v1
python algos/sac_pmap.py --help
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.cli.checks import Count, check
from common.cli.command import main, parse
from common.cli.errors import UsageError
from common.cli.flags import DeviceEnvArgs


@dataclass(kw_only=True)
class Args(DeviceEnvArgs):
    """Train SAC on a gymnax-style environment. All sizes are global: --num-envs 8 is 8 over all devices together."""

    env: str = "Pendulum-v1"
    """Environment: a gymnax id, or package.module:factory importable from the working directory."""
    total_timesteps: Count = 15_000
    """Environment steps to train for, rounded up to whole steps of all environments."""
    num_envs: Count = 1
    """Parallel environments."""
    log_interval: Count = 1_000
    """Environment steps between log rows."""
    eval_interval: Count = 5_000
    """Environment steps between greedy evaluations; 0 evaluates at the end only."""
    checkpoint_interval: Count = 5_000
    """Environment steps between checkpoints; 0 saves at the end only."""

    buffer_size: Count = 1_000_000
    """Transitions that the replay buffer holds."""
    save_buffer: bool = True
    """Save the replay buffer in checkpoints; without it a resumed run first refills to --learning-starts."""
    learning_starts: Count = 1_000
    """Environment steps with uniformly random actions before learning starts."""
    hold_random: Count = 1
    """Steps of an environment for which a random action before --learning-starts is held; more reach further."""
    utd_ratio: float = 1.0
    """Gradient updates per environment step, exactly; fractions too."""
    batch_size: Count = 256
    """Transitions per gradient update."""
    policy_lr: float = 3e-4
    """Adam step size of the policy."""
    q_lr: float = 1e-3
    """Adam step size of the Q functions and of the temperature."""
    gamma: float = 0.99
    """Discount factor."""
    tau: float = 0.005
    """Share of the Q functions that moves into their targets (Polyak averaging)."""
    policy_frequency: Count = 1
    """Gradient updates of the Q functions per update of policy and temperature."""
    target_frequency: Count = 1
    """Gradient updates of the Q functions per update of their targets."""
    autotune: bool = True
    """Adapt the temperature to the target entropy."""
    alpha: float = 0.2
    """Temperature: where --autotune begins, or for the whole run with --no-autotune."""
    target_entropy_scale: float | None = None
    """Target entropy over -|A| for Box actions (default 1), over log n for n discrete ones (default 0.5)."""
    critic_layer_norm: bool = False
    """Layer normalisation in the Q functions, which allows a --utd-ratio well above 1."""
    activation: Literal["tanh", "relu", "swish", "gelu"] = "relu"
    """Activation of the hidden layers."""
    hidden_sizes: tuple[int, ...] = (256, 256)
    """Widths of the hidden layers of the policy and of each Q function."""

    @property
    def steps_per_update(self) -> int:
        """An update is one step of every environment and the gradient updates that belong to it."""
        return self.num_envs

    @property
    def block(self) -> int:
        """Neighbouring environments that contribute to a batch together; no device boundary cuts them."""
        return self.num_envs // math.gcd(self.num_envs, self.batch_size)

    @property
    def fixed(self) -> tuple[str, ...]:
        return "seed", "learning_starts"

    @property
    def dispensable(self) -> tuple[str, ...]:
        return ("envs/replay/",)

    @property
    def unsaved(self) -> tuple[str, ...]:
        return () if self.save_buffer else self.dispensable

    @property
    def ratio(self) -> Fraction:
        """--utd-ratio as the fraction that was meant: 0.3 is 3/10."""
        return Fraction(str(self.utd_ratio))

    @property
    def capacity(self) -> int:
        """Slots of the replay buffer for each environment."""
        return self.buffer_size // self.num_envs

    def gradient_updates(self, transitions):
        """Gradient updates due in all once a buffer has been given so many `transitions`; an integer or an array."""
        numerator, denominator = self.ratio.as_integer_ratio()
        learned = transitions - self.learning_starts
        learned = learned * (learned > 0)
        return learned // denominator * numerator + learned % denominator * numerator // denominator

    def sizes(self, num_devices: int) -> list[str]:
        """The derived sizes, for the header of a run."""
        updates = self.gradient_updates(self.num_updates * self.num_envs)
        return [
            f"{self.num_envs} envs ({self.num_envs // num_devices} per device), {updates:,} gradient updates "
            f"with batches of {self.batch_size} ({self.batch_size // num_devices} per device)"
        ]

    def __post_init__(self):
        super().__post_init__()
        largest = 2**31 - 1  # counts are 32 bit integers on the devices
        sizes = "hold_random batch_size policy_frequency target_frequency hidden_sizes"
        check(self, sizes, at_least=1, at_most=largest)
        check(self, "learning_starts", at_least=0)
        check(self, "policy_lr q_lr utd_ratio", above=0)
        check(self, "alpha", at_least=1e-8)
        check(self, "gamma", at_least=0, at_most=1)
        check(self, "tau", above=0, at_most=1)
        if self.buffer_size < self.num_envs:
            raise UsageError(
                f"--buffer-size {self.buffer_size} is less than one transition for each of --num-envs {self.num_envs}"
            )
        check(self, "target_entropy_scale")
        if self.target_entropy_scale is not None and not self.autotune:
            raise UsageError("--target-entropy-scale needs --autotune: with --no-autotune nothing steers to it")
        numerator, denominator = self.ratio.as_integer_ratio()
        if numerator * denominator > largest:
            raise UsageError(
                f"--utd-ratio {self.utd_ratio} is too fine to count exactly: round it to four digits or fewer"
            )
        if self.num_updates * self.num_envs > largest:
            raise UsageError(f"--total-timesteps must be at most {largest}, got {self.total_timesteps}")
        if self.gradient_updates(self.num_updates * self.num_envs) > largest:
            raise UsageError(f"--utd-ratio {self.utd_ratio} asks for more than {largest} gradient updates")
        if self.learning_starts >= self.total_timesteps:
            raise UsageError(
                f"--learning-starts {self.learning_starts} leaves nothing of --total-timesteps {self.total_timesteps}"
            )


if __name__ == "__main__":
    ARGS = parse(Args)  # before the slow imports: --help and usage errors answer at once

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from common.device.averages import Averages, zeros_of
from common.device.devices import choose_devices
from common.device.episodes import EpisodeTracker, RecentEpisodes, new_recent, new_tracker, recent_metrics, track
from common.device.evaluation import Episodes, run_episodes
from common.device.replay import Replay, check_memory, new_replay, num_groups
from common.device.sampling import keys_of
from common.device.sharding import AXIS, flat_pmean, over_seeds, pmapped, same_for_all_seeds
from common.device.update_loop import repeat
from common.envs import spaces
from common.envs.environment import Env, make, wrap
from common.nets.convolutions import Convolutions
from common.nets.distributions import LOG_2PI, Categoricals, action_noise
from common.runs.run import Run, TrainResult

LOG_STD_MIN, LOG_STD_MAX = -5.0, 2.0
ENVS_PER_CPU_DEVICE = math.inf  # a single CPU device uses all cores for these networks; more only wait for each other

# ---------------------------------------------------------------------------------------------------------- networks


class SquashedNormal(NamedTuple):
    """The policy for Box actions: tanh of a normal. Actions here are within -1 .. 1, and flat, [..., A]."""

    mean: jax.Array  # [..., A] of the normal
    log_std: jax.Array  # [..., A]
    scale: np.ndarray  # [A] half the width of the action space, which the density is over

    def sample(self, noise: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Actions from standard normal `noise` [..., A], and their log-probabilities [...].

        The change of variables is taken at the unsquashed u, as 1 - tanh(u)^2 = 4 exp(-2u) / (1 + exp(-2u))^2: exact
        where tanh(u) rounds to 1.
        """
        u = self.mean + jnp.exp(self.log_std) * noise
        normal = -0.5 * (noise**2 + LOG_2PI) - self.log_std
        slope = 2 * (math.log(2) - u - jax.nn.softplus(-2 * u)) + jnp.log(self.scale)
        return jnp.tanh(u), jnp.sum(normal - slope, axis=-1)

    def mode(self) -> jax.Array:
        return jnp.tanh(self.mean)


class Features(nn.Module):
    """An observation as a vector [B, F]; images pass through convolutions."""

    args: Args
    space: spaces.Space

    @nn.compact
    def __call__(self, obs: jax.Array) -> jax.Array:
        x = spaces.encode(obs, self.space)
        if not spaces.is_image(self.space):
            return x
        return Convolutions(getattr(nn, self.args.activation), {"dtype": self.args.dtype})(x)


class MLP(nn.Module):
    """The hidden layers."""

    args: Args
    layer_norm: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for width in self.args.hidden_sizes:
            x = nn.Dense(width, dtype=self.args.dtype)(x)
            x = nn.LayerNorm(dtype=self.args.dtype)(x) if self.layer_norm else x
            x = getattr(nn, self.args.activation)(x)
        return x


class Actor(nn.Module):
    """The policy: a distribution over actions."""

    args: Args
    obs_space: spaces.Space
    action_space: spaces.Space

    @nn.compact
    def __call__(self, obs: jax.Array) -> Categoricals | SquashedNormal:
        x = MLP(self.args)(Features(self.args, self.obs_space)(obs))
        if isinstance(self.action_space, spaces.Discrete):
            return Categoricals(nn.Dense(self.action_space.n)(x), self.action_space.nvec, scalar=True)
        scale = action_scale(self.action_space)[0]
        mean, log_std = jnp.split(nn.Dense(2 * scale.size)(x), 2, axis=-1)
        log_std = LOG_STD_MIN + 0.5 * (LOG_STD_MAX - LOG_STD_MIN) * (jnp.tanh(log_std) + 1)
        return SquashedNormal(mean, log_std, scale)


class Critics(nn.Module):
    """Both Q functions: [2, B] of a Box action, or [2, B, n] of all discrete actions."""

    args: Args
    obs_space: spaces.Space
    action_space: spaces.Space

    @nn.compact
    def __call__(self, obs: jax.Array, action: jax.Array | None = None) -> jax.Array:
        return jnp.stack([self.one(obs, action) for _ in range(2)])

    def one(self, obs: jax.Array, action: jax.Array | None) -> jax.Array:
        x = Features(self.args, self.obs_space)(obs)
        if isinstance(self.action_space, spaces.Discrete):
            return nn.Dense(self.action_space.n)(MLP(self.args, self.args.critic_layer_norm)(x))
        x = jnp.concatenate([x, action], axis=-1)
        return nn.Dense(1)(MLP(self.args, self.args.critic_layer_norm)(x))[..., 0]


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


class Envs(struct.PyTreeNode):
    """This device's share of the environments, N of them, and of the replay buffer."""

    state: Any  # [N, ...]
    obs: jax.Array  # [N, ...]
    tracker: EpisodeTracker  # [N]
    replay: Replay  # [N, C, ...]


class TrainState(struct.PyTreeNode):
    learner: Learner
    envs: Envs


class SAC(NamedTuple):
    """The algorithm as pure functions of one device, for `pmap`, `shard_map` or `vmap` with axis name `AXIS`."""

    init: Callable  # seeds [S] -> TrainState
    update: Callable  # TrainState, number of updates -> TrainState, metrics, first non-finite update of each metric
    evaluate: Callable  # TrainState -> Episodes [S, E]
    new_learner: Callable  # keys of the parameters and of everything random -> Learner
    act: Callable  # Learner, raw observations [B, ...], key or None for the best -> actions [B, ...]


# ------------------------------------------------------------------------------------------------------------- maths


def td_target(reward, terminated, next_q, next_entropy, alpha, gamma: float) -> jax.Array:
    """What the Q functions learn (Haarnoja et al. 2018b, eq. 2 and 3): reward, and the soft value of what follows."""
    return reward + gamma * jnp.where(terminated, 0.0, next_q + alpha * next_entropy)


def target_entropy(space: spaces.Space, scale: float | None) -> float:
    """Entropy in nats that --autotune steers to: -|A| for a Box, half of the largest one for discrete actions."""
    if isinstance(space, spaces.Discrete):
        return (0.5 if scale is None else scale) * math.log(space.n)
    return -(1.0 if scale is None else scale) * math.prod(space.shape)


def action_scale(space: spaces.Box) -> tuple[np.ndarray, np.ndarray]:
    """Factor and offset [A] that bring -1 .. 1 to the bounds of a Box."""
    low, high = np.ravel(space.low), np.ravel(space.high)
    return high / 2 - low / 2, high / 2 + low / 2


# --------------------------------------------------------------------------------------------------------- algorithm


def make_sac(args: Args, env: Env) -> SAC:
    """SAC for `env` as pure functions. Raises UsageError for spaces that it cannot act in."""
    check_actions(env)
    discrete = isinstance(env.action_space, spaces.Discrete)
    actor = Actor(args, env.observation_space, env.action_space)
    critics = Critics(args, env.observation_space, env.action_space)
    policy_optimizer, q_optimizer = optax.adam(args.policy_lr), optax.adam(args.q_lr)
    entropy_wanted = target_entropy(env.action_space, args.target_entropy_scale)
    if discrete and entropy_wanted > math.log(env.action_space.n):
        raise UsageError(
            f"--target-entropy-scale {args.target_entropy_scale}: no policy has more entropy than log n, scale 1"
        )
    groups = num_groups(args.num_envs, args.batch_size)

    def init(seeds: jax.Array) -> TrainState:
        """Fresh state for every seed [S] on this device."""
        return jax.lax.map(init_one, seeds)

    def update(state: TrainState, num_updates: jax.Array):
        """Run `num_updates` updates of all seeds; see `repeat` for what comes back."""

        def of_one_seed(state):
            state, metrics, broken = repeat(update_once, state, num_updates)
            return state, metrics | recent_metrics(state.learner.recent) | gauges(state), broken

        return over_seeds(of_one_seed, args.num_seeds)(state)

    def evaluate(state: TrainState) -> Episodes:
        """Greedy episodes of all seeds, this device's share of `eval_episodes`, [S, E]."""
        return over_seeds(evaluate_one, args.num_seeds)(state.learner)

    def init_one(seed: jax.Array) -> TrainState:
        params_key, envs_key, key = jax.random.split(jax.random.key(seed), 3)
        num_envs = args.num_envs // jax.lax.axis_size(AXIS)
        obs, env_state = jax.vmap(env.reset)(keys_of(envs_key, num_envs))
        replay = new_replay(example_transition(env), num_envs, args.capacity)
        envs = Envs(state=env_state, obs=obs, tracker=new_tracker(num_envs), replay=replay)
        return TrainState(new_learner(params_key, key), envs)

    def new_learner(params_key: jax.Array, key: jax.Array) -> Learner:
        example = example_transition(env)
        obs, action = (x[None] for x in (example.obs, example.action))
        actor_key, critics_key = jax.random.split(params_key)
        critic_params = critics.init(critics_key, obs, action)
        log_alpha = jnp.log(jnp.float32(args.alpha))
        params = Params(actor.init(actor_key, obs), critic_params, critic_params, log_alpha)
        return Learner(
            params=params,
            opt_states=OptStates(
                policy_optimizer.init(params.actor), q_optimizer.init(critic_params), q_optimizer.init(log_alpha)
            ),
            recent=new_recent(),
            key=key,
            updates=jnp.int32(0),
            gradient_updates=jnp.int32(0),
        )

    def update_once(state: TrainState):
        """One step of every environment, and the gradient updates that are due after it."""
        learner, envs = state.learner, state.envs
        act_key, learn_key = jax.random.split(jax.random.fold_in(learner.key, learner.updates))

        envs, reward, done, transition = collect(learner, envs, act_key)
        tracker, recent, episodes = track(envs.tracker, learner.recent, reward[None], done[None], AXIS)
        envs = envs.replace(tracker=tracker, replay=envs.replay.add(transition))
        learner = learner.replace(recent=recent, updates=learner.updates + 1)
        learner, averages = learn(learner, envs.replay, learn_key)
        # Learning may meet a broken number long after it was stored: these show it at once, before it can be saved.
        seen = {"env/reward": jnp.mean(reward), "env/obs_magnitude": jnp.mean(jnp.abs(transition.next_obs * 1.0))}
        return TrainState(learner, envs), averages | Averages.of(flat_pmean(seen)), episodes

    def collect(learner: Learner, envs: Envs, key: jax.Array):
        """Step every environment once: at random until --learning-starts, then with the current policy."""
        num_envs = envs.obs.shape[0]
        policy_keys, env_keys = jnp.moveaxis(jax.vmap(jax.random.split)(keys_of(key, num_envs)), 1, 0)
        noise = jax.vmap(partial(action_noise, space=env.action_space))(policy_keys)
        policy = actor.apply(learner.params.actor, envs.obs)
        action = policy.sample(noise) if discrete else policy.sample(noise)[0]
        # Below zero are keys that no update has; each serves for as long as an action is held.
        held = jax.random.fold_in(learner.key, -1 - learner.updates // args.hold_random)
        random_action = jax.vmap(partial(uniform_action, space=env.action_space))(keys_of(held, num_envs))
        warming_up = learner.updates * args.num_envs < args.learning_starts
        action = jnp.where(warming_up, random_action, action)

        out = jax.vmap(env.step)(env_keys, envs.state, to_env(action))
        transition = Transition(envs.obs, action, out.reward, out.terminated, out.final_obs)
        return envs.replace(state=out.state, obs=out.obs), out.reward, out.terminated | out.truncated, transition

    def learn(learner: Learner, replay: Replay, key: jax.Array) -> tuple[Learner, Averages]:
        """The gradient updates that are due after the newest transitions."""
        given = replay.given * args.num_envs
        due = args.gradient_updates(given) - args.gradient_updates(given - args.num_envs)

        def one(index, carry):
            learner, averages = carry
            learner, new = gradient_update(learner, replay, jax.random.fold_in(key, index))
            return learner, averages + new

        _, zeros = zeros_of(gradient_update, learner, replay, key)
        return jax.lax.fori_loop(0, due, one, (learner, zeros))

    @jax.jit  # traced once, although its shapes are asked for too
    def gradient_update(learner: Learner, replay: Replay, key: jax.Array) -> tuple[Learner, Averages]:
        """One step of both Q functions, of their targets, and, when it is due, of policy and temperature."""
        batch, next_noise, noise = draw(replay, key)
        critic_params, opt_state, averages = update_critics(learner, batch, next_noise)
        targets = learner.params.targets
        done = same_for_all_seeds(learner.gradient_updates) + 1
        tau = jnp.where(done % args.target_frequency == 0, args.tau, 0.0)
        targets = jax.tree.map(lambda old, new: old + tau * (new - old), targets, critic_params)
        learner = learner.replace(
            params=learner.params._replace(critics=critic_params, targets=targets),
            opt_states=learner.opt_states._replace(critics=opt_state),
            gradient_updates=done,
        )
        _, zeros = zeros_of(update_policy, learner, batch, noise)
        learner, policy_averages = jax.lax.cond(
            done % args.policy_frequency == 0,
            lambda learner: update_policy(learner, batch, noise),
            lambda learner: (learner, zeros),
            learner,
        )
        return learner, averages | policy_averages

    def draw(replay: Replay, key: jax.Array) -> tuple[Transition, jax.Array, jax.Array]:
        """This device's share B of a batch, and noise for actions after it and in it, [B, A]."""
        local_groups = groups // jax.lax.axis_size(AXIS)
        per_group = args.batch_size // groups
        keys = keys_of(key, local_groups)
        sample_keys, next_keys, noise_keys = jnp.moveaxis(jax.vmap(partial(jax.random.split, num=3))(keys), 1, 0)
        batch = replay.sample(sample_keys, per_group)
        if discrete:  # expectations over all actions need no noise
            return batch, None, None
        normal = jax.vmap(lambda key: jax.random.normal(key, (per_group, *batch.action.shape[1:])))
        return batch, *(normal(keys).reshape(batch.action.shape) for keys in (next_keys, noise_keys))

    def update_critics(learner: Learner, batch: Transition, noise: jax.Array):
        """One gradient step of both Q functions; returns parameters, optimizer state and metrics."""
        params = learner.params
        next_q, next_entropy = soft_value(params.actor, params.targets, batch.next_obs, noise)
        target = td_target(batch.reward, batch.terminated, next_q, next_entropy, temperature(params), args.gamma)

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

        grads, metrics = flat_pmean(jax.grad(loss, has_aux=True)(params.critics))
        changes, opt_state = q_optimizer.update(grads, learner.opt_states.critics)
        averages = Averages.of(metrics | {"grad/q_norm": optax.global_norm(grads)})
        return optax.apply_updates(params.critics, changes), opt_state, averages

    def update_policy(learner: Learner, batch: Transition, noise: jax.Array) -> tuple[Learner, Averages]:
        """One gradient step of the policy and, with --autotune, of the temperature."""
        params, opt_states = learner.params, learner.opt_states
        alpha = temperature(params)

        def loss(actor_params):
            q, entropy = soft_value(actor_params, params.critics, batch.obs, noise)
            return -jnp.mean(q + alpha * entropy), jnp.mean(entropy)

        (value, entropy), grads = jax.value_and_grad(loss, has_aux=True)(params.actor)
        grads, value, entropy = flat_pmean((grads, value, entropy))
        changes, actor_state = policy_optimizer.update(grads, opt_states.actor)
        params = params._replace(actor=optax.apply_updates(params.actor, changes))
        opt_states = opt_states._replace(actor=actor_state)
        if args.autotune:  # the gradient of log_alpha * (entropy - entropy_wanted)
            change, alpha_state = q_optimizer.update(entropy - entropy_wanted, opt_states.log_alpha)
            params = params._replace(log_alpha=params.log_alpha + change)
            opt_states = opt_states._replace(log_alpha=alpha_state)
        metrics = {
            "loss/policy": value,
            "policy/entropy": entropy,
            "policy/alpha": alpha,
            "grad/policy_norm": optax.global_norm(grads),
        }
        return learner.replace(params=params, opt_states=opt_states), Averages.of(metrics)

    def temperature(params: Params) -> jax.Array:
        return jnp.exp(params.log_alpha) if args.autotune else jnp.float32(args.alpha)

    def soft_value(actor_params, critic_params, obs, noise) -> tuple[jax.Array, jax.Array]:
        """The smaller Q of the policy's actions [B], and the policy's entropy [B], both in expectation."""
        policy = actor.apply(actor_params, obs)
        if discrete:
            q = jnp.min(critics.apply(critic_params, obs), axis=0)  # [B, n]
            return jnp.sum(jax.nn.softmax(policy.logits) * q, axis=-1), policy.entropy()
        action, log_prob = policy.sample(noise)
        return jnp.min(critics.apply(critic_params, obs, action), axis=0), -log_prob

    def evaluate_one(learner: Learner) -> Episodes:
        return run_episodes(env, partial(act, learner), math.ceil(args.eval_episodes / jax.lax.axis_size(AXIS)))

    def act(learner: Learner, obs: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Actions [B, ...] for raw observations [B, ...]: sampled with a key, else the most likely ones."""
        policy = actor.apply(learner.params.actor, obs)
        if key is None:
            return to_env(policy.mode())
        action = policy.sample(action_noise(key, env.action_space, obs.shape[:1]))
        return to_env(action if discrete else action[0])

    def to_env(action: jax.Array) -> jax.Array:
        """Actions as the environment takes them."""
        if discrete:
            return action
        scale, offset = action_scale(env.action_space)
        return action * scale + offset

    def gauges(state: TrainState) -> dict[str, jax.Array]:
        """How things stand at the end of an interval."""
        learner, replay = state.learner, state.envs.replay
        learned_from = learner.updates * args.num_envs - args.learning_starts
        return {
            "gradient_updates": learner.gradient_updates,
            "replay/fill": jnp.where(replay.filled == replay.capacity, 1.0, replay.filled / replay.capacity),
            "replay/ratio": learner.gradient_updates / jnp.maximum(learned_from, 1),
        }

    return SAC(init, update, evaluate, new_learner, act)


make_algorithm = make_sac  # the name by which `load_policy` knows it


def check_actions(env: Env) -> None:
    """Raise UsageError unless actions are Discrete, or a Box with finite bounds."""
    space = env.action_space
    if isinstance(space, spaces.MultiDiscrete):
        raise UsageError(f"SAC acts in a Box or in Discrete actions, {env.name} has {space}; PPO can train on it")
    if isinstance(space, spaces.Discrete):
        return
    if not (np.isfinite(space.low) & np.isfinite(space.high) & (space.low < space.high)).all():
        raise UsageError(
            f"SAC squashes actions between bounds, and those of {env.name} are {np.ravel(space.low)} to "
            f"{np.ravel(space.high)}: each must be finite, the lower below the upper"
        )


def uniform_action(key: jax.Array, space: spaces.Space) -> jax.Array:
    """A uniformly random action, as the replay buffer keeps it."""
    if isinstance(space, spaces.Discrete):
        return jax.random.randint(key, (), 0, space.n)
    return jax.random.uniform(key, (math.prod(space.shape),), minval=-1.0, maxval=1.0)


def example_transition(env: Env) -> Transition:
    """One transition of zeros, which says what the replay buffer has to hold."""
    obs = jnp.zeros(env.observation_space.shape, env.obs_dtype)
    action = uniform_action(jax.random.key(0), env.action_space)
    return Transition(obs, jnp.zeros_like(action), jnp.float32(0), jnp.bool_(False), obs)


# --------------------------------------------------------------------------------------------------------------- run


def train(args: Args, env: Any = None) -> TrainResult:
    """Train as the command line does. `env` takes a gymnax-style environment object instead of the name `args.env`.

    Raises UsageError for what cannot be done, TrainingError where training had to stop, KeyboardInterrupt after SIGINT.
    """
    devices = choose_devices(args.num_devices, args.num_envs, args.block, ENVS_PER_CPU_DEVICE)
    env = make(args.env, args.env_params) if env is None else wrap(env)
    sac = pmapped(make_sac(args, env), devices)
    memory = check_memory(
        jax.eval_shape(lambda: example_transition(env)), args.capacity * args.num_envs * args.num_seeds, devices
    )
    memory += "" if args.save_buffer else ", not saved: a resumed run fills it again before it learns on"
    with Run(args, __file__, env, devices, {"replay": memory}) as run:
        state, update = run.start(sac)
        while run.unfinished:
            state, *report = update(state, run.next_chunk())
            run.advance(state, *report)
        return run.finish(state)


if __name__ == "__main__":
    sys.exit(main(train, ARGS))
