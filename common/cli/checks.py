"""Checks of flags: their types, whole numbers in any spelling, bounds, and hints for flags that do not exist."""

import bisect
import dataclasses
import difflib
import functools
import math
from contextlib import suppress
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import tyro

from common.cli.errors import UsageError

LARGEST = 2**31 - 1
"""What the devices can count up to."""


class Bounds(NamedTuple):
    """Of a number, or of each of several, which is finite too. A whole number is at most LARGEST if nothing is said."""

    at_least: float = -math.inf
    at_most: float = math.inf
    above: float = -math.inf


class Swept(NamedTuple):
    """Members of a population may differ in this number; --pbt multiplies or divides it by a factor."""

    by: Literal["factor", "complement", "share"] = "factor"  # complement: 1 - x in place of x; share: at most 1


Count = Annotated[int, Bounds(at_least=1)]
CountOrZero = Annotated[int, Bounds(at_least=0)]
Counts = tuple[Count, ...]
Steps = Annotated[int, Bounds(at_least=1, at_most=10**18)]
StepsOrZero = Annotated[int, Bounds(at_least=0, at_most=10**18)]
Timeout = Annotated[float, Bounds(above=0)]
Seconds = Annotated[float, Bounds(at_least=0)]
Ratio = Annotated[float, Bounds(above=0)]
Fraction = Annotated[float, Bounds(at_least=0, at_most=1)]
Finite = Annotated[float, Bounds()]
# Numbers in which members of a population may differ, where the algorithm reads them from `now.hp`
Positive = Annotated[float, Bounds(above=0), Swept()]
NonNegative = Annotated[float, Bounds(at_least=0), Swept()]
Discount = Annotated[float, Bounds(at_least=0, at_most=1), Swept("complement")]
AdamBeta = Annotated[float, Bounds(at_least=0, at_most=0.999999), Swept("complement")]
Share = Annotated[float, Bounds(above=0, at_most=1), Swept("share")]
Temperature = Annotated[float, Bounds(at_least=1e-8), Swept()]
Scale = Annotated[float, Bounds(), Swept()]


WORDS = tyro.constructors.ConstructorRegistry()
"""The rule by which tyro leaves it to `check_flags` to refuse words: it says what is wrong as it does in Python."""


@WORDS.primitive_rule
def _numbers_and_choices(
    info: tyro.constructors.PrimitiveTypeInfo,
) -> tyro.constructors.PrimitiveConstructorSpec | None:
    metavar = metavar_of(info.type)
    if not metavar:
        return None  # tyro's own ways, for texts, switches and kinds that are none of ours
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda words: _meant(words[0], info.type),
        is_instance=lambda value: True,
        str_from_instance=lambda value: [str(value)],
    )


def _meant(word: str, kind: Any) -> Any:
    """The number or the choice that `word` stands for; the word itself where it is none."""
    for option in _options(kind):
        if get_origin(option) is Literal:
            named = [choice for choice in get_args(option) if str(choice) == word]
            if named:
                return named[0]
        if option is NoneType and word == "None":
            return None
        with suppress(ValueError, OverflowError):
            if option is int:  # in digits it is exact, however long
                return _whole(float(word) if set(word.lower()) & set(".e") else int(word))
            if option is float:
                return float(word)
    return word


def metavar_of(kind: Any) -> str:
    """What --help shows for a number or a choice; empty for other kinds."""
    if get_origin(kind) is Literal:
        return "{" + ",".join(_choices(kind)) + "}"
    if (options := _options(kind)) != (kind,):
        return "|".join(filter(None, map(metavar_of, options)))
    return {int: "INT", float: "FLOAT"}.get(kind, "")


def optional_word(metavar: str, bare: str) -> Any:
    """The type of a text that may be left out behind its flag, which is `bare` then."""
    spec = tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar=f"[{metavar}]",
        instance_from_str=lambda words: " ".join(words) or bare,
        is_instance=lambda value: isinstance(value, str),
        str_from_instance=lambda value: [value],
    )
    return Annotated[str, spec]


Suite = optional_word("SUITE", bare="all")


def check_flags(args: Any) -> None:
    """Raise UsageError where a value is not of its field's type, or out of its bounds; whole floats become integers.

    Values of kinds that are none of ours (see `_NAMES`) stay as they are.
    """
    for name, kind in kinds_of(type(args)).items():
        setattr(args, name, value := _typed(flag_of(name), getattr(args, name), kind))
        if bounds := note_of(kind, Bounds):
            check_bounds(flag_of(name), value, bounds)


