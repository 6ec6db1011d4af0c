"""Compile the programs for an H100 and for a TPU, on a machine that has neither, and count kernels:
one table.

    python -m benchmarks.kernels
    python -m benchmarks.kernels --programs ppo ppo-gru pqn --targets h100 \\
        --source ~/purejaxrl ~/purejaxql

Everything is compiled in processes of an environment of its own (jax[cuda12], 6 GB, and libtpu) in
the user's cache folder; nothing is run. What is in a loop counts as often as it runs; where XLA
does not know how often, as in the loop over updates, once.
"""

import importlib
import importlib.metadata
import json
import math
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

from benchmarks.jobs import ROOT, UNCACHED, last_line, make_folder
from benchmarks.peers.__main__ import TRAINERS, checkouts_of, install, python_of
from benchmarks.records import markdown
from pmaprl.cli.checks import check_flags
from pmaprl.cli.command import main, parse
from pmaprl.cli.errors import TrainingError, UsageError
from pmaprl.cli.run_flags import flag_words
from pmaprl.runs.directory import git_hash, write_json

Row = dict[str, Any]
PARTS = "rollout step", "gradient step", "rest"  # of an update
KEY = "program", "target", "function"
UPDATES = 10  # of PureJaxRL and purejaxql, whose training is one program
NUM_ENVS = 1_024
NO_KERNELS = {
    "",
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "partition-id",
}
COLLECTIVES = "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"
SLICES = "dynamic-slice", "slice", "gather", "dynamic-update-slice"
WIDTH = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "bf16": 2,
    "f16": 2,
    "s16": 2,
    "u16": 2,
    "s64": 8,
    "u64": 8,
    "f64": 8,
}

PPO = {"env": "CartPole-v1", "num_steps": 128, "update_epochs": 4, "num_minibatches": 4}
POPULATION = PPO | {"population": 8, "sweep": ("learning_rate=log:1e-4:1e-2",), "pbt": True}
Program = Literal[
    "ppo",
    "ppo-gru",
    "pqn",
    "sac",
    "dqn",
    "appo",
    "ppo-pixels",
    "ppo-masks",
    "ppo-population",
    "ppo-members",
]
PROGRAMS: dict[Program, tuple[str, Row]] = {  # the algorithm, and flags
    "ppo": ("ppo_pmap", PPO),
    "ppo-gru": ("ppo_rnn_pmap", PPO | {"num_minibatches": 8}),
    "pqn": ("pqn_pmap", PPO),
    # One gradient step after each of all envs
    "sac": ("sac_pmap", {"env": "Pendulum-v1", "learning_starts": 0}),
    "dqn": ("dqn_pmap", {"env": "CartPole-v1", "learning_starts": 0, "n_steps": 1}),
    "appo": ("appo_pmap", {"env": "gymnasium:CartPole-v1"}),
    "ppo-pixels": ("ppo_pmap", PPO | {"env": "Breakout-MinAtar"}),
    "ppo-masks": ("ppo_pmap", PPO | {"env": "pgx:tic_tac_toe", "opponent": "self"}),
    "ppo-population": ("ppo_pmap", POPULATION),
    "ppo-members": ("ppo_pmap", POPULATION | {"sharding": "members"}),
}
SHOWN = "ppo", "ppo-gru", "pqn", "sac", "dqn"  # in benchmarks.report, with their peers
PEERS: dict[Program, tuple[str, str]] = {
    "ppo": ("purejaxrl", "ppo"),
    "ppo-gru": ("purejaxrl", "ppo_rnn"),
    "pqn": ("purejaxql", "pqn"),
}
Target = Literal["h100", "8 h100", "tpu v5e-8"]
TARGETS: tuple[Target, ...] = "h100", "8 h100", "tpu v5e-8"
H100 = """\
gpu_device_info { threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block:
49152 shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core:
128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size:
84929347584 shared_memory_per_block_optin: 232448 cuda_compute_capability { major: 9 }
registers_per_core_limit: 65536 registers_per_block_limit: 65536 } platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 } runtime_version { major: 12 minor: 9 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3" """  # XLA's GpuTargetConfigProto
ENVIRONMENT = UNCACHED | {
    "JAX_PLATFORMS": "cpu",
    # Nothing can be tried out
    "XLA_FLAGS": "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
}


