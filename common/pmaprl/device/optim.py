"""What algorithms build their updates from: gradients, optimizer steps, and flags with schedules
applied.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.flatten_util import ravel_pytree

from pmaprl.device.interface import HParams
from pmaprl.device.loops import Packed, zeros_of
from pmaprl.device.loops import unrolled_scan as unrolled_scan  # for algorithms
from pmaprl.device.sharding import AXIS
from pmaprl.device.statistics import Metrics, OptionalMetric, across_devices, over_steps


class AdamState(struct.PyTreeNode):
    """The state of an optimizer with a learning rate of its own."""

    moments: optax.OptState
    learning_rate: jax.Array  # [] moves under --lr-schedule kl-adaptive only


def mean_gradients(loss: Callable) -> Callable[..., tuple[Any, Metrics]]:
    """From `loss(params, ...)`, which returns a mean over this device's samples and metrics, a
    function of the same that returns gradients and metrics of the samples of all devices.
    """
    gradients = jax.grad(loss, has_aux=True)
    return lambda params, *inputs: across_devices(*gradients(params, *inputs))


def gradient_step(
    loss: Callable,
    variables: Any,
    optimizer: optax.GradientTransformation,
    state: optax.OptState,
    weight_norm: bool = False,
) -> tuple[Any, optax.OptState, Metrics, jax.Array]:
    """One step of an optimizer: variables of networks and its state after it, metrics, and the norm
    of the gradient.

    `loss(variables)` returns a mean over this device's samples, and with it metrics and the
    collections of variables that the networks have replaced, such as statistics of batches, whose
    gradient is zero.
    """
    grads, (metrics, replaced) = jax.grad(loss, has_aux=True)(variables)
    grads, metrics = across_devices(grads, metrics)
    changes, state = optimizer.update(grads, state, variables)
    variables = optax.apply_updates(variables, changes) | replaced
    return (
        unit_norm(variables) if weight_norm else variables,
        state,
        metrics,
        optax.tree.norm(grads),
    )


def unit_norm(variables: Any) -> Any:
    """Weight normalisation: networks in which the weights into every unit have norm 1."""

    def scaled(path, x):
        is_kernel = jax.tree_util.keystr(path[-1:], simple=True) == "kernel"
        return x / jnp.linalg.norm(x, axis=-2, keepdims=True) if is_kernel else x

    return jax.tree_util.tree_map_with_path(scaled, variables)


def mean_over_devices(x: Any) -> Any:
    """The mean of arrays of all devices."""
    return jax.lax.pmean(x, AXIS)


RULES = {"adam": partial(optax.scale_by_adam, eps=1e-5), "radam": optax.scale_by_radam}


def clipped_adam(hparams: Any) -> optax.GradientTransformation:
    """Directions of steps, whose length is the learning rate: Adam, after the global norm of the
    gradient is clipped.

    `hparams` has `max_grad_norm`, of which 0 does not clip, and `adam_b1` and `adam_b2`, numbers or
    arrays []. Its `optimizer`, if there is one, says which of RULES it is.
    """
    limit = hparams.max_grad_norm
    off = isinstance(limit, float) and limit == 0
    clip = optax.identity() if off else optax.clip_by_global_norm(inf_if_zero(limit))
    return optax.chain(
        clip, RULES[getattr(hparams, "optimizer", "adam")](hparams.adam_b1, hparams.adam_b2)
    )


def adam_init(params: Any, hparams: Any) -> AdamState:
    """The state of `adam_step` before the first one."""
    return AdamState(clipped_adam(hparams).init(flat(params)), jnp.float32(hparams.learning_rate))


def adam_step(params: Any, grads: Any, state: AdamState, hparams: Any) -> tuple[Any, AdamState]:
    """A step of `clipped_adam` of the length `hparams.learning_rate`: parameters and state after
    it.
    """
    vector, unravel = ravel_pytree(params)
    direction, moments = clipped_adam(hparams).update(flat(grads), state.moments)
    return unravel(vector - hparams.learning_rate * direction), state.replace(moments=moments)


def mean_each(samples: Metrics) -> Metrics:
    """The means of metrics of samples, arrays of one shape, in one pass."""
    mean = jnp.mean(jnp.stack([jnp.float32(x).ravel() for x in samples.values()]), axis=1)
    return dict(zip(samples, mean, strict=True))


def gather_samples(samples: Any, indices: jax.Array) -> Any:
    """Those of samples [N, ...] at `indices` [B], which are not negative and below N."""
    return jax.tree.map(lambda x: jnp.take(x, indices, axis=0, mode="clip"), samples)


def flat(tree: Any) -> jax.Array:
    """All numbers of a tree, one vector: what is done with it is one operation, not one for each
    array.
    """
    return ravel_pytree(tree)[0]


def global_norm(tree: Any) -> jax.Array:
    """The norm [] of all numbers of a tree."""
    return optax.tree.norm(flat(tree))


def all_finite(tree: Any) -> jax.Array:
    """Whether all numbers of a tree are finite, []."""
    return jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]).all()


def adapt_learning_rate(state: AdamState, kl: jax.Array, hparams: Any) -> AdamState:
    """The state after an update that moved the policy by `kl`, which under --lr-schedule
    kl-adaptive moves its learning rate: divided by 1.5 where that is over twice `desired_kl`,
    multiplied where it is under half of it.
    """
    if hparams.lr_schedule != "kl-adaptive":
        return state
    factor = jnp.where(
        kl > 2 * hparams.desired_kl, 1 / 1.5, jnp.where(kl < 0.5 * hparams.desired_kl, 1.5, 1.0)
    )
    return state.replace(learning_rate=jnp.clip(state.learning_rate * factor, 1e-6, 1e-2))


def inf_if_zero(limit: float | jax.Array) -> float | jax.Array:
    """`limit` [], or infinity where it is 0, which turns it off; numbers stay numbers."""
    return limit or jnp.inf if isinstance(limit, float) else jnp.where(limit > 0, limit, jnp.inf)


def run_epochs(
    step: Callable, start: Any, inputs: Any, target_kl: float | jax.Array = 0.0
) -> tuple[Any, Metrics]:
    """Steps of `jax.lax.scan` over `inputs` [E, M, ...] that carry parameters and the optimizer's
    state, and return
    metrics: what they carry in the end, and the means of those.

    None counts after an epoch whose "policy/approx_kl" exceeds `target_kl`, unless that is 0; they
    are computed all the same, as under `vmap` in any case.
    """
    all_count = isinstance(target_kl, float) and not target_kl

    def packed_step(carry, inputs):
        (params, opt_state), metrics = step((carry[0].tree, carry[1]), inputs)
        return (Packed.of(params), opt_state), Packed.of(metrics)

    def epoch(carry, inputs):
        before, stopped = carry
        after, metrics = jax.lax.scan(packed_step, before, inputs)
        metrics = over_steps(metrics.tree)
        counts = ~stopped
        if not all_count:
            after = jax.tree.map(lambda old, new: jnp.where(stopped, old, new), before, after)
            stopped |= metrics["policy/approx_kl"] > inf_if_zero(target_kl)
        return (after, stopped), Packed.of((metrics, counts))

    start = (Packed.of(start[0]), start[1]), jnp.bool_(False)
    ((params, opt_state), _), epochs = jax.lax.scan(epoch, start, inputs)
    (metrics, counts), state = epochs.tree, (params.tree, opt_state)
    metrics = over_steps(metrics, None if all_count else counts)
    return state, metrics | {"policy/epochs": jnp.sum(counts, dtype=jnp.float32)}


def update_if(
    due: jax.Array, step: Callable[[Any], tuple[Any, Metrics]], state: Any
) -> tuple[Any, dict[str, OptionalMetric]]:
    """`step` of the state where it is `due`, else the state as it is; and metrics, reported where
    it was.
    """
    nothing = zeros_of(step, state)[1]
    state, metrics = jax.lax.cond(due, step, lambda state: (state, nothing), state)
    return state, {name: OptionalMetric(x, due.astype(x.dtype)) for name, x in metrics.items()}


def standardize(x: jax.Array, axis: Any = None, weight: jax.Array | None = None) -> jax.Array:
    """`x` with zero mean and unit variance along `axis` over all devices; of those alone whose
    `weight` is 1.
    """
    mean = (
        partial(jnp.mean, axis=axis, keepdims=True)
        if weight is None
        else partial(weighted_mean, weight)
    )
    centred = x - jax.lax.pmean(mean(x), AXIS)
    return centred / (jnp.sqrt(jax.lax.pmean(mean(jnp.square(centred)), AXIS)) + 1e-8)


def weighted_mean(weight: jax.Array, x: jax.Array) -> jax.Array:
    """This device's share of the mean of `x` where `weight` is 1: the mean over devices of this is
    that over all.
    """
    return jnp.sum(x * weight) / jnp.maximum(jax.lax.pmean(jnp.sum(weight), AXIS), 1e-8)


def value_metrics(value: jax.Array, target: jax.Array, advantage: jax.Array) -> Metrics:
    """How well values predict their targets, and the spread of advantages, all in units of the
    rewards.
    """
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
    """Standard normals in the shape of `x` [B, ...], of which each of `keys` [G] draws an equal
    part.
    """
    shape = x.shape[0] // keys.shape[0], *x.shape[1:]
    return jax.vmap(lambda key: jax.random.normal(key, shape))(keys).reshape(x.shape)


def hparams_of(
    args: Any, member_values: dict[str, jax.Array] | None = None, **now: jax.Array
) -> HParams:
    """The flags of one agent: those that are in its `member_values` as arrays [], all others as
    they are in `args`.

    `now` are values of this moment. A flag that an algorithm reads from here is one that a
    population can sweep.
    """
    return HParams(**vars(args) | (member_values or {}) | now)


def falling(args: Any, updates: jax.Array, fraction: float) -> jax.Array:
    """What falls from 1 to 0 in a line over this `fraction` of the run, after so many `updates` [];
    0 for 0.
    """
    return jnp.maximum(1.0 - updates / max(fraction * args.num_updates, 1.0), 0.0) * (fraction > 0)


def epsilon_after(args: Any, updates: int | jax.Array) -> jax.Array:
    """The probability of random actions after so many `updates` []: a line over --epsilon-fraction
    of the run.
    """
    left = falling(args, updates, args.epsilon_fraction)
    return args.epsilon_end + (args.epsilon_start - args.epsilon_end) * jnp.float32(left)


def apply_schedules(args: Any, run: Any, learner: Any) -> tuple[HParams, dict[str, jax.Array]]:
    """The flags of one agent for the update that comes next, and those among them that schedules
    change, [] by name.

    Its `run` is the `RunState`, and under --lr-schedule kl-adaptive its learner has an `AdamState`.
    """
    left = partial(falling, args, run.updates)
    hparams = hparams_of(args, run.member_values)
    schedule = getattr(args, "lr_schedule", "")
    factor = left(1.0) if schedule == "linear" else 1.0
    rates = {
        name: x
        for name, x in vars(hparams).items()
        if schedule and name.endswith(("learning_rate", "_lr"))
    }
    scheduled = {name: jnp.float32(rate) * factor for name, rate in rates.items()}
    if schedule == "kl-adaptive":
        scheduled["learning_rate"] = learner.opt_state.learning_rate
    if hasattr(args, "epsilon_fraction"):
        scheduled["epsilon"] = epsilon_after(args, run.updates + 1)
    if fraction := getattr(args, "ent_fraction", 0.0):
        scheduled["ent_coef"] = hparams.ent_coef * left(fraction)
    return hparams_of(args, run.member_values, **scheduled), scheduled
