"""Action distributions as small records, and the policy's head, which gives one.

`Categoricals` covers Discrete and MultiDiscrete actions, `Normal` or `SquashedNormal` a Box,
`Joint` several parts. Randomness comes in as an array that `action_noise` draws beforehand: a
rollout draws that of all steps in one pass.
"""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from pmaprl.device.rollout import categorical_noise
from pmaprl.envs import spaces
from pmaprl.envs.masks import MASK, action_scale, legal_actions, to_units, with_a_choice
from pmaprl.envs.spaces import (
    ILLEGAL,
    Box,
    Discrete,
    MultiDiscrete,
    Space,
    encode,
    leaves,
    masks_of_parts,
)

LOG_2PI = math.log(2 * math.pi)


def without_illegal(logits: jax.Array, legal: jax.Array | None) -> jax.Array:
    """Logits, or Q values, [..., n], as low as can be for what is not `legal`."""
    return logits if legal is None else jnp.where(legal, logits, ILLEGAL)


def legal_choices(obs: Any, space: Discrete) -> jax.Array | None:
    """For each of the actions whether it is legal at `obs`, [..., n], all where none is; None
    without a mask.
    """
    legal = legal_actions(obs)
    return None if legal is None else with_a_choice(legal, space.nvec)


class Categoricals(struct.PyTreeNode):
    """Independent categorical components over the last axis; one component is the plain Discrete
    case.
    """

    logits: jax.Array  # [..., sum(nvec)]
    nvec: tuple[int, ...] = struct.field(pytree_node=False)  # number of choices per component
    # Actions are [...] (Discrete) instead of [..., len(nvec)]
    scalar: bool = struct.field(pytree_node=False)
    legal: jax.Array | None = None  # [..., sum(nvec)] bool; the others have probability zero
    # [..., len(nvec)] bool; sums are over these alone, see `restrict_to`
    own: jax.Array | None = None

    def only(self, legal: jax.Array | None) -> "Categoricals":
        """Without the choices that are not `legal`; where a component has none, it keeps all, see
        `with_a_choice`.
        """
        if legal is None:
            return self
        legal = with_a_choice(legal, self.nvec)
        return self.replace(logits=without_illegal(self.logits, legal), legal=legal)

    def sample(self, noise: jax.Array) -> jax.Array:
        """Inverse-CDF sample from `noise` [..., len(nvec)], uniform in (0, 1): one random number
        per component.
        """
        cdfs = [jnp.cumsum(jax.nn.softmax(part), axis=-1) for part in self._parts(self.logits)]
        if self.legal is None:
            return self._join(
                [
                    jnp.sum(cdf[..., :-1] <= noise[..., i : i + 1], axis=-1)
                    for i, cdf in enumerate(cdfs)
                ]
            )
        picks = []
        for i, (cdf, legal) in enumerate(zip(cdfs, self._parts(self.legal), strict=True)):
            # Rounding may let a cdf rise a little at what is illegal, and end below the noise
            found = legal & (cdf > noise[..., i : i + 1])
            last = legal.shape[-1] - 1 - jnp.argmax(legal[..., ::-1], axis=-1)
            picks.append(jnp.where(jnp.any(found, axis=-1), jnp.argmax(found, axis=-1), last))
        return self._join(picks)

    def sample_with_key(self, key: jax.Array) -> jax.Array:
        return self.sample(categorical_noise(key, (*self.logits.shape[:-1], len(self.nvec))))

    def mode(self) -> jax.Array:
        return self._join([jnp.argmax(part, axis=-1) for part in self._parts(self.logits)])

    def log_prob(self, action: jax.Array) -> jax.Array:
        """Sum over components of log p(action), [...]."""
        action = action[..., None] if self.scalar else action
        return self._sum(
            jnp.sum(jax.nn.one_hot(action[..., i], n) * log_p, axis=-1)
            for i, (n, log_p) in enumerate(zip(self.nvec, self._log_probs(), strict=True))
        )

    def entropy(self) -> jax.Array:
        """Sum of the components' entropies in nats, [...]."""
        return self._sum(-jnp.sum(jnp.exp(log_p) * log_p, axis=-1) for log_p in self._log_probs())

    def kl(self, other: "Categoricals") -> jax.Array:
        """KL(self || other) in nats, summed over components, those that are own to either,
        [...].
        """
        pairs = zip(self._log_probs(), other._log_probs(), strict=True)
        both = restrict_to(self, self.own if other.own is None else other.own)
        return both._sum(
            jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1) for log_p, log_q in pairs
        )

    def symmetric_kl_to_uniform(self) -> jax.Array:
        """Half of KL(p || uniform) + KL(uniform || p), summed over components, [...]; uniform over
        what is legal.
        """
        legal = jnp.ones(self.logits.shape, bool) if self.legal is None else self.legal
        terms = []
        for log_p, part in zip(self._log_probs(), self._parts(legal), strict=True):
            n = jnp.maximum(jnp.sum(part, axis=-1, keepdims=True), 1)
            terms.append(
                0.5 * jnp.sum((jnp.exp(log_p) - 1 / n) * (log_p + jnp.log(n)), axis=-1, where=part)
            )
        return self._sum(terms)

    def _parts(self, x: jax.Array) -> list[jax.Array]:
        return jnp.split(x, np.cumsum(self.nvec)[:-1], axis=-1)

    def _log_probs(self) -> list[jax.Array]:
        return [jax.nn.log_softmax(part) for part in self._parts(self.logits)]

    def _sum(self, terms: Iterable[jax.Array]) -> jax.Array:
        """Over components, or over those that are its own; of the terms [...] of each."""
        return sum(
            x if self.own is None else jnp.where(self.own[..., i], x, 0.0)
            for i, x in enumerate(terms)
        )

    def _join(self, picks: list[jax.Array]) -> jax.Array:
        return (picks[0] if self.scalar else jnp.stack(picks, axis=-1)).astype(jnp.int32)


