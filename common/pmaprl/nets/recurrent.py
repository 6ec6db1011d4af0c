"""Recurrent layers, whose memory goes from step to step and is emptied where an episode begins."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pmaprl.device.loops import unrolled_scan
from pmaprl.envs.spaces import Space
from pmaprl.nets.torso import Torso

Kind = Literal["none", "gru", "lstm"]


class Inputs(NamedTuple):
    """Inputs of a network with memory, [T, N, ...]."""

    obs: Array  # normalized
    first: Array  # bool, True where an episode begins
    previous: Array  # [T, N, A + 1] action and reward of the step before; zeros without one

    @classmethod
    def of(
        cls,
        seen: Any,
        action: Array,
        obs: Array,
    ) -> "Inputs":
        """Put the inputs of a network together.

        Args:
            seen: a `PolicyInput` [..., N, ...].
            action: encoded actions [..., N, A] of the step before.
            obs: the observations of `seen`, as the network takes them.
        """
        previous = jnp.concatenate([action, seen.reward[..., None]], axis=-1)
        previous = jnp.where(seen.first[..., None], 0.0, previous)
        return cls(
            obs=obs,
            first=seen.first,
            previous=previous,
        )


class Cell(NamedTuple):
    """A recurrent cell, whose state is a tuple of arrays [N, F]; the first is its output.

    Attributes:
        keep: for each gate, 1 if its bias lengthens the cell's memory, -1 if it shortens it, else
            0.
        arrays: number of arrays in the state.
        step: `step(state, x, z)` returns the next state. x are the gates of the input, z those of
            the output before, [N, gates * F] each.
    """

    keep: tuple[int, ...]
    arrays: int
    step: Callable


def gru(
    state: tuple,
    x: Array,
    z: Array,
) -> tuple:
    """Step a gated recurrent unit (Cho et al. 2014), as cuDNN has it.

    Its reset gate stands behind the product with the kernel.
    """
    (h,) = state
    x_reset, x_update, x_new = jnp.split(x, 3, axis=-1)
    z_reset, z_update, z_new = jnp.split(z, 3, axis=-1)
    update = nn.sigmoid(x_update + z_update)
    reset = nn.sigmoid(x_reset + z_reset)
    new = jnp.tanh(x_new + reset * z_new)
    return ((1 - update) * new + update * h,)


def lstm(
    state: tuple,
    x: Array,
    z: Array,
) -> tuple:
    """Step a long short-term memory (Hochreiter and Schmidhuber 1997).

    It has the forget gate of Gers et al. 2000.
    """
    _, c = state
    enter, forget, new, leave = jnp.split(x + z, 4, axis=-1)
    c = nn.sigmoid(forget) * c + nn.sigmoid(enter) * jnp.tanh(new)
    return nn.sigmoid(leave) * jnp.tanh(c), c


CELLS = {
    "gru": Cell(
        keep=(0, 1, 0),
        arrays=1,
        step=gru,
    ),
    "lstm": Cell(
        keep=(-1, 1, 0, 0),
        arrays=2,
        step=lstm,
    ),
}


class Recurrent(nn.Module):
    """Layers of recurrent cells over a sequence."""

    kind: Kind
    size: int
    span: int  # longest memory of a new network's cells, in steps (see `chrono_biases`)
    dtype: Any = None  # of the arithmetic; parameters stay float32

    @nn.compact
    def __call__(
        self,
        x: Array,
        first: Array,
        memory: Any,
    ) -> tuple[Array, Any]:
        """Run the layers over a sequence.

        Args:
            x: [T, N, F] inputs.
            first: [T, N] bool, True where an episode begins. Nothing from before that step reaches
                it or a later one.
            memory: memory [N, ...] before the first step, of as many layers as there shall be; ()
                for none.

        Returns:
            Outputs [T, N, size], and the memories [T, N, ...] after each step.
        """
        memories = []
        for layer, state in enumerate(memory):
            memories.append(self._layer(layer, x, first, state))
            x = memories[-1][0].astype(x.dtype)
        return x, tuple(memories)

    def _layer(
        self,
        layer: int,
        x: Array,
        first: Array,
        state: tuple,
    ) -> tuple:
        cell = CELLS[self.kind]
        width = len(cell.keep) * self.size
        kernel = self.param(f"recurrent_{layer}", orthogonal_gates, (self.size, width))
        init_bias = partial(chrono_biases, cell.keep, self.span)
        bias = self.param(f"recurrent_bias_{layer}", init_bias, (width,))
        # Products with the inputs do not wait for one another: one product serves all steps
        x = nn.Dense(width, dtype=self.dtype, name=f"input_{layer}")(x)  # [T, N, gates * size]
        in_turn = scan_cells if jax.default_backend() == "cpu" else scan_cells_fused
        return in_turn(cell, kernel.astype(x.dtype), bias, x, first, state)


def scan_cells(
    cell: Cell,
    kernel: Array,
    bias: Array,
    x: Array,
    first: Array,
    state: tuple,
) -> tuple:
    """Run a cell over a sequence.

    Args:
        cell: the cell.
        kernel: [F, gates * F] weights of the output before.
        bias: [gates * F].
        x: [T, N, gates * F] gates of the inputs.
        first: [T, N] bool, True where an episode begins.
        state: arrays [N, F] before the first step.

    Returns:
        States [T, N, F] after each step.
    """

    def step(state, inputs):
        x, first = inputs
        before = emptied(state, first)
        output_gates = gates_of(state, first, kernel, bias)
        after = cell.step(before, x.astype(bias.dtype), output_gates)
        return after, after

    _, states = unrolled_scan(step, state, (x, first), on_cpu=4)
    return states


def emptied(state: tuple, first: Array) -> tuple:
    """Replace the state by zeros where an episode begins."""
    return jax.tree.map(lambda x: jnp.where(first[..., None], 0.0, x), state)


def gates_of(
    state: tuple,
    first: Array,
    kernel: Array,
    bias: Array,
) -> Array:
    """Gates [..., gates * F] of the output before.

    They are in full precision: gates of cells that remember for long are near 1, where half
    precision has few numbers.
    """
    product = state[0].astype(kernel.dtype) @ kernel
    return jnp.where(first[..., None], 0.0, product) + bias


def _forward(
    cell: Cell,
    kernel: Array,
    bias: Array,
    x: Array,
    first: Array,
    state: tuple,
) -> tuple[tuple, tuple]:
    states = scan_cells(cell, kernel, bias, x, first, state)
    return states, (kernel, bias, x, first, state, states)


def _backward(
    cell: Cell,
    saved: tuple,
    grads: tuple,
) -> tuple:
    kernel, bias, x, first, state, states = saved

    def shifted(x: Array, after: Array) -> Array:
        return jnp.concatenate([x[None], after[:-1]])

    before = jax.tree.map(shifted, state, states)
    before = emptied(before, first)
    gates, pull_gates = jax.vjp(partial(gates_of, before, first), kernel, bias)
    inputs = before, x.astype(bias.dtype), gates

    def step(later, inputs):
        grads, first, *inputs = inputs
        grads = jax.tree.map(jnp.add, grads, later)
        _, pull = jax.vjp(cell.step, *inputs)
        (h, *others), _, gates_grad = pull(grads)
        h += (gates_grad.astype(kernel.dtype) @ kernel.T).astype(h.dtype)
        return emptied((h, *others), first), grads

    nothing = jax.tree.map(jnp.zeros_like, state)
    state_grad, grads = unrolled_scan(
        step, nothing, (grads, first, *inputs), reverse=True, on_cpu=4
    )
    _, pull = jax.vjp(cell.step, *inputs)
    _, x_grad, gates_grad = pull(grads)
    kernel_grad, bias_grad = pull_gates(gates_grad)
    first_grad = np.zeros(first.shape, jax.dtypes.float0)
    return kernel_grad, bias_grad, x_grad.astype(x.dtype), first_grad, state_grad


scan_cells_fused = jax.custom_vjp(scan_cells, nondiff_argnums=(0,))
"""`scan_cells` with another backward pass: the loop over time carries only the recurrent gradient.