@dataclass(kw_only=True)
class Args:
    """Compile the programs of the algorithms for an H100 and for TPUs."""

    programs: tuple[Program, ...] = tuple(PROGRAMS)
    """Programs to compile."""
    targets: tuple[Target, ...] = TARGETS
    """Devices to compile for."""
    source: tuple[str, ...] = ()
    """Checkouts of PureJaxRL and purejaxql, whose programs are compiled for an H100 too."""
    results: str = "benchmarks/results"
    """Folder of kernels.json; what is compiled again is replaced there, and nothing else."""

    def __post_init__(self):
        check_flags(self)
        checkouts_of(self.source)  # raises

    @property
    def checkouts(self) -> dict[str, str]:
        """Paths of the checkouts, by peer."""
        return checkouts_of(self.source)


def compile_all(args: Args) -> None:
    """Run the command. Raises TrainingError where nothing can be installed or compiled."""
    path = Path(args.results) / "kernels.json"
    make_folder(path.parent)
    record = json.loads(path.read_text()) if path.exists() else {"sources": {}, "rows": []}
    known = {itemgetter(*KEY)(row): row for row in record["rows"]}
    packages = packages_needed()
    rows = []
    install("kernels", packages)
    sources = record["sources"] | {
        peer: git_hash(Path(source)) for peer, source in args.checkouts.items()
    }
    for job in jobs_of(args):
        words = [str(python_of("kernels", packages)), "-m", "benchmarks.kernels", json.dumps(job)]
        try:
            row = job | last_line(words, ENVIRONMENT)
        except (TrainingError, UsageError) as error:
            row = job | {"failed": str(error)}
        del row["source"]
        rows.append(row | {"git": git_hash(ROOT)})
        print(table(rows).splitlines()[-1] if len(rows) > 1 else table(rows), flush=True)
        known[itemgetter(*KEY)(row)] = rows[-1]
        write_json(path, {"packages": packages, "sources": sources, "rows": list(known.values())})
    if all("failed" in row for row in rows):
        raise TrainingError("nothing was compiled, see above")


def packages_needed() -> list[str]:
    """List what the kit needs in the versions that it has here, with the compilers; the second two
    are PureJaxRL's.
    """
    names = (
        "flax",
        "optax",
        "chex",
        "gymnax",
        "six",
        "orbax-checkpoint",
        "tyro",
        "matplotlib",
        "pandas",
        "pgx",
    )
    versions = [f"{name}=={importlib.metadata.version(name)}" for name in (*names, "gymnasium")]
    return [
        f"jax[cuda12]=={importlib.metadata.version('jax')}",
        "libtpu",
        "distrax",
        "tfp-nightly",
        *versions,
    ]


def jobs_of(args: Args) -> Iterator[Row]:
    """Each program, which is compiled in a process of its own."""
    for target in args.targets:
        for name in args.programs:
            jobs = [(name, "update", "")] + [(name, "evaluate", "")] * (name != "appo")
            peer, file = PEERS.get(name, ("", ""))
            if target == "h100" and (source := args.checkouts.get(peer)):
                jobs.append((f"{peer} {file}", "update", source))
            for program, function, source in jobs:
                job = {
                    "program": program,
                    "target": target,
                    "function": function,
                    "num_envs": NUM_ENVS,
                }
                yield job | {"source": source}


# ------------------------------------------------------------------------------------ compiling, in
# the other process


