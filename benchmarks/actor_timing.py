"""What the benchmarks of algorithms with actors share: `--benchmark` runs, and how acting and learning overlap."""

import contextlib
import io
import json
from types import ModuleType
from typing import Any

ROUNDS = 5


def measure(algorithm: ModuleType, updates: int, **flags: Any) -> dict[str, Any]:
    """The line that `--benchmark` prints."""
    args = algorithm.Args(**flags, benchmark=True, log_interval=10**9)
    args.total_timesteps = updates * args.steps_per_update
    line = io.StringIO()
    with contextlib.redirect_stdout(line):
        algorithm.train(args)
    return json.loads(line.getvalue())


def measure_overlap(algorithm: ModuleType, updates: int, flags: dict[str, Any]) -> dict[str, float]:
    """Milliseconds per update of actor, learner and both at once, where the first two are about equal.

    The environment's step sleeps. The median of several rounds: the speed of a shared machine changes between two
    measurements.
    """
    args = algorithm.Args(**flags)
    measure(algorithm, 2, **flags, serial=True)  # actors compile when they first act, which later ones find done
    alone = busy(updates, measure(algorithm, updates, **flags, serial=True))
    sleep = max(alone["learner"] - alone["actor"], 0.0) / args.num_steps / args.envs_per_actor
    flags = flags | {"env_params": json.dumps({"seconds": sleep})}
    rounds = []
    for _ in range(ROUNDS):
        serial, both = measure(algorithm, updates, **flags, serial=True), measure(algorithm, updates, **flags)
        times = busy(updates, serial) | {"together": args.steps_per_update / both["steps_per_second"]}
        ratio = times["together"] / max(times["actor"], times["learner"])
        faster = args.steps_per_update / serial["steps_per_second"] / times["together"]
        times = {f"{name}_ms": round(1e3 * seconds, 1) for name, seconds in times.items()}
        rounds.append(times | {"ratio": round(ratio, 3), "over_serial": round(faster, 2)})
    return sorted(rounds, key=lambda found: found["ratio"])[ROUNDS // 2]


def busy(updates: int, serial: dict[str, Any]) -> dict[str, float]:
    """Seconds per update that actor and learner each take, from a --serial run."""
    actor = serial["time/actor_act"] + serial["time/actor_env_step"]
    return {"actor": actor / updates, "learner": serial["time/learner_update"] / updates}
