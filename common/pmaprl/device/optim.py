"""Parts that algorithms build their updates from: gradients, optimizer steps, scheduled flags."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import Array
from jax.flatten_util import ravel_pytree
from jax.typing import ArrayLike

from pmaprl.device.interface import HParams
from pmaprl.device.loops import Packed, zeros_of
from pmaprl.device.loops import unrolled_scan as unrolled_scan  # for algorithms
from pmaprl.device.sharding import AXIS
from pmaprl.device.statistics import Metrics, OptionalMetric, across_devices, over_steps
from pmaprl.device.statistics import Reports as Reports


class AdamState(struct.PyTreeNode):
    """State of an optimizer with a learning rate of its own."""

    moments: optax.OptState
    learning_rate: Array  # [] changes under --lr-schedule kl-adaptive only


def mean_gradients(loss: Callable) -> Callable[..., tuple[Any, Metrics]]:
    """Make a function that computes gradients over the samples of all devices.

    Args:
        loss: `loss(params, ...)` returns the mean loss [] over this device's samples, and metrics.

    Returns:
        A function of the arguments of `loss`. It returns the gradient by `params` and the metrics,
        both averaged over devices.
    """
    gradients = jax.grad(loss, has_aux=True)

    def gradients_of_all(params: Any, *inputs: Any) -> tuple[Any, Metrics]:
        grads, metrics = gradients(params, *inputs)
        return across_devices(grads, metrics)

    return gradients_of_all


def gradient_step(
    loss: Callable,
    variables: Any,
    optimizer: optax.GradientTransformation,
    state: optax.OptState,
    weight_norm: bool = False,
) -> tuple[Any, optax.OptState, Metrics, Array]:
    """Take one optimizer step, with the gradient over the samples of all devices.

    Args:
        loss: `loss(variables)` returns the mean loss [] over this device's samples, and a pair:
            metrics, and the collections of variables that the networks have replaced, such as
            statistics of batches. The gradient of those collections is zero.
        variables: variables of the networks.
        optimizer: rule of the step.
        state: the optimizer's state.
        weight_norm: whether to project the weights onto unit norm after the step (`unit_norm`).

    Returns:
        The variables and the optimizer's state after the step, metrics, and the norm [] of the
        gradient.
    """
    grads, (metrics, replaced) = jax.grad(loss, has_aux=True)(variables)
    grads, metrics = across_devices(grads, metrics)
    changes, state = optimizer.update(grads, state, variables)
    variables = optax.apply_updates(variables, changes) | replaced
    if weight_norm:
        variables = unit_norm(variables)
    norm = optax.tree.norm(grads)
    return variables, state, metrics, norm


def unit_norm(variables: Any) -> Any:
    """Scale the weights into every unit to norm 1 (weight normalization).

    Args:
        variables: variables of networks, of which every array named "kernel" is scaled.

    Returns:
        The variables with kernels [..., inputs, units] whose columns have norm 1.
    """

    def scaled(path, x):
        is_kernel = jax.tree_util.keystr(path[-1:], simple=True) == "kernel"
        return x / jnp.linalg.norm(x, axis=-2, keepdims=True) if is_kernel else x

    return jax.tree_util.tree_map_with_path(scaled, variables)


def mean_over_devices(x: Any) -> Any:
    """Average the arrays of all devices; every device gets the mean."""
    return jax.lax.pmean(x, AXIS)


RULES = {"adam": partial(optax.scale_by_adam, eps=1e-5), "radam": optax.scale_by_radam}


def clipped_adam(hparams: Any) -> optax.GradientTransformation:
    """Adam after clipping the gradient's global norm, without the factor of the learning rate.

    Args:
        hparams: has `max_grad_norm` (0: no clipping), `adam_b1` and `adam_b2`, numbers or arrays
            []. Its `optimizer`, if it has one, names one of RULES.

    Returns:
        An optax rule, whose updates are directions.
    """
    limit = hparams.max_grad_norm
    is_off = isinstance(limit, float) and limit == 0
    clip = optax.identity() if is_off else optax.clip_by_global_norm(no_limit_if_zero(limit))
    rule = RULES[getattr(hparams, "optimizer", "adam")]
    return optax.chain(clip, rule(hparams.adam_b1, hparams.adam_b2))


def adam_init(params: Any, hparams: Any) -> AdamState:
    """State of `adam_step` before the first step.

    Args:
        params: parameters to be learned.
        hparams: has `learning_rate` and the fields that `clipped_adam` reads.

    Returns:
        The optimizer's state.
    """
    return AdamState(
        moments=clipped_adam(hparams).init(flat(params)),
        learning_rate=jnp.float32(hparams.learning_rate),
    )


def adam_step(
    loss: Callable,
    params: Any,
    state: AdamState,
    hparams: Any,
) -> tuple[Any, AdamState, Metrics]:
    """Take one step of `clipped_adam`, with the gradient over the samples of all devices.

    Args:
        loss: `loss(params)` returns the mean loss [] over this device's samples, and metrics.
        params: parameters.
        state: the optimizer's state.
        hparams: has `learning_rate` and the fields that `clipped_adam` reads.

    Returns:
        Parameters and state after the step, and the metrics, with the gradient's norm before
        clipping as "grad/norm".
    """
    grads, metrics = mean_gradients(loss)(params)
    vector, unravel = ravel_pytree(params)
    direction, moments = clipped_adam(hparams).update(flat(grads), state.moments)
    params = unravel(vector - hparams.learning_rate * direction)
    metrics = metrics | {"grad/norm": global_norm(grads)}
    return params, state.replace(moments=moments), metrics


def mean_each(samples: Metrics) -> Metrics:
    """Average each metric over the samples.

    All means are one reduction, which is one kernel in place of one for each metric.

    Args:
        samples: arrays of one shape, by name.

    Returns:
        Their means [], by name.
    """
    rows = [jnp.float32(x).ravel() for x in samples.values()]
    mean = jnp.mean(jnp.stack(rows), axis=1)
    return dict(zip(samples, mean, strict=True))


def gather_samples(samples: Any, indices: Array) -> Any:
    """Select samples by their indices.

    Args:
        samples: tree of arrays [N, ...].
        indices: [...] indices from 0 to N - 1.

    Returns:
        The tree with arrays [..., ...], indices first.
    """
    return jax.tree.map(lambda x: jnp.take(x, indices, axis=0, mode="clip"), samples)


def flat(tree: Any) -> Array:
    """Concatenate all numbers of a tree into one vector.

    An operation on the vector is one kernel, not one for each array.
    """
    return ravel_pytree(tree)[0]


def global_norm(tree: Any) -> Array:
    """Euclidean norm [] of all numbers of a tree."""
    return optax.tree.norm(flat(tree))


def all_finite(tree: Any) -> Array:
    """True [] if all numbers of a tree are finite."""
    return jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]).all()


def adapt_learning_rate(
    state: AdamState,
    kl: Array,
    hparams: Any,
) -> AdamState:
    """Adapt the learning rate to how far an update moved the policy (--lr-schedule kl-adaptive).

    The rate is divided by 1.5 if `kl` is over twice `desired_kl`, and multiplied by 1.5 if it is
    under half of it. It stays within 1e-6 and 1e-2.

    Args:
        state: the optimizer's state.
        kl: [] KL divergence of the update in nats, over this device's samples.
        hparams: has `lr_schedule` and `desired_kl`.

    Returns:
        The state with the new rate; under another schedule the state as it is.
    """
    if hparams.lr_schedule != "kl-adaptive":
        return state
    kl = mean_over_devices(kl)  # the rate is the same on all devices
    too_far = kl > 2 * hparams.desired_kl
    raised = jnp.where(kl < 0.5 * hparams.desired_kl, 1.5, 1.0)
    factor = jnp.where(too_far, 1 / 1.5, raised)
    learning_rate = jnp.clip(state.learning_rate * factor, 1e-6, 1e-2)
    return state.replace(learning_rate=learning_rate)


def no_limit_if_zero(limit: float | Array) -> float | Array:
    """Turn a limit of 0, which means no limit, into infinity; numbers stay numbers."""
    if isinstance(limit, float):
        return limit or jnp.inf
    return jnp.where(limit > 0, limit, jnp.inf)


def run_epochs(
    step: Callable,
    start: Any,
    inputs: Any,
    target_kl: float | Array = 0.0,
) -> tuple[Any, Metrics]:
    """Run `step` over the minibatches of all epochs.

    After an epoch whose "policy/approx_kl" exceeds `target_kl`, later epochs change nothing and do
    not count. They are computed all the same, as they would be under `vmap` in any case.

    Args:
        step: `step((params, opt_state), minibatch)` returns the pair after one gradient step, and
            metrics, as `jax.lax.scan` takes it.
        start: params and opt_state before the first step.
        inputs: minibatches, a tree of [E, M, ...].
        target_kl: [] bound of an epoch's KL divergence in nats; 0: none.

    Returns:
        The last params and opt_state, and the means of the metrics over the steps that count, with
        the number of epochs that count as "policy/epochs".
    """
    # Known when the program is traced
    never_stops = isinstance(target_kl, float) and target_kl == 0

    def packed_step(carry, inputs):
        params, opt_state = carry
        (params, opt_state), metrics = step((params.tree, opt_state), inputs)
        return (Packed.of(params), opt_state), Packed.of(metrics)

    def epoch(carry, inputs):
        before, stopped = carry
        after, metrics = jax.lax.scan(packed_step, before, inputs)
        metrics = over_steps(metrics.tree)
        counts = ~stopped
        if not never_stops:
            after = jax.tree.map(lambda old, new: jnp.where(stopped, old, new), before, after)
            stopped |= metrics["policy/approx_kl"] > no_limit_if_zero(target_kl)
        return (after, stopped), Packed.of((metrics, counts))

    params, opt_state = start
    carry = (Packed.of(params), opt_state), jnp.bool_(False)
    carry, epochs = jax.lax.scan(epoch, carry, inputs)
    (params, opt_state), _ = carry
    metrics, counts = epochs.tree
    metrics = over_steps(metrics, None if never_stops else counts)
    metrics |= {"policy/epochs": jnp.sum(counts, dtype=jnp.float32)}
    return (params.tree, opt_state), metrics


def update_if(
    due: Array,
    step: Callable[[Any], tuple[Any, Metrics]],
    state: Any,
) -> tuple[Any, dict[str, OptionalMetric]]:
    """Run `step` on the state only if it is due.

    Args:
        due: [] bool.
        step: returns the new state and metrics.
        state: its argument.

    Returns:
        The new state, or `state` as it is; and metrics, which report nothing if nothing was due.
    """
    nothing = zeros_of(step, state)[1]
    state, metrics = jax.lax.cond(due, step, lambda state: (state, nothing), state)
    return state, {name: OptionalMetric(x, due.astype(x.dtype)) for name, x in metrics.items()}


def standardize(
    x: Array,
    axis: Any = None,
    weight: Array | None = None,
) -> Array:
    """Shift and scale `x` to zero mean and unit variance over all devices.

    Args:
        x: samples.
        axis: axes of the samples; default: all. Not together with `weight`.
        weight: 1 for samples that count and 0 for others, in the shape of `x`; default: all count.

    Returns:
        The standardized samples, in the shape of `x`.
    """
    if weight is None:
        mean = partial(jnp.mean, axis=axis, keepdims=True)
    elif axis is not None:
        raise ValueError("standardize takes axes or weights, not both")
    else:
        mean = partial(weighted_mean, weight)
    centred = x - jax.lax.pmean(mean(x), AXIS)
    variance = jax.lax.pmean(mean(jnp.square(centred)), AXIS)
    return centred / (jnp.sqrt(variance) + 1e-8)


def weighted_mean(weight: Array, x: Array) -> Array:
    """Weighted mean of this device, scaled so that the mean over devices is the mean over all.

    Args:
        weight: 1 for samples that count and 0 for others.
        x: samples, in the shape of `weight`.

    Returns:
        A number []: `mean_over_devices` of it is the mean of all samples that count.
    """
    total = jnp.sum(x * weight)
    mean_weight = jax.lax.pmean(jnp.sum(weight), AXIS)
    return total / jnp.maximum(mean_weight, 1e-8)


def value_metrics(
    value: Array,
    target: Array,
    advantage: Array,
) -> Metrics:
    """Measure how well values predict their targets, and how far advantages spread.

    Args:
        value: predicted values, in units of the rewards.
        target: their targets, in the same shape and units.
        advantage: advantages, in the same shape and units.

    Returns:
        "value/mean", "value/explained_variance" and "advantage/std" [], over all devices.
    """
    samples = jnp.stack([x.ravel() for x in (target, target - value, advantage, value)])
    mean = jax.lax.pmean(jnp.mean(samples, axis=1), AXIS)
    squares = jnp.square(samples - mean[:, None])
    variance = jax.lax.pmean(jnp.mean(squares, axis=1), AXIS)
    target_variance, error_variance, advantage_variance, _ = variance
    return {
        "value/mean": mean[3],
        "value/explained_variance": 1 - error_variance / jnp.maximum(target_variance, 1e-8),
        "advantage/std": jnp.sqrt(advantage_variance),
    }


def noise_like(keys: Array, x: Array) -> Array:
    """Draw standard normal noise, which does not depend on the number of devices.

    Args:
        keys: [G] keys, one for each group of samples, such as `GradientContext.keys[0]`.
        x: [B, ...] array that has the shape of the noise. Each key draws B / G samples of it.

    Returns:
        [B, ...] noise.
    """
    shape = x.shape[0] // keys.shape[0], *x.shape[1:]
    noise = jax.vmap(lambda key: jax.random.normal(key, shape))(keys)  # [G, B / G, ...]
    return noise.reshape(x.shape)


def hparams_of(
    args: Any,
    member_values: Mapping[str, ArrayLike] | None = None,
    **scheduled: Array,
) -> HParams:
    """Hyperparameters of one agent.

    A population can sweep every flag that an algorithm reads from here.

    Args:
        args: flags.
        member_values: values [] of the flags that differ between members, by name.
        scheduled: values [] that schedules have changed. They come before all others.

    Returns:
        All flags, by name. If flags describe an epsilon, `epsilon` too: its initial value, or that
        in `scheduled`.
    """
    initial = {"epsilon": epsilon_after(args, 0)} if hasattr(args, "epsilon_fraction") else {}
    return HParams(**{**vars(args), **initial, **(member_values or {}), **scheduled})


def linear_decay(
    args: Any,
    updates: int | Array,
    fraction: float,
) -> Array:
    """Linear decay [] from 1 to 0 over `fraction` of the run, after `updates` [] updates.

    It is 0 from the start if `fraction` is 0.
    """
    num_updates = max(fraction * args.num_updates, 1.0)
    return jnp.maximum(1.0 - updates / num_updates, 0.0) * (fraction > 0)


def epsilon_after(args: Any, updates: int | Array) -> Array:
    """Probability [] of a random action after `updates` [] updates.

    Args:
        args: has `epsilon_start`, `epsilon_end` and `epsilon_fraction`, the fraction of the run
            over which the probability falls linearly.
        updates: number of updates done.
    """
    decay = linear_decay(args, updates, args.epsilon_fraction)
    return args.epsilon_end + (args.epsilon_start - args.epsilon_end) * jnp.float32(decay)


def apply_schedules(
    args: Any,
    run: Any,
    learner: Any,
) -> tuple[HParams, dict[str, Array]]:
    """Hyperparameters of one agent for the next update.

    Args:
        args: flags.
        run: the agent's `RunState`.
        learner: the agent's learner, whose `opt_state` is an `AdamState` under --lr-schedule
            kl-adaptive.

    Returns:
        The hyperparameters, and those among them [] that schedules have changed, by name.
    """
    decay = partial(linear_decay, args, run.updates)
    hparams = hparams_of(args, run.member_values)
    schedule = getattr(args, "lr_schedule", "")
    factor = decay(1.0) if schedule == "linear" else 1.0
    scheduled = {}
    for name, rate in vars(hparams).items():
        if schedule and name.endswith(("learning_rate", "_lr")):
            scheduled[name] = jnp.float32(rate) * factor
    if schedule == "kl-adaptive":
        scheduled["learning_rate"] = learner.opt_state.learning_rate
    if hasattr(args, "epsilon_fraction"):
        # Of the next rollout: that of this update is collected
        scheduled["epsilon"] = epsilon_after(args, run.updates + 1)
    if fraction := getattr(args, "ent_fraction", 0.0):
        scheduled["ent_coef"] = hparams.ent_coef * decay(fraction)
    return hparams_of(args, run.member_values, **scheduled), scheduled