class Normal(struct.PyTreeNode):
    """Independent normal per dimension of the flattened action; not squashed, the environment clips
    to its bounds.

    Parameters and densities are in units of the bounds, actions are the environment's.
    """

    mean: jax.Array  # [..., A] within -1 .. 1 where actions are within their bounds
    log_std: jax.Array  # [..., A]
    own: jax.Array | None = None  # [..., A] bool; sums are over these alone, see `restrict_to`
    # [A] see `action_scale`
    scale: tuple[float, ...] = struct.field(pytree_node=False, default=(1.0,))
    offset: tuple[float, ...] = struct.field(pytree_node=False, default=(0.0,))

    def sample(self, noise: jax.Array) -> jax.Array:
        """Sample from `noise` [..., A], standard normal."""
        return self._action(self.mean + jnp.exp(self.log_std) * noise)

    def sample_with_key(self, key: jax.Array) -> jax.Array:
        return self.sample(jax.random.normal(key, self.mean.shape))

    def mode(self) -> jax.Array:
        return self._action(self.mean)

    def log_prob(self, action: jax.Array) -> jax.Array:
        """Log-density of the (unclipped) action, [...]."""
        z = (to_units(action, self.scale, self.offset) - self.mean) * jnp.exp(-self.log_std)
        return -0.5 * jnp.sum(z**2 + 2 * self.log_std + LOG_2PI, axis=-1, where=self.own)

    def entropy(self) -> jax.Array:
        """Differential entropy in nats, [...]."""
        return jnp.sum(self.log_std + 0.5 * (1 + LOG_2PI), axis=-1, where=self.own)

    def kl(self, other: "Normal") -> jax.Array:
        """KL(self || other) in nats, summed over dimensions, those that are own to either,
        [...].
        """
        own = self.own if other.own is None else other.own
        wider = 2 * (self.log_std - other.log_std)
        z = (self.mean - other.mean) * jnp.exp(-other.log_std)
        return 0.5 * jnp.sum(jnp.expm1(wider) - wider + z**2, axis=-1, where=own)

    def _action(self, x: jax.Array) -> jax.Array:
        return x * jnp.array(self.scale) + jnp.array(self.offset)


class Joint(struct.PyTreeNode):
    """Independent distributions of the parts of an action, a tree as the action is one; what they
    measure is summed.
    """

    parts: Any

    def sample(self, noise: Any) -> Any:
        """Sample from `noise` for each part."""
        return self._map("sample", noise)

    def sample_with_key(self, key: jax.Array) -> Any:
        parts, structure = jax.tree.flatten(self.parts, is_leaf=_is_part)
        keys = [key] if len(parts) == 1 else jax.random.split(key, len(parts))
        return self._map("sample_with_key", jax.tree.unflatten(structure, list(keys)))

    def mode(self) -> Any:
        return self._map("mode")

    def log_prob(self, action: Any) -> jax.Array:
        return self._sum("log_prob", action)

    def entropy(self) -> jax.Array:
        return self._sum("entropy")

    def kl(self, other: "Joint") -> jax.Array:
        return self._sum("kl", other.parts)

    def symmetric_kl_to_uniform(self) -> jax.Array:
        return self._sum("symmetric_kl_to_uniform")

    def _map(self, method: str, *trees: Any) -> Any:
        return jax.tree.map(
            lambda part, *x: getattr(part, method)(*x), self.parts, *trees, is_leaf=_is_part
        )

    def _sum(self, method: str, *trees: Any) -> jax.Array:
        return sum(jax.tree.leaves(self._map(method, *trees)))


def _is_part(x: Any) -> bool:
    return isinstance(x, (Categoricals, Normal))


