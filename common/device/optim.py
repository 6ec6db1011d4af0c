"""What algorithms build their updates from: gradients, optimizer steps, and flags with schedules applied."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from common.device.interface import Flags
from common.device.sharding import AXIS
from common.device.statistics import Metrics, Report, across_devices, over_steps


class AdamState(struct.PyTreeNode):
    """The state of an optimizer with a learning rate of its own."""

    moments: optax.OptState
    learning_rate: jax.Array  # [] moves under --lr-schedule kl-adaptive only


def mean_gradients(loss: Callable) -> Callable:
    """From `loss(params, ...)`, which returns a mean over this device's samples and metrics, a function of the same
    that returns gradients and metrics of the samples of all devices.
    """

    def gradients(params: Any, *inputs: Any) -> tuple[Any, Metrics]:
        grads, metrics = jax.grad(loss, has_aux=True)(params, *inputs)
        return across_devices(grads, metrics)

    return gradients


def mean_over_devices(x: Any) -> Any:
    """The mean of arrays of all devices."""
    return jax.lax.pmean(x, AXIS)


def clipped_adam(hp: Any) -> optax.GradientTransformation:
    """Directions of steps, whose length is the learning rate: Adam, after the global norm of the gradient is clipped.

    `hp` has `max_grad_norm`, of which 0 does not clip, and `adam_b1` and `adam_b2`, numbers or arrays [].
    """
    limit = hp.max_grad_norm
    off = isinstance(limit, float) and limit == 0
    clip = optax.identity() if off else optax.clip_by_global_norm(inf_if_zero(limit))
    return optax.flatten(optax.chain(clip, optax.scale_by_adam(hp.adam_b1, hp.adam_b2, eps=1e-5)))


def adam_init(params: Any, hp: Any) -> AdamState:
    """The state of `adam_step` before the first one."""
    return AdamState(clipped_adam(hp).init(params), jnp.float32(hp.learning_rate))


def adam_step(params: Any, grads: Any, state: AdamState, hp: Any) -> tuple[Any, AdamState]:
    """A step of `clipped_adam` of the length `hp.learning_rate`: parameters and state after it."""
    direction, moments = clipped_adam(hp).update(grads, state.moments)
    params = jax.tree.map(lambda p, d: p - hp.learning_rate * d, params, direction)
    return params, state.replace(moments=moments)


def adapt_learning_rate(state: AdamState, kl: jax.Array, hp: Any) -> AdamState:
    """The state after an update that moved the policy by `kl`, which under --lr-schedule kl-adaptive moves its
    learning rate: divided by 1.5 where that is over twice `desired_kl`, multiplied where it is under half of it.
    """
    if hp.lr_schedule != "kl-adaptive":
        return state
    factor = jnp.where(kl > 2 * hp.desired_kl, 1 / 1.5, jnp.where(kl < 0.5 * hp.desired_kl, 1.5, 1.0))
    return state.replace(learning_rate=jnp.clip(state.learning_rate * factor, 1e-6, 1e-2))


def inf_if_zero(limit: float | jax.Array) -> float | jax.Array:
    """`limit` [], or infinity where it is 0, which turns it off; numbers stay numbers."""
    return limit or jnp.inf if isinstance(limit, float) else jnp.where(limit > 0, limit, jnp.inf)


def run_epochs(step: Callable, start: Any, inputs: Any, target_kl: float | jax.Array = 0.0) -> tuple[Any, Metrics]:
    """Steps of `jax.lax.scan` over `inputs` [E, M, ...], which return metrics: what they carry, and the means of those.

    None counts after an epoch whose "policy/approx_kl" exceeds `target_kl`, unless that is 0; they are computed all the
    same, as under `vmap` in any case.
    """
    all_count = isinstance(target_kl, float) and not target_kl

    def epoch(carry, inputs):
        before, stopped = carry
        after, metrics = jax.lax.scan(step, before, inputs)
        metrics, counts = over_steps(metrics), ~stopped
        if not all_count:
            after = jax.tree.map(lambda old, new: jnp.where(stopped, old, new), before, after)
            stopped |= metrics["policy/approx_kl"] > inf_if_zero(target_kl)
        return (after, stopped), (metrics, counts)

    (state, _), (metrics, counts) = jax.lax.scan(epoch, (start, jnp.bool_(False)), inputs)
    metrics = over_steps(metrics, None if all_count else counts)
    return state, metrics | {"policy/epochs": jnp.sum(counts, dtype=jnp.float32)}


def when(due: jax.Array, step: Callable[[Any], tuple[Any, Metrics]], state: Any) -> tuple[Any, dict[str, Report]]:
    """`step` of the state where it is `due`, else the state as it is; and metrics, reported where it was."""

    def reported(state):
        state, metrics = step(state)
        return state, {name: Report(x, jnp.ones_like(x)) for name, x in metrics.items()}

    nothing = zeros_of(reported, state)[1]
    return jax.lax.cond(due, reported, lambda state: (state, nothing), state)


def zeros_of(function: Callable, *args: Any) -> Any:
    """Zeros shaped as what `function(*args)` returns: where a loop's sums begin."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(function, *args))


