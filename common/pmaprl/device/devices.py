"""Which devices train a run, and whether they have enough memory for it."""

import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax

from pmaprl.cli.checks import multiples_near
from pmaprl.cli.errors import UsageError

# More are a slip of the finger; beyond it XLA takes a process's virtual ones for another process's
MAX_DEVICES = 2048


def choose_devices(
    num_devices: int,
    num_envs: int,
    block: int = 1,
    envs_per_cpu_device: float = 1,
    processes: int = 1,
    shared: str = "--num-envs",
) -> list[jax.Device]:
    """The devices to train on, as many of each process, one process after another.

    They are `num_devices`, or with 0 as many accelerators, or CPU cores (of several processes one
    each), as divide the environments; several cores have `envs_per_cpu_device` or more.
    Environments, or what is `shared`, come in blocks of `block` that no device boundary may cut.
    CPU devices are virtual and made here, for as many `processes` as are known, unless JAX has
    already started. Raises UsageError, with the numbers that would work, where there are too few
    devices or they do not divide what is shared.
    """
    fewest = num_devices or processes
    several = jax.distributed.is_initialized()
    counts = range(processes, min(num_envs, MAX_DEVICES) + 1, processes)
    shares = [count for count in counts if num_envs % (count * block) == 0]
    if fewest not in shares:
        blocks = (
            f", in blocks of {block} that give all minibatches equal parts" if block > 1 else ""
        )
        blocks += f", as many in each of {processes} processes" if processes > 1 else ""
        near = f"{shared} {multiples_near(num_envs, fewest * block)}"
        ways = [near] * (fewest % processes == 0 and shared == "--num-envs")
        ways += [f"--num-devices {', '.join(map(str, shares[:12]))}"] * bool(shares)
        raise UsageError(
            f"--num-devices {fewest} does not divide {shared} {num_envs}{blocks}: "
            f"{', or '.join(ways)}"
        )
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    worthwhile = [
        n for n in shares if n <= cores and n * envs_per_cpu_device <= num_envs
    ] or shares[:1]
    _make_cpu_devices((num_devices or (processes if several else worthwhile[-1])) // processes)
    groups = _devices_of_processes()
    if processes != len(groups):  # which they have found out by themselves
        return choose_devices(
            num_devices, num_envs, block, envs_per_cpu_device, len(groups), shared
        )
    kind = groups[0][0].platform
    most = min(map(len, groups)) * processes
    if num_devices > most:
        raise UsageError(f"--num-devices {num_devices}: JAX has {_what_there_is(groups)}")
    usable = worthwhile if kind == "cpu" and not several else shares
    chosen = num_devices or max(count for count in usable if count <= most)
    return [device for group in groups for device in group[: chosen // processes]]


def choose_roles(
    actors: tuple[int, ...], learners: tuple[int, ...]
) -> tuple[list[jax.Device], list[jax.Device]]:
    """The devices at these indices: of this process, to act on; of every process one after another,
    to learn on.

    They may overlap. Without indices the first device of a process acts, and all its accelerators
    or its first CPU device learn. CPU devices are virtual, as above. Raises UsageError for one that
    does not exist.
    """
    _make_cpu_devices(max((*actors, *learners), default=0) + 1)
    groups = _devices_of_processes()
    fewest = min(map(len, groups))
    if missing := [index for index in (*actors, *learners) if index >= fewest]:
        what = f"there is no device {missing[0]} for --actor-devices or --learner-devices"
        raise UsageError(f"{what}: JAX has {_what_there_is(groups)}, numbered from 0")
    own = groups[jax.process_index()]
    every = range(1 if groups[0][0].platform == "cpu" else fewest)
    return [own[i] for i in actors or (0,)], [
        group[i] for group in groups for i in learners or every
    ]


def _make_cpu_devices(count: int) -> None:
    if count > MAX_DEVICES or "xla_force_host_platform_device_count" in os.environ.get(
        "XLA_FLAGS", ""
    ):
        return
    with suppress(RuntimeError):  # JAX has started in this process: its devices are what they are
        jax.config.update("jax_num_cpu_devices", count)


# JAX's settings that programs of networks and environments do not work with, by the values that
# they may not have
UNUSABLE = {
    "jax_numpy_rank_promotion": ("raise", "they add numbers to arrays"),
    "jax_numpy_dtype_promotion": ("strict", "they mix whole numbers with others"),
    "jax_enable_x64": (True, "they compute in 32 bits"),
    "jax_no_tracing": (True, "they are traced"),
    "jax_no_execution": (True, "they are executed"),
}
UNUSABLE_FOR_TRAINING = {"jax_disable_jit": (True, "training is compiled")}


def check_settings(unusable: dict[str, tuple[Any, str]] = UNUSABLE) -> None:
    """Raise UsageError where JAX is set to what programs do not work with."""
    for name, (wrong, why) in unusable.items():
        if getattr(jax.config, name, None) == wrong:
            setting = name.upper() if wrong is True else f"{name.upper()}={wrong}"
            raise UsageError(
                f"{setting} is on, which networks and environments do not work with, as "
                f"{why}: unset it"
            )


def start_jax() -> None:
    """Start JAX with its devices, if it has not started. Raises UsageError with the reason where it
    cannot.
    """
    try:
        jax.local_devices()
    except (RuntimeError, AssertionError) as error:
        platforms = jax.config.jax_platforms
        what = f"JAX cannot use JAX_PLATFORMS={platforms}" if platforms else "JAX cannot start"
        missing = (
            "there is no such device here, or JAX was installed without it; "
            "JAX_PLATFORMS=cpu works anywhere"
        )
        raise UsageError(f"{what}: {str(error) or missing}") from error


def _devices_of_processes() -> list[list[jax.Device]]:
    """The devices of each process. Raises UsageError where JAX cannot start, or is set to what no
    run works with.
    """
    check_settings(UNUSABLE | UNUSABLE_FOR_TRAINING)
    start_jax()
    return [jax.local_devices(process) for process in range(jax.process_count())]


def _what_there_is(groups: list[list[jax.Device]]) -> str:
    where = f"in each of {len(groups)} processes" if len(groups) > 1 else "here"
    return f"{min(map(len, groups))} {groups[0][0].platform} device(s) {where}"


def describe(devices: list[jax.Device]) -> str:
    """Such as `2 x cpu` or `8 x NVIDIA H100`, and in how many processes if in several."""
    processes = len({device.process_index for device in devices})
    return f"{len(devices)} x {devices[0].device_kind}" + (
        f" in {processes} processes" if processes > 1 else ""
    )


def memory_of(devices: list[jax.Device]) -> float:
    """Bytes that arrays can take on all these devices together: of CPUs those of each process's
    machine.
    """
    if devices[0].platform != "cpu":
        return len(devices) * (jax.local_devices()[0].memory_stats() or {}).get(
            "bytes_limit", math.inf
        )
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # where no control group, or none with a limit, is there
        memory = min(memory, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return memory * jax.process_count()


# Bytes at least that an update keeps of a sample beside its observation: action, reward, value and
# so on
BESIDE = 32


def check_fits(args: Any, state: Any, batch: Any, spec: Any, devices: list[jax.Device]) -> None:
    """Raise UsageError where `state` and `batch`, an update or an evaluation take more memory than
    there is.
    """
    available = memory_of(devices)
    agents = args.num_agents
    obs = size_of(spec.obs_like)
    kept = size_of((state, batch))
    smaller = "take fewer environments, steps or hidden units"
    if args.is_population:
        groups = len(devices) // args.sharing(len(devices))
        if args.pbt and groups > 1:  # each device has all learners during an exchange
            kept += size_of((state.learner, state.run)) * groups
        smaller = f"at most {int(agents * available / kept):,} members fit"
    elif hasattr(args, "buffer_size"):
        smaller += ", or a smaller --buffer-size"
    episodes = 0 if args.benchmark else args.eval_episodes
    needs = (
        ("the state and the batches of this run take", kept, smaller),
        ("an update takes at least", args.steps_per_update * agents * (obs + BESIDE), smaller),
        ("an evaluation takes at least", episodes * agents * obs, "take fewer --eval-episodes"),
    )
    for what, size, hint in needs:
        if size > available:
            raise UsageError(
                f"{what} {size / 1e9:,.1f} GB, and there are {available / 1e9:,.1f} GB: {hint}"
            )


def size_of(tree: Any) -> int:
    """Bytes of arrays."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
