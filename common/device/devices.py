"""Which devices train a run, and whether they have enough memory for it.

As many as pay off, or as the flags say; where that does not work, the numbers that would.
"""

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.interpreters.partial_eval import dce_jaxpr

from common.cli.checks import multiples_near
from common.cli.errors import UsageError

MAX_DEVICES = 4096  # more are a slip of the finger, and as virtual ones would exhaust the machine
MAX_CPU_DEVICES = 2048  # virtual ones of a process; XLA takes what is beyond for another process's


def choose_devices(
    num_devices: int,
    num_envs: int,
    block: int = 1,
    envs_per_cpu_device: float = 1,
    num_processes: int = 1,
) -> list[jax.Device]:
    """The devices to train on, those of every process behind those of the one before and as many.

    They are `num_devices`, or with 0 all accelerators, or the CPU cores that pay off, of several processes one each.
    Environments come in blocks of `block` that no device boundary may cut. A CPU device pays off from
    `envs_per_cpu_device` environments on. On a CPU the devices are virtual and are made here, for `num_processes` if
    they are known, unless JAX has already started; then the existing ones are used. Raises UsageError, with the numbers
    that would work, where there are too few devices or they do not divide the environments.
    """
    processes = max(num_processes, 1)
    counts = range(processes, min(num_envs, MAX_DEVICES) + 1, processes)
    shares = [count for count in counts if num_envs % (count * block) == 0]
    blocks = f", in blocks of {block} that give all minibatches equal parts" if block > 1 else ""
    if not shares and processes > 1:
        raise UsageError(
            f"--num-envs {num_envs} cannot be split evenly over {processes} processes{blocks}: take --num-envs "
            f"{multiples_near(num_envs, processes * block)}"
        )
    if num_devices % processes:
        raise UsageError(
            f"--num-devices {num_devices} counts the devices of all {processes} processes, which have as many each: "
            f"take {multiples_near(num_devices, processes)}"
        )
    if num_devices and num_devices not in shares:
        raise UsageError(
            f"--num-devices {num_devices} does not divide --num-envs {num_envs}{blocks}: take --num-envs "
            f"{multiples_near(num_envs, num_devices * block)}, or --num-devices {', '.join(map(str, shares[:12]))}"
        )
    several = jax.distributed.is_initialized()
    worthwhile = [n for n in shares if n <= _cores() and n * envs_per_cpu_device <= num_envs] or shares[:1]
    _make_cpu_devices((num_devices or (processes if several else worthwhile[-1])) // processes)
    devices = _local_devices()
    if processes != jax.process_count():  # which they have found out by themselves
        return choose_devices(num_devices, num_envs, block, envs_per_cpu_device, jax.process_count())
    groups = _of_processes(processes)
    kind, most = devices[0].platform, min(map(len, groups)) * processes
    if num_devices > most:
        where = f"in each of {processes} processes" if several else "here"
        raise UsageError(f"--num-devices {num_devices}: JAX has {most // processes} {kind} device(s) {where}")
    usable = worthwhile if kind == "cpu" and not several else shares
    chosen = num_devices or max(count for count in usable if count <= most)
    return [device for group in groups for device in group[: chosen // processes]]


def share_members(num_devices: int, num_agents: int) -> list[jax.Device]:
    """The devices to train on where each has agents of its own, with all of their environments.

    They are `num_devices`, or with 0 as many accelerators or CPU cores as divide the agents. Raises UsageError, with
    the numbers that would work, as `choose_devices` does.
    """
    shares = [count for count in range(1, min(num_agents, MAX_DEVICES) + 1) if num_agents % count == 0]
    if num_devices and num_devices not in shares:
        raise UsageError(
            f"--num-devices {num_devices} does not divide the {num_agents:,} agents, of which --sharding members gives "
            f"each device as many: take --num-devices {', '.join(map(str, shares[:12]))}"
        )
    return choose_devices(num_devices, num_agents)


def choose_roles(actors: tuple[int, ...], learners: tuple[int, ...]) -> tuple[list[jax.Device], list[jax.Device]]:
    """The devices at these indices, to act on, of this process, and to learn on, of every process one after another.

    They may overlap. Without indices the first device acts, and all accelerators or the first CPU device learn, in each
    process. On a CPU the devices are virtual and are made here, unless JAX has already started. Raises UsageError for
    one that does not exist.
    """
    if too_large := [index for index in (*actors, *learners) if index >= MAX_DEVICES]:
        raise UsageError(f"--actor-devices and --learner-devices go up to {MAX_DEVICES - 1}, got {too_large[0]}")
    _make_cpu_devices(max((*actors, *learners), default=0) + 1)
    devices = _local_devices()
    groups = _of_processes(jax.process_count())
    fewest = min(map(len, groups))
    missing = [index for index in (*actors, *learners) if index >= fewest]
    if missing:
        where = f"in each of {len(groups)} processes" if len(groups) > 1 else "here"
        have = f"JAX has {fewest} {devices[0].platform} device(s) {where}, numbered from 0"
        raise UsageError(f"there is no device {missing[0]} for --actor-devices or --learner-devices: {have}")
    every = range(1 if devices[0].platform == "cpu" else fewest)
    return [devices[i] for i in actors or (0,)], [group[i] for group in groups for i in learners or every]


def _make_cpu_devices(count: int) -> None:
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    with suppress(RuntimeError):  # JAX has started in this process: its devices are what they are
        jax.config.update("jax_num_cpu_devices", min(count, MAX_CPU_DEVICES))


def _of_processes(count: int) -> list[list[jax.Device]]:
    """The devices of each process."""
    return [[device for device in jax.devices() if device.process_index == process] for process in range(count)]


def _local_devices() -> list[jax.Device]:
    refused = {"jax_enable_x64": "training computes in 32 bits", "jax_disable_jit": "training is compiled"}
    for switch, why in refused.items():
        if getattr(jax.config, switch):
            raise UsageError(f"{switch.upper()} is on, and {why}: unset it, or jax.config.update({switch!r}, False)")
    try:
        return jax.local_devices()
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"JAX cannot use JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')}: {error}") from error


def describe(devices: list[jax.Device]) -> str:
    """Such as `2 x cpu` or `8 x NVIDIA H100`, and in how many processes if in several."""
    processes = len({device.process_index for device in devices})
    return f"{len(devices)} x {devices[0].device_kind}" + (f" in {processes} processes" if processes > 1 else "")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_of(devices: list[jax.Device]) -> float:
    """Bytes that arrays can take on all these devices together.

    On a CPU those of the machine or of the container; of several processes each has one of its own.
    """
    if devices[0].platform != "cpu":
        return len(devices) * (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", math.inf)
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    cgroup = Path("/sys/fs/cgroup/memory.max")
    if cgroup.exists() and cgroup.read_text().strip().isdigit():
        limits.append(int(cgroup.read_text()))
    return min(limits) * jax.process_count()


LARGE = 0.02
"""Share of the memory from which on observations of an update, or of an evaluation, are worth a closer look."""
MATERIALISED = "scan", "while", "dot_general", "conv_general_dilated"
"""Operations whose inputs and outputs are arrays in memory, whatever a compiler makes of the others."""


def shapes_of(programs: Any, members: Any) -> Any:
    """Shapes of the state of a run. Raises UsageError where there are none that large."""
    try:
        return jax.eval_shape(programs.init, members)
    except TypeError as error:
        if "every element be an integer type" not in str(error):  # JAX's words for over 2 ** 63
            raise
        raise UsageError("these sizes make arrays of more numbers than any memory has; take smaller ones") from error


def check_fits(args: Any, programs: Any, state: Any, example: Any, env: Any, devices: list[jax.Device]) -> None:
    """Raise UsageError where a run's `state`, or at some moment an update or an evaluation, takes more than there is.

    `example` has the shapes of what `update` takes beside the state. What programs hold is looked up only where
    observations of `env`, which has an `obs_like`, say that it may be much: it takes as long as to trace them.
    """
    available, episodes = memory_of(devices), 0 if args.benchmark else args.eval_episodes
    needs = {"the state and the batches of this run take": _size((state, example))}
    if max(args.steps_per_update, episodes) * args.num_agents * _size(env.obs_like) > LARGE * available:
        needs["an update takes at least"] = _peak_bytes(programs.update, state, example) * len(devices)
        if programs.evaluate and episodes:
            needs["an evaluation takes at least"] = _peak_bytes(programs.evaluate, state, np.int32(0)) * len(devices)
    for what, size in needs.items():
        if size > available:
            smaller = "fewer --eval-episodes" if "evaluation" in what else "fewer environments, steps or hidden units"
            raise UsageError(f"{what} {size / 1e9:,.1f} GB, and there are {available / 1e9:,.1f} GB: take {smaller}")


def _peak_bytes(program: Any, *inputs: Any) -> int:
    """Bytes that a program, on each device, has to have at once: inputs of one of its operations, or outputs, which
    may take their place.
    """
    traced = jax.make_jaxpr(program)(*inputs).jaxpr
    needed, _ = dce_jaxpr(traced, [True] * len(traced.outvars))
    operations = _operations(needed)
    return max((_size([x.aval for x in some]) for one in operations for some in (one.invars, one.outvars)), default=0)


def _operations(jaxpr: Any) -> Iterator[Any]:
    """Those in a program, and in what it calls, that hold what they take and give."""
    for operation in jaxpr.eqns:
        if operation.primitive.name in MATERIALISED:
            yield operation
        for inner in jax.tree.leaves(operation.params, is_leaf=_is_program):
            if _is_program(inner):
                yield from _operations(getattr(inner, "jaxpr", inner))


def _is_program(x: Any) -> bool:
    return hasattr(x, "eqns")


def _size(tree: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def check_size(args: Any, state: Any, devices: list[jax.Device]) -> dict[str, str]:
    """How many members a population has, and what they take. Raises UsageError where the devices do not have that.

    `state` has the shapes of theirs.
    """
    if not args.is_population:
        return {}
    groups = args.groups(len(devices))
    size, available = _bytes(state) * args.sharing(len(devices)), memory_of(devices)
    if groups > 1 and args.pbt:  # each device has all learners during an exchange
        size += _bytes((state.learner, state.run)) * groups
    if size > available:
        raise UsageError(
            f"{args.num_agents:,} members of {size / args.num_agents / 1e6:,.1f} MB are {size / 1e9:,.1f} GB, and "
            f"there are {available / 1e9:,.1f} GB: at most {int(args.num_agents * available / size):,} members fit"
        )
    differ = f", which differ in {', '.join(args.members.hyper)}" if args.members.hyper else ""
    return {"members": f"{args.num_agents:,}{differ}; their states take {size / 1e6:,.1f} MB"}


def _bytes(state: Any) -> int:
    """Of what a device has, or of what devices share between them."""
    return sum(x.size // len(x) * x.dtype.itemsize for x in jax.tree.leaves(state))