def compile_one(job: Row) -> Row:
    """Size and cost of one program."""
    import jax
    from jax.experimental import topologies

    if "h100" in job["target"]:
        count = 8 if job["target"].startswith("8") else 1
        described = {
            "platform": "cuda",
            "topology_name": "h100",
            "target_config": H100,
            "topology": f"1x1x{count}",
        }
    else:
        described = {"platform": "tpu", "topology_name": "v5e:2x4"}
    devices = list(topologies.get_topology_desc(**described).devices)
    # Whatever asks while it is traced
    jax.default_backend = lambda: "gpu" if "h100" in job["target"] else "tpu"
    began = time.perf_counter()
    lowered, sizes = lowered_peer(job, devices) if job["source"] else lowered_program(job, devices)
    compiled = lowered.compile()
    seconds = time.perf_counter() - began
    text = compiled.as_text()
    memory = compiled.memory_analysis()
    found = list(kernels_of(computations(text)))
    return {
        "kernels": sum(kernel.times for kernel in found),
        "by_loop": by_loop(found, *sizes, UPDATES if job["source"] else 1),
        "bytes": sum(kernel.times * kernel.bytes for kernel in found),
        "flops": sum(kernel.times * kernel.flops for kernel in found),
        "collectives": sum(
            kernel.times for kernel in found if kernel.kind.removesuffix("-start") in COLLECTIVES
        ),
        "temporary_bytes": memory.temp_size_in_bytes,
        "compile_seconds": round(seconds, 1),
    }


def lowered_program(job: Row, devices: list[Any]) -> tuple[Any, tuple[int, int, int]]:
    """A program of ours, and the numbers of steps, epochs and minibatches."""
    import jax

    from pmaprl.actors.threads import ActorFlags

    args, programs, members, example = parts_of_run(job["program"], job["num_envs"], devices)
    state = jax.eval_shape(programs.init, members)
    function = getattr(programs, job["function"])
    epochs = getattr(args, "update_epochs", 0)
    minibatches = getattr(args, "num_minibatches", 0)
    steps = 0 if isinstance(args, ActorFlags) else getattr(args, "num_steps", 1)
    return function.lower(state, example), (steps, epochs, minibatches)


def parts_of_run(
    program: Program, num_envs: int, devices: list[Any], more: Row | None = None
) -> tuple[Any, ...]:
    """Make the parts of a run of one of PROGRAMS: flags, programs, what they begin from, and what
    `update` takes beside.

    Args:
        program: Its name.
        num_envs: Environments, or those of an actor.
        devices: Where it is to run.
        more: Flags in place of those that it has.
    """
    import numpy as np

    from pmaprl import training
    from pmaprl.actors.threads import ActorFlags

    name, flags = PROGRAMS[program]
    module = importlib.import_module(f"pmaprl.algos.{name}")
    flags = flags | (more or {})
    if "learning_starts" in flags:
        flags = flags | {"utd_ratio": 1 / num_envs, "buffer_size": 64 * num_envs}
    flags = flags | {
        "envs_per_actor" if name == "appo_pmap" else "num_envs": num_envs,
        "tuned": False,
    }
    args = parse(module.Args, flag_words(flags))
    if isinstance(args, ActorFlags):
        args = args.among(1)
        env = training.inspect_env(args)
        driver = training.host_driver(module.make_algorithm(args, env.spec), args, env.spec)
        programs = training.programs_over_learners(driver, devices)
        example = training.example_batch(args, env, driver, len(devices))
    else:
        env = training.run_env(args, training.make(args.env))
        example = np.int32(0)
        programs = training.for_seeds(module.make_algorithm(args, env.spec), args, env)
        programs = training.over_devices(programs, devices, args.sharding)
    return (
        args,
        programs,
        training.members_on_devices(args.members, len(devices), args.sharding),
        example,
    )


