"""Choice of the devices that train a run, and a check of their memory."""

import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import jax

from pmaprl.cli.checks import multiples_near
from pmaprl.cli.errors import UsageError


class Device(Protocol):
    """Device of JAX, whose own class has no types."""

    id: int
    process_index: int
    platform: str
    device_kind: str

    def memory_stats(self) -> dict[str, int] | None: ...


# A larger number is a typing error; XLA takes the virtual devices beyond it for another process's
MAX_DEVICES = 2048


def choose_devices(
    num_devices: int,
    num_envs: int,
    block: int = 1,
    envs_per_cpu_device: float = 1,
    processes: int = 1,
    shared: str = "--num-envs",
) -> list[Device]:
    """Choose the devices to train on.

    CPU devices are virtual and made here, unless JAX has already started.

    Args:
        num_devices: number of devices. 0: the largest number of accelerators, or of CPU cores (one
            for each of several processes), that divides the environments.
        num_envs: number of environments, or of whatever else is `shared`.
        block: number of environments that no device boundary may cut.
        envs_per_cpu_device: fewest environments of each core, if there are several.
        processes: number of processes, as far as it is known.
        shared: flag that says what devices share.

    Returns:
        The devices, as many of each process, one process after another.

    Raises:
        UsageError: there are too few devices, or they do not divide what is shared. The sentence
            has the numbers that would work.
    """
    fewest = num_devices or processes
    several = jax.distributed.is_initialized()
    counts = range(processes, min(num_envs, MAX_DEVICES) + 1, processes)
    shares = [count for count in counts if num_envs % (count * block) == 0]
    if fewest not in shares:
        blocks = ""
        if block > 1:
            blocks += f", in blocks of {block} that give all minibatches equal parts"
        if processes > 1:
            blocks += f", as many in each of {processes} processes"
        ways = []
        if fewest % processes == 0 and shared == "--num-envs":
            ways.append(f"{shared} {multiples_near(num_envs, fewest * block)}")
        if shares:
            ways.append(f"--num-devices {', '.join(map(str, shares[:12]))}")
        problem = f"--num-devices {fewest} does not divide {shared} {num_envs}{blocks}"
        raise UsageError(f"{problem}: {', or '.join(ways)}")
    cores = _num_cores()
    worthwhile = []
    for count in shares:
        if count <= cores and count * envs_per_cpu_device <= num_envs:
            worthwhile.append(count)
    worthwhile = worthwhile or shares[:1]
    wanted = num_devices or (processes if several else worthwhile[-1])
    _make_cpu_devices(wanted // processes)
    groups = _devices_of_processes()
    if processes != len(groups):  # the processes have found each other by themselves
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


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def choose_roles(
    actors: tuple[int, ...],
    learners: tuple[int, ...],
) -> tuple[list[Device], list[Device]]:
    """Choose the devices to act on and those to learn on, which may overlap.

    CPU devices are virtual, as in `choose_devices`.

    Args:
        actors: indices of the devices to act on. Default: the first.
        learners: indices of the devices to learn on. Default: all accelerators, or the first CPU
            device.

    Returns:
        Devices of this process to act on, and devices of every process to learn on, one process
        after another.

    Raises:
        UsageError: a device does not exist.
    """
    _make_cpu_devices(max((*actors, *learners), default=0) + 1)
    groups = _devices_of_processes()
    fewest = min(map(len, groups))
    if missing := [index for index in (*actors, *learners) if index >= fewest]:
        what = f"there is no device {missing[0]} for --actor-devices or --learner-devices"
        raise UsageError(f"{what}: JAX has {_what_there_is(groups)}, numbered from 0")
    local_devices = groups[jax.process_index()]
    every = range(1 if groups[0][0].platform == "cpu" else fewest)
    to_act = [local_devices[index] for index in actors or (0,)]
    to_learn = [group[index] for group in groups for index in learners or every]
    return to_act, to_learn


def _make_cpu_devices(count: int) -> None:
    is_set = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if count > MAX_DEVICES or is_set:
        return
    with suppress(RuntimeError):  # JAX has started in this process: its devices are what they are
        jax.config.update("jax_num_cpu_devices", count)


# JAX's settings with the value that a setting may not have, and the reason
UNUSABLE = {
    "jax_numpy_rank_promotion": ("raise", "they add numbers to arrays"),
    "jax_numpy_dtype_promotion": ("strict", "they mix whole numbers with others"),
    "jax_enable_x64": (True, "they compute in 32 bits"),
    "jax_no_tracing": (True, "they are traced"),
    "jax_no_execution": (True, "they are executed"),
}
UNUSABLE_FOR_TRAINING = {"jax_disable_jit": (True, "training is compiled")}


def check_settings(unusable: dict[str, tuple[Any, str]] = UNUSABLE) -> None:
    """Raise UsageError if JAX is set to something that programs do not work with."""
    for name, (wrong, why) in unusable.items():
        if getattr(jax.config, name, None) == wrong:
            setting = name.upper() if wrong is True else f"{name.upper()}={wrong}"
            raise UsageError(
                f"{setting} is on, which networks and environments do not work with, as "
                f"{why}: unset it"
            )


def start_jax() -> None:
    """Start JAX with its devices, if it has not started.

    Raises:
        UsageError: it cannot start; the sentence has the reason.
    """
    try:
        jax.local_devices()
    except (RuntimeError, AssertionError) as error:
        platforms = jax.config.values["jax_platforms"]
        what = f"JAX cannot use JAX_PLATFORMS={platforms}" if platforms else "JAX cannot start"
        missing = (
            "there is no such device here, or JAX was installed without it; "
            "JAX_PLATFORMS=cpu works anywhere"
        )
        raise UsageError(f"{what}: {str(error) or missing}") from error


def _devices_of_processes() -> list[list[Device]]:
    """List the devices of each process.

    Raises:
        UsageError: JAX cannot start, or is set to something that no run works with.
    """
    check_settings(UNUSABLE | UNUSABLE_FOR_TRAINING)
    start_jax()
    return [jax.local_devices(process) for process in range(jax.process_count())]


def _what_there_is(groups: list[list[Device]]) -> str:
    where = f"in each of {len(groups)} processes" if len(groups) > 1 else "here"
    return f"{min(map(len, groups))} {groups[0][0].platform} device(s) {where}"


def describe(devices: list[Device]) -> str:
    """Name devices, such as `2 x cpu` or `8 x NVIDIA H100`, and the number of several processes."""
    processes = len({device.process_index for device in devices})
    where = f" in {processes} processes" if processes > 1 else ""
    return f"{len(devices)} x {devices[0].device_kind}{where}"


def memory_of(devices: list[Device]) -> float:
    """Bytes that arrays can take on all these devices together.

    CPU devices have the memory of each process's machine.
    """
    if devices[0].platform != "cpu":
        stats = jax.local_devices()[0].memory_stats() or {}
        return len(devices) * stats.get("bytes_limit", math.inf)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # there is no control group, or it has no limit
        memory = min(memory, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return memory * jax.process_count()


# Fewest bytes that an update keeps of a sample beside its observation: action, reward, value, ...
BESIDE = 32


def check_fits(
    args: Any,
    state: Any,
    batch: Any,
    spec: Any,
    devices: list[Device],
) -> None:
    """Raise UsageError if the run takes more memory than the devices have.

    Args:
        args: flags.
        state: shapes of the state.
        batch: shapes of a batch from the host.
        spec: the environment's spec.
        devices: all devices of the run.
    """
    available = memory_of(devices)
    agents = args.num_agents
    obs = size_of(spec.obs_like)
    state_bytes = size_of((state, batch))
    smaller = "take fewer environments, steps or hidden units"
    if args.is_population:
        groups = len(devices) // args.sharing(len(devices))
        if args.pbt and groups > 1:  # each device has all learners during an exchange
            state_bytes += size_of((state.learner, state.run)) * groups
        smaller = f"at most {int(agents * available / state_bytes):,} members fit"
    elif hasattr(args, "buffer_size"):
        smaller += ", or a smaller --buffer-size"
    episodes = 0 if args.benchmark else args.eval_episodes
    needs = (
        ("the state and the batches of this run take", state_bytes, smaller),
        ("an update takes at least", args.steps_per_update * agents * (obs + BESIDE), smaller),
        ("an evaluation takes at least", episodes * agents * obs, "take fewer --eval-episodes"),
    )
    for what, size, hint in needs:
        if size > available:
            raise UsageError(
                f"{what} {size / 1e9:,.1f} GB, and there are {available / 1e9:,.1f} GB: {hint}"
            )


def size_of(tree: Any) -> int:
    """Bytes of the arrays of a tree."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