The rest is one batched product for all steps. This takes half of the kernels, and on a CPU a tenth
more time.
"""
scan_cells_fused.defvjp(_forward, _backward)


class RecurrentTorso(nn.Module):
    """Recurrent layers behind a `torso`."""

    torso: nn.Module
    args: Any

    @classmethod
    def of(
        cls,
        args: Any,
        space: Space,
        **overrides: Any,
    ) -> "RecurrentTorso":
        """Make the torso that the flags describe.

        Args:
            args: flags.
            space: space of the observations.
            overrides: fields to set in place of the flags, as in `Torso.of`.
        """
        return cls(Torso.of(args, space, **overrides), args)

    @nn.compact
    def __call__(self, inputs: Inputs, memory: Any) -> tuple[Array, Any]:
        """Features [T, N, size], and the memories [T, N, ...] after each step."""
        args = self.args
        x = self.torso(inputs.obs)
        if args.obs_prev_action_reward:
            x = jnp.concatenate([x, inputs.previous], axis=-1)
        layers = Recurrent(
            kind=args.rnn,
            size=args.rnn_size,
            span=args.rnn_span,
            dtype=args.dtype,
        )
        return layers(x, inputs.first, memory)


def initial_memory(
    kind: Kind,
    size: int,
    layers: int,
    count: int,
) -> tuple:
    """Memory of recurrent layers where episodes begin.

    Args:
        kind: kind of the cells.
        size: width of a layer.
        layers: number of layers.
        count: number N of environments.

    Returns:
        The arrays [N, size] of each layer's cell; () for kind "none".
    """
    if kind == "none":
        return ()
    cell = (jnp.zeros((count, size)),) * CELLS[kind].arrays
    return (cell,) * layers


def orthogonal_gates(key: Array, shape: tuple[int, int]) -> Array:
    """Initialize a kernel [size, gates * size], orthogonal for each gate alone."""
    size, width = shape
    orthogonal = nn.initializers.orthogonal()
    keys = jax.random.split(key, width // size)
    return jnp.concatenate([orthogonal(one, (size, size)) for one in keys], axis=1)


def chrono_biases(
    keep: tuple[int, ...],
    span: int,
    key: Array,
    shape: tuple[int],
) -> Array:
    """Initialize biases so that each cell remembers for a time of its own.

    About a third of a cell's state is left after its time (Tallec and Ollivier 2018). Times are
    uniform between 2 and `span` steps, and 2 for all cells up to a span of 2. If all times were
    short, no gradient would reach back to inputs of long ago.

    Args:
        keep: `Cell.keep`.
        span: longest time in steps.
        key: random key.
        shape: shape of the biases, (gates * size,).

    Returns:
        [gates * size] biases.
    """
    size = shape[0] // len(keep)
    times = jax.random.uniform(key, (size,), minval=1.0, maxval=max(span - 1, 1))
    return jnp.concatenate([sign * jnp.log(times) for sign in keep])