def lowered_peer(job: Row, devices: list[Any]) -> tuple[Any, tuple[int, int, int]]:
    """Training of PureJaxRL or purejaxql for some updates, with our sizes."""
    import jax
    from flax import linen

    sys.path.insert(0, str(TRAINERS))
    import train_pure as trainer

    linen.GRUCell = trainer.GRUCell
    peer, name = job["program"].split()
    program: Program = next(ours for ours, theirs in PEERS.items() if theirs == (peer, name))
    _, flags = PROGRAMS[program]
    steps = flags["num_steps"] * job["num_envs"]
    sizes = ("num_steps", "update_epochs", "num_minibatches")
    config = {name.upper(): flags[name] for name in sizes} | {"ENV_NAME": flags["env"]}
    config |= {"NUM_ENVS": job["num_envs"], "TOTAL_TIMESTEPS": UPDATES * steps}
    module, config = trainer.trained_by(job["source"], name, config)
    key = jax.ShapeDtypeStruct(
        (2,), "uint32", sharding=jax.sharding.SingleDeviceSharding(devices[0])
    )
    counts = flags["num_steps"], flags["update_epochs"], flags["num_minibatches"]
    return jax.jit(module.make_train(config)).lower(key), counts


# --------------------------------------------------------------------------------------- reading a
# compiled program


class Kernel(NamedTuple):
    """An operation that the device is given by itself."""

    kind: str
    loops: tuple[int, ...]  # how often those around it run, the loop over updates left out
    bytes: int  # read and written, each time
    flops: int  # of a product of matrices

    @property
    def times(self) -> int:
        return math.prod(self.loops)


class Operation(NamedTuple):
    """A line of XLA's text."""

    kind: str
    # Bytes of a number, and shape, of each result but workspace
    shapes: list[tuple[int, tuple[int, ...]]]
    operands: list[str]
    line: str

    @property
    def bytes(self) -> int:
        return sum(width * math.prod(shape) for width, shape in self.shapes)


def computations(program: str) -> dict[str, dict[str, Operation]]:
    """The computations of a compiled program by name, the entry as ENTRY, and their operations by
    name.
    """
    found = {}
    body = {}
    for line in program.splitlines():
        if heading := re.match(r"(ENTRY )?%?([\w.-]+) .*\{$", line):
            body = found["ENTRY" if heading[1] else heading[2]] = {}
        elif matched := re.match(r"\s+(?:ROOT )?%?([\w.-]+) = (.*)", line):
            kind = re.search(r" ([a-z][a-z0-9-]*)\((.*)", matched[2]) or ["", "", ""]
            of_result = matched[2][: matched[2].find(f" {kind[1]}(")]
            shapes = re.findall(r"\b([a-z]+\d*)\[([\d,]*)\]", of_result)
            shapes = [
                (WIDTH.get(name, 4), tuple(map(int, filter(None, dims.split(",")))))
                for name, dims in shapes
            ]
            shapes = shapes[:1] if kind[1] == "custom-call" else shapes
            operands = re.findall(r"%([\w.-]+)", kind[2].split("), ")[0])
            body[matched[1]] = Operation(kind=kind[1], shapes=shapes, operands=operands, line=line)
    return found


def kernels_of(
    found: dict[str, dict[str, Operation]], name: str = "ENTRY", loops: tuple = ()
) -> Iterator[Kernel]:
    """The kernels of one of a program's computations; of a condition those of the branch that has
    most.
    """
    for operation in found.get(name, {}).values():
        kind = operation.kind
        line = operation.line
        called = re.findall(
            r"(?:body|to_apply|true_computation|false_computation)=%?([\w.-]+)", line
        )
        for names in re.findall(r"branch_computations=\{(.*?)\}", line):
            called += re.findall(r"[\w.-]+", names)
        if kind == "while":
            times = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
            yield from kernels_of(found, called[0], (*loops, int(times[1]) if times else 1))
        elif kind in ("call", "conditional"):
            yield from max((list(kernels_of(found, branch, loops)) for branch in called), key=len)
        # The end of what `-start` began
        elif kind not in NO_KERNELS and not kind.endswith("-done"):
            yield Kernel(
                kind=kind,
                loops=loops,
                bytes=_traffic(found, name, operation),
                flops=_products(found[name], operation),
            )