def standardize(x: jax.Array, axis: Any = None, weight: jax.Array | None = None) -> jax.Array:
    """`x` with zero mean and unit variance along `axis` over all devices; of those alone whose `weight` is 1."""
    mean = partial(jnp.mean, axis=axis, keepdims=True) if weight is None else partial(weighted_mean, weight)
    centred = x - jax.lax.pmean(mean(x), AXIS)
    return centred / (jnp.sqrt(jax.lax.pmean(mean(jnp.square(centred)), AXIS)) + 1e-8)


def weighted_mean(weight: jax.Array, x: jax.Array) -> jax.Array:
    """This device's share of the mean of `x` where `weight` is 1: the mean over devices of this is that over all."""
    return jnp.sum(x * weight) / jnp.maximum(jax.lax.pmean(jnp.sum(weight), AXIS), 1e-8)


def value_metrics(value: jax.Array, target: jax.Array, advantage: jax.Array) -> Metrics:
    """How well values predict their targets, and the spread of advantages, all in units of the rewards."""
    samples = jnp.stack([x.ravel() for x in (target, target - value, advantage, value)])
    mean = jax.lax.pmean(jnp.mean(samples, axis=1), AXIS)
    variance = jax.lax.pmean(jnp.mean(jnp.square(samples - mean[:, None]), axis=1), AXIS)
    target, error, advantage, _ = variance
    return {
        "value/mean": mean[3],
        "value/explained_variance": 1 - error / jnp.maximum(target, 1e-8),
        "advantage/std": jnp.sqrt(advantage),
    }


def noise_like(keys: jax.Array, x: jax.Array) -> jax.Array:
    """Standard normals in the shape of `x` [B, ...], of which each of `keys` [G] draws an equal part."""
    shape = x.shape[0] // keys.shape[0], *x.shape[1:]
    return jax.vmap(lambda key: jax.random.normal(key, shape))(keys).reshape(x.shape)


def hp_of(args: Any, hyper: dict[str, jax.Array] | None = None, **now: jax.Array) -> Flags:
    """The flags of one agent: those that are in its `hyper` as arrays [], all others as they are in `args`.

    `now` are values of this moment. A flag that an algorithm reads from here is one that a population can sweep.
    """
    return Flags(**vars(args) | (hyper or {}) | now)


def hp_now(args: Any, run: Any, learner: Any) -> tuple[Flags, dict[str, jax.Array]]:
    """The flags of one agent for the update that comes next, and what schedules make of some of them [], by name.

    Its `run` is the `RunState`, and under --lr-schedule kl-adaptive its learner has an `AdamState`.
    """

    def left(fraction: float) -> jax.Array:
        """Of a value that falls to zero in a line over this share of the run: 1 at its start."""
        return jnp.maximum(1.0 - run.updates / max(fraction * args.num_updates, 1.0), 0.0)

    now, hp, schedule = {}, hp_of(args, run.hyper), getattr(args, "lr_schedule", "")
    if schedule == "kl-adaptive":
        now["learning_rate"] = learner.opt_state.learning_rate
    elif schedule:
        now["learning_rate"] = jnp.float32(hp.learning_rate) * (left(1.0) if schedule == "linear" else 1.0)
    if fraction := getattr(args, "ent_fraction", 0.0):
        now["ent_coef"] = hp.ent_coef * left(fraction)
    return hp_of(args, run.hyper, **now), now
