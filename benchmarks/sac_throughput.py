"""Training speed of SAC, and the share of the machine's matrix-product rate that it reaches; prints one line of JSON.

    python benchmarks/sac_throughput.py
    python benchmarks/sac_throughput.py --num-envs 16 --num-devices 2

Counted are the multiplications and additions of the networks' matrix products in one gradient update: policy and target
Q functions forward at the next observations; Q functions forward and backward; policy and Q functions forward and
backward for the policy's gradient, which leaves out the Q functions' weights.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import tyro

from algos.sac_pmap import ENVS_PER_CPU_DEVICE, Args, make_sac
from benchmarks.timing import matmul_rate, time_training
from common.device.devices import choose_devices
from common.device.sharding import AXIS
from common.envs.environment import Env
from common.envs.registry import make
from common.runs.directory import versions


@dataclass
class Sizes:
    """What to measure."""

    env: str = "Pendulum-v1"
    num_envs: int = 1
    batch_size: int = 256
    utd_ratio: float = 1.0
    hidden_sizes: tuple[int, ...] = (256, 256)
    num_devices: int = 0
    """0 is what training would choose."""
    steps: int = 1_000
    """Environment steps per measurement."""


def main(sizes: Sizes) -> None:
    flags = {name: value for name, value in vars(sizes).items() if name != "steps"}
    args = Args(**flags, total_timesteps=10**7)
    devices = choose_devices(args.num_devices, args.num_envs, args.block, ENVS_PER_CPU_DEVICE)
    env = make(args.env)
    updates, skip = (-(-steps // args.num_envs) for steps in (sizes.steps, args.learning_starts))
    before = matmul_rate()
    compile_seconds, seconds = time_training(make_sac(args, env), env, devices, updates, skip)
    rate = (before + matmul_rate()) / 2
    flops = flops_per_gradient_update(args, env)
    steps_per_second = args.num_envs / seconds
    record = {
        "benchmark": "sac_throughput",
        "versions": versions(),
        "devices": [str(device) for device in devices],
        "sizes": flags,
        "compile_seconds": round(compile_seconds, 2),
        "steps_per_second": round(steps_per_second, 1),
        "gradient_updates_per_second": round(steps_per_second * args.utd_ratio, 1),
        "mflop_per_gradient_update": round(flops / 1e6, 1),
        "gflops": round(flops * steps_per_second * args.utd_ratio / 1e9, 1),
        "matmul_512_gflops": round(rate),
        "share_of_matmul_rate": round(flops * steps_per_second * args.utd_ratio / 1e9 / rate, 3),
    }
    print(json.dumps(record))


def flops_per_gradient_update(args: Args, env: Env) -> float:
    """Of all matrix products, from the shapes of the kernels; layers are counted as if they read a vector."""
    init = jax.vmap(make_sac(args, env).init, axis_name=AXIS)
    params = jax.eval_shape(init, jax.numpy.zeros(1, int)).learner.params  # kernels are [1, in, out]
    actor, critics = (
        sum(2 * x.size for x in jax.tree.leaves(tree) if x.ndim >= 3) for tree in (params.actor, params.critics)
    )
    forward = actor + critics  # policy and targets at the next observations
    learn_q = 3 * critics
    learn_policy = 3 * actor + 2 * critics
    return args.batch_size * (forward + learn_q + learn_policy)


if __name__ == "__main__":
    main(tyro.cli(Sizes))