class SquashedNormal(NamedTuple):
    """Tanh of independent normals. Actions are within -1 .. 1, and flat, [..., A]."""

    mean: jax.Array  # [..., A] of the normal
    log_std: jax.Array  # [..., A]

    @classmethod
    def of(
        cls, outputs: jax.Array, low: float, squash: bool, high: float = 2.0
    ) -> "SquashedNormal":
        """From the outputs [..., 2 * A] of a network: log_std within `low` .. `high` by a tanh,
        else clipped.
        """
        mean, log_std = jnp.split(outputs, 2, axis=-1)
        squashed = low + 0.5 * (high - low) * (jnp.tanh(log_std) + 1)
        return cls(mean, squashed if squash else jnp.clip(log_std, low, high))

    def sample(self, noise: jax.Array) -> jax.Array:
        """Sample from `noise` [..., A], standard normal."""
        return self.sample_with_log_prob(noise)[0]

    def sample_with_log_prob(self, noise: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Actions from standard normal `noise` [..., A], and their log-probabilities [...],
        densities within -1 .. 1.

        The change of variables is taken at the unsquashed u, as 1 - tanh(u)^2 = 4 exp(-2u) / (1 +
        exp(-2u))^2: exact where tanh(u) rounds to 1.
        """
        u = self.mean + jnp.exp(self.log_std) * noise
        normal = -0.5 * (noise**2 + LOG_2PI) - self.log_std
        slope = 2 * (math.log(2) - u - jax.nn.softplus(-2 * u))
        return jnp.tanh(u), jnp.sum(normal - slope, axis=-1)

    def sample_with_key(self, key: jax.Array) -> jax.Array:
        return self.sample(jax.random.normal(key, self.mean.shape))

    def mode(self) -> jax.Array:
        return jnp.tanh(self.mean)


Distribution = Categoricals | Normal | Joint


def restrict_to(policy: Distribution, own: jax.Array | None) -> Distribution:
    """A `policy` whose log-probabilities and entropies are of the components of actions that are
    `own` [..., A].

    Others have chosen the rest, from which no gradient comes. None is all of them; it is all that a
    `Joint` one takes.
    """
    return policy if own is None else policy.replace(own=own)


def encode_action(action: Any, space: Space) -> jax.Array:
    """Sampled actions as network input [..., A]: one-hot, and those of a Box in units of its
    bounds.
    """

    def encoded(leaf, x):
        if isinstance(leaf, Box):
            return to_units(x, *action_scale(leaf))
        # They are flat here
        return encode(x, leaf if isinstance(leaf, Discrete) else MultiDiscrete(leaf.nvec))

    return jnp.concatenate([encoded(leaf, x) for _, leaf, x in leaves(space, action)], axis=-1)


class QHead(nn.Module):
    """Q values [..., n] of Discrete actions; those of actions that are illegal at `obs` are as low
    as can be.
    """

    space: Discrete

    @nn.compact
    def __call__(self, x: jax.Array, obs: Any = None) -> jax.Array:
        return without_illegal(nn.Dense(self.space.n)(x), legal_choices(obs, self.space))


def epsilon_greedy(q: jax.Array, epsilon: float | jax.Array, obs: Any = None) -> Categoricals:
    """The greedy policy of Q values [..., n], which takes any action legal at `obs` with
    probability `epsilon`.
    """
    num_actions = q.shape[-1]
    legal = legal_choices(obs, Discrete(num_actions))
    uniform = (
        1 / num_actions
        if legal is None
        else legal / jnp.maximum(jnp.sum(legal, axis=-1, keepdims=True), 1)
    )
    best = jax.nn.one_hot(jnp.argmax(without_illegal(q, legal), axis=-1), num_actions)
    return Categoricals(
        jnp.log((1 - epsilon) * best + epsilon * uniform), (num_actions,), scalar=True
    ).only(legal)


class PolicyHead(nn.Module):
    """The distribution over actions: categorical, over those that are legal at `obs`, or normal for
    a Box; or joint.

    A normal one is in units of the bounds, see `action_scale`, and no observation changes its
    deviation. The actions of a Box are flat here; the environment shapes them. The gain of 0.01
    makes actions about equally likely at first.
    """

    space: Space

    @nn.compact
    def __call__(self, x: jax.Array, obs: Any = None) -> Distribution:
        init = nn.initializers.orthogonal(0.01)
        legal = legal_actions(obs)
        if not isinstance(self.space, spaces.Leaf):
            parts = []
            for (name, leaf), mask in zip(
                leaves(self.space), masks_of_parts(legal, self.space), strict=True
            ):
                head = PolicyHead(leaf, name=f"part_{name.replace('/', '_')}")
                parts.append(head(x, None if mask is None else {MASK: mask}))
            return Joint(spaces.as_tree(parts, self.space))
        if isinstance(self.space, Box):
            size = math.prod(self.space.shape)
            mean = nn.Dense(size, kernel_init=init)(x)
            log_std = self.param("log_std", nn.initializers.zeros, (size,))
            scale, offset = (tuple(x.tolist()) for x in action_scale(self.space))
            return Normal(
                mean=mean, log_std=jnp.broadcast_to(log_std, mean.shape), scale=scale, offset=offset
            )
        logits = nn.Dense(sum(self.space.nvec), kernel_init=init)(x)
        return Categoricals(logits, self.space.nvec, scalar=isinstance(self.space, Discrete)).only(
            legal
        )