def check_bounds(flag: str, value: Any, bounds: Bounds) -> None:
    """Raise UsageError unless the number, or each of several, is finite and within the bounds; None is nothing."""
    if value in ((), []):
        raise UsageError(f"{flag} needs at least one number")
    at_least, at_most, above = bounds
    for number in value if isinstance(value, tuple | list) else () if value is None else (value,):
        most = LARGEST if isinstance(number, int) and at_most == math.inf else at_most
        if at_least <= number <= most and number > above and abs(number) < math.inf:
            continue
        limits = [("at least", at_least), ("at most", most if number > most else at_most), ("greater than", above)]
        rules = [f"{words} {readable(limit)}" for words, limit in limits if math.isfinite(limit)]
        rules += [] if abs(number) < math.inf and rules else ["finite"]
        raise UsageError(f"{flag} must be {' and '.join(rules)}, got {readable(number)}")


@functools.cache
def sweepable(args_class: type) -> dict[str, str]:
    """The flags in which members of a population may differ, and how --pbt changes each."""
    found = {name: note_of(kind, Swept) for name, kind in kinds_of(args_class).items()}
    return {name: sweep.by for name, sweep in found.items() if sweep}


def multiples_near(number: int, unit: int) -> str:
    """The multiples of `unit` around `number`, in words."""
    near = {max(number // unit, 1) * unit, -(-number // unit) * unit}
    return " or ".join(map(str, sorted(near)))


def divisors_near(number: int, whole: int, each: int) -> list[str]:
    """The divisors of `whole` nearest to `number`, which is none: at most so many below and above."""
    small = [divisor for divisor in range(1, math.isqrt(whole) + 1) if whole % divisor == 0]
    divisors = sorted({*small, *(whole // divisor for divisor in small)})
    place = bisect.bisect(divisors, number)
    return [str(divisor) for divisor in divisors[max(place - each, 0) : place + each]]


@functools.cache
def kinds_of(args_class: type) -> dict[str, Any]:
    """The type of each flag, also where annotations are texts."""
    hints = get_type_hints(args_class, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(args_class)}


def readable(number: float) -> str:
    """A number for a message: whole ones with commas, rounded where they are huge."""
    if not isinstance(number, int):
        return str(number)
    if 10**15 <= abs(number) < 10**300:
        return f"{number:.3g}".replace("e+", "e")
    return shortened(f"{number:,}")


def shortened(text: str) -> str:
    """The text, or its beginning, for a message of one sentence."""
    return text if len(text) <= 60 else f"{text[:57]}..."


def flag_of(name: str) -> str:
    """A flag as it is typed."""
    return "--" + name.replace("_", "-")


def _typed(flag: str, value: Any, kind: Any) -> Any:
    options = _options(kind)
    for option in options:
        try:
            return _read(flag, value, option)
        except UsageError:  # of an element
            raise
        except (ValueError, OverflowError):
            continue
    raise UsageError(f"{flag} must be {' or '.join(map(_described, options))}, got {shortened(repr(value))}")


def _read(flag: str, value: Any, kind: Any) -> Any:
    """`value` as one of that kind. Raises ValueError where it is none, UsageError where an element is not."""
    container, kinds = get_origin(kind), get_args(kind)
    if container in _CONTAINERS:
        return _read_elements(flag, value, container, kinds)
    if container is Literal and value in kinds:
        return kinds[kinds.index(value)]
    if kind is int:
        return _whole(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if container is Literal or kind in _NAMES and not isinstance(value, kind):
        raise ValueError
    return value


def _read_elements(flag: str, value: Any, container: type, kinds: tuple[Any, ...]) -> Any:
    """A container with each element as one of its kind. Raises ValueError where `value` is no such container."""
    if container is dict and isinstance(value, dict):
        return {_typed(flag, key, kinds[0]): _typed(flag, element, kinds[1]) for key, element in value.items()}
    if container is dict or not isinstance(value, (tuple, list)):
        raise ValueError
    if container is list or Ellipsis in kinds:
        kinds = kinds[:1] * len(value)
    return container(_typed(flag, element, kind) for element, kind in zip(value, kinds, strict=True))


def _whole(value: Any) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError
    return value


def _choices(kind: Any) -> list[str]:
    return [str(choice) for choice in get_args(kind) if choice != ""]  # which stands for a flag that is left out


def _described(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(_choices(kind))}"
    return _NAMES.get(kind) or _CONTAINERS[get_origin(kind)]


_NAMES = {int: "a whole number", float: "a number", bool: "True or False", str: "a text", NoneType: "None"}
_CONTAINERS = {tuple: "a sequence", list: "a sequence", dict: "a dictionary"}


def note_of(kind: Any, what: type) -> Any:
    """What the type of a flag, or of its elements, says of it: the last note of that class, or None."""
    if get_origin(kind) is Annotated and (notes := [note for note in kind.__metadata__ if isinstance(note, what)]):
        return notes[-1]
    return next(filter(None, (note_of(part, what) for part in get_args(kind))), None)


def _options(kind: Any) -> tuple[Any, ...]:
    """The kinds that a value may be of."""
    if get_origin(kind) is Annotated:
        return _options(get_args(kind)[0])
    return sum(map(_options, get_args(kind)), ()) if get_origin(kind) in (Union, UnionType) else (kind,)


REMOVED_FLAGS = {
    "anneal_lr": ("lr_schedule", "--lr-schedule linear anneals the learning rate, --lr-schedule constant does not"),
    "num_seeds": ("actor_threads", "one run trains one agent, start a run for each --seed"),
    "num_devices": ("actor_threads", "--actor-devices and --learner-devices name them"),
    "num_envs": ("actor_threads", "--envs-per-actor and --actor-threads say how many there are"),
    "rnn": ("update_epochs", "algos/ppo_rnn_pmap.py is PPO with memory"),
    "opponent": ("num_devices", "algos/ppo_pmap.py has self-play; opponents are random here"),
    "matchmaking": ("opponent", "--opponent members takes its place"),
    "grid": ("sweep", "--sweep without --population trains all combinations of values"),
    "pbt_env_params": ("pbt_evolve", "--pbt-evolve env.NAME takes its place"),
    "coordinator": ("distributed", "--distributed HOST:PORT,ID/COUNT takes its place"),
    "compile_cache": ("env", "JAX_ENABLE_COMPILATION_CACHE=false in the environment turns the cache off"),
    "minibatch_size": ("num_minibatches", "--num-minibatches says into how many the samples of an update are split"),
    "gif": ("actor_threads", "python -m common.play RUN --gif FILE draws an episode afterwards"),
}
REMOVED_FLAGS |= {"batch_size": REMOVED_FLAGS["minibatch_size"], "num_processes": REMOVED_FLAGS["coordinator"]}
for part in ("project", "name", "entity", "run_group"):
    REMOVED_FLAGS[f"wandb_{part.removeprefix('run_')}"] = (
        "wandb",
        f"WANDB_{part.upper()} in the environment takes its place",
    )
"""By the name of a flag: a field of the algorithms that this is for, and what to do."""

NAMES_IN_OTHER_KITS = """
lr=learning_rate policy_lr q_lr, learning_rate=policy_lr q_lr, actor_lr=policy_lr learning_rate, critic_lr=q_lr
learning_rate, n_steps=num_steps, rollout_length=num_steps, unroll_length=num_steps, n_envs=num_envs envs_per_actor,
num_workers=actor_threads num_envs, timesteps=total_timesteps, steps=total_timesteps, num_timesteps=total_timesteps,
total_steps=total_timesteps, n_timesteps=total_timesteps, epochs=update_epochs utd_ratio, n_epochs=update_epochs,
ppo_epoch=update_epochs, minibatch_size=batch_size, clip_coef=clip_eps, clip_range=clip_eps, lam=gae_lambda,
discount=gamma, entropy_coef=ent_coef alpha, ent_coef=alpha, value_coef=vf_coef, gradient_steps=utd_ratio update_epochs,
train_freq=utd_ratio num_steps, net_arch=hidden_sizes, hidden_dim=hidden_sizes, env_id=env, env_name=env,
exp_name=run_dir, log_dir=run_dir, output_dir=run_dir, checkpoint=resume init_from, load=resume init_from, track=wandb,
capture_video=gif
"""
"""Names that CleanRL, Stable-Baselines3, PureJaxRL and others have for flags, and ours, the nearest first."""


def advice_for_removed_flag(args_class: Any, name: str) -> str:
    """What to do instead of the flag `name`, if that is known."""
    field, advice = REMOVED_FLAGS.get(name, ("", ""))
    return advice if hasattr(args_class, field) else ""


def explain_unknown_flag(args_class: Any, flag: str) -> str:
    """Why `args_class` has no such flag, or what may have been meant, in one sentence."""
    name = flag.lstrip("-").replace("-", "_").removeprefix("no_")
    if advice := advice_for_removed_flag(args_class, name):
        return f"there is no --{name.replace('_', '-')} here: {advice}"
    if where := getattr(args_class, "elsewhere", lambda name: "")(name):
        return f"there is no {shortened(flag)} here: it is for environments {where}"
    known = [field.name for field in dataclasses.fields(args_class)]
    ours = dict(pair.split("=") for pair in " ".join(NAMES_IN_OTHER_KITS.split()).split(", "))
    near = [other for other in ours.get(name.lower(), "").split() if other in known]
    near = near or difflib.get_close_matches(name.lower(), known, n=1)
    near = near or [other for other in known if name and name in other][:1]
    flags = " or ".join(f"--{other.replace('_', '-')}" for other in near)
    hint = f"did you mean {flags}?" if near else "--help lists all flags"
    return f"there is no {shortened(flag)} here: {hint}"