def _traffic(found: dict[str, dict[str, Operation]], name: str, operation: Operation) -> int:
    """Bytes that an operation reads and writes; of what it slices or updates in place, only that
    part.
    """
    inside = found.get((re.search(r" calls=%?([\w.-]+)", operation.line) or ["", ""])[1])
    if inside is None:
        return operation.bytes + sum(
            found[name][x].bytes for x in operation.operands if x in found[name]
        )
    total = operation.bytes
    for x, about in inside.items():
        if about.kind == "parameter":
            total += _read(inside, x)
        elif about.kind == "dynamic-update-slice" and about.bytes <= total:
            total -= about.bytes - inside[about.operands[1]].bytes
    return total


def _read(inside: dict[str, Operation], name: str) -> int:
    """Bytes of an operand that a kernel reads."""
    total = 0
    for user, about in inside.items():
        if about.kind == "dynamic-update-slice" and about.operands[0] == name:
            total += inside[about.operands[1]].bytes
        elif about.kind == "bitcast" or (about.kind in SLICES and about.operands[:1] == [name]):
            total += name in about.operands and (_read(inside, user) or about.bytes)
        elif name in about.operands:
            total += inside[name].bytes
    return min(total, inside[name].bytes)


def _products(body: dict[str, Operation], operation: Operation) -> int:
    contracted = re.search(r'lhs_contracting_dim(?:ension)?s"?[:=][\[{]"?(\d+)', operation.line)
    if not contracted or operation.operands[0] not in body:
        return 0
    of_left = body[operation.operands[0]].shapes[0][1]
    return 2 * math.prod(operation.shapes[0][1]) * of_left[int(contracted[1])]


def count_kernels(program: str) -> int:
    """How many kernels a compiled program has, in XLA's text."""
    return sum(kernel.times for kernel in kernels_of(computations(program)))


def by_loop(
    kernels: list[Kernel], steps: int, epochs: int, minibatches: int, updates: int = 1
) -> dict[str, float]:
    """Kernels of a step of the rollout, of a gradient step, and of the rest of an update."""
    if not steps:  # actors step the environments, and updates are no loop
        return {
            "updates": updates,
            "rollout step": 0,
            "gradient step": 0,
            "rest": sum(k.times for k in kernels),
        }
    inside = [k._replace(loops=k.loops[1:]) for k in kernels if k.loops]
    rollout = sum(k.times for k in inside if k.loops[:1] == (steps,) and steps > 1)
    gradient = sum(
        k.times for k in inside if k.loops[:2] == (epochs, minibatches) or (not epochs and k.loops)
    )
    each = {
        "rollout step": rollout / steps,
        "gradient step": gradient / max(epochs * minibatches, 1),
    }
    return {"updates": updates} | each | {"rest": sum(k.times for k in inside) - rollout - gradient}


def table(rows: list[Row]) -> str:
    """The rows as Markdown; a peer's is of UPDATES updates, ours of one."""
    names = (
        *KEY,
        "kernels",
        "collectives",
        "bytes",
        "flops",
        "temporary_bytes",
        "compile_seconds",
        "failed",
    )
    every = [[row.get(name, "") for name in names] for row in rows]
    shown = [
        [x if isinstance(x, str) else f"{x:,}" if x < 1e6 else f"{x:.3g}" for x in cells]
        for cells in every
    ]
    return markdown(names, shown)


def parts(record: Row) -> str:
    """Kernels of an update on one H100, in all and of each part, as Markdown."""
    lines = []
    shown = [*SHOWN, *map(" ".join, PEERS.values())]
    for row in record["rows"]:
        of_update = (row["target"], row["function"]) == ("h100", "update")
        if of_update and row["program"] in shown and "failed" not in row:
            loops = row["by_loop"]
            counts = row["kernels"] / loops["updates"], *(loops[part] for part in PARTS)
            lines.append([row["program"], *(f"{count:,.0f}" for count in counts)])
    return markdown(["program", "kernels", *PARTS], lines)


if __name__ == "__main__" and sys.argv[1:2] and sys.argv[1].startswith("{"):
    print(json.dumps(compile_one(json.loads(sys.argv[1]))))
elif __name__ == "__main__":
    main(compile_all, parse(Args))
