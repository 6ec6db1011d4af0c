"""Training speed of PPO with memory beside PureJaxRL's, with PureJaxRL's network; prints one line of JSON.

    python benchmarks/ppo_rnn_beside_purejaxrl.py --source ~/purejaxrl

Both train on the same environment with the same sizes, each in processes of its own, in turns; PureJaxRL in an
environment of its own, with the packages of benchmarks/peers/peers.toml, which are older, and on one device, as it is
written. A turn's speed is the median of some runs, and the better turn of each counts.
"""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import flax.linen as nn
import jax

from algos import ppo_rnn_pmap as ppo
from benchmarks.jobs import ends_with_us
from benchmarks.peers.__main__ import TRAINERS, packages_for
from benchmarks.peers.installation import install, python_of
from benchmarks.records import machine_class
from benchmarks.timing import time_training
from common.cli.checks import Count, check_flags
from common.cli.command import main, parse
from common.cli.errors import TrainingError, UsageError
from common.cli.words import as_words
from common.device.devices import choose_devices
from common.envs.masks import legal_actions
from common.envs.registry import make
from common.nets.heads import PolicyHead
from common.runs.directory import git_hash, versions

PEER = "purejaxrl"
WIDTH = 128  # of every layer of its network, whose cells are GRUs


@dataclass
class Sizes:
    """What to measure."""

    source: str = ""
    """A checkout of PureJaxRL; none measures this kit alone."""
    env: str = "CartPole-v1"
    num_envs: Count = 64
    num_steps: Count = 128
    update_epochs: Count = 4
    num_minibatches: Count = 4
    updates: Count = 20
    """Updates per measurement."""
    turns: Count = 3

    def __post_init__(self):
        check_flags(self)
        if self.source and not (Path(self.source) / "purejaxrl" / "ppo_rnn.py").is_file():
            raise UsageError(
                f"--source has to name a checkout of PureJaxRL, with purejaxrl/ppo_rnn.py in it: {self.source} is none"
            )


class Actor(ppo.Actor):
    """PureJaxRL's: a hidden layer more between memory and policy."""

    @nn.compact
    def __call__(self, inputs: Any, memory: Any) -> tuple:
        x, memory = ppo.remembering_torso(self.args, self.obs_space)(inputs, memory)
        return PolicyHead(self.action_space)(nn.relu(nn.Dense(WIDTH)(x)), legal_actions(inputs.obs)), x, memory


class Critic(ppo.Critic):
    """PureJaxRL's: a hidden layer between the actor's memory and the value."""

    @nn.compact
    def __call__(self, x: jax.Array, memory: Any) -> tuple:
        return nn.Dense(1, name="value")(nn.relu(nn.Dense(WIDTH)(x)))[..., 0], memory


def measure(sizes: Sizes) -> dict[str, Any]:
    """The record of this kit alone, which has PureJaxRL's network in this process from now on."""
    args = ppo.Args(
        env=sizes.env,
        num_envs=sizes.num_envs,
        num_steps=sizes.num_steps,
        update_epochs=sizes.update_epochs,
        num_minibatches=sizes.num_minibatches,
        total_timesteps=10**9,
        hidden_sizes=(WIDTH,),
        rnn_size=WIDTH,
        share_torso=True,
        activation="relu",
    )
    ppo.Actor, ppo.Critic = Actor, Critic
    devices, env = choose_devices(0, args.num_envs, args.block), make(args.env)
    timing = time_training(ppo.make_ppo_rnn(args, env), env, devices, sizes.updates)
    return {
        "benchmark": "ppo_rnn_beside_purejaxrl",
        "versions": versions(),
        "devices": [str(device) for device in devices],
        "sizes": {name: value for name, value in vars(sizes).items() if name != "source"},
        "compile_seconds": round(timing.compile_seconds, 2),
        "steps_per_second": round(args.steps_per_update / timing.update_seconds),
    }


def compare(sizes: Sizes) -> dict[str, Any]:
    """The record of both. Raises TrainingError where a process fails."""
    packages = packages_for(PEER, "cpu" if machine_class().startswith("cpu-") else "gpu")
    install(PEER, packages)
    flags = {"ENV_NAME": sizes.env, "NUM_ENVS": sizes.num_envs, "NUM_STEPS": sizes.num_steps}
    flags |= {"UPDATE_EPOCHS": sizes.update_epochs, "NUM_MINIBATCHES": sizes.num_minibatches}
    flags["TOTAL_TIMESTEPS"] = sizes.updates * sizes.num_envs * sizes.num_steps
    theirs = [str(python_of(PEER, packages)), str(TRAINERS / "time_purejaxrl_rnn.py"), sizes.source, json.dumps(flags)]
    ours = [sys.executable, __file__, *as_words({**vars(sizes), "source": ""})]
    turns = [(said_by(ours), said_by(theirs)) for _ in range(sizes.turns)]
    best = max((one for one, _ in turns), key=lambda record: record["steps_per_second"])
    speed = max(other for _, other in turns)
    peer = {"commit": git_hash(Path(sizes.source)), "packages": packages, "steps_per_second": round(speed)}
    return best | {"peer": peer, "ratio": round(best["steps_per_second"] / speed, 2)}


def said_by(words: list[str]) -> Any:
    """What a process prints in its last line, which is JSON. Raises TrainingError where it fails."""
    done = subprocess.run(ends_with_us(words), stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise TrainingError(f"{' '.join(words[:2])} ended with {done.returncode}, see above")
    return json.loads(done.stdout.splitlines()[-1])


def run(sizes: Sizes) -> None:
    """What the command does."""
    print(json.dumps(compare(sizes) if sizes.source else measure(sizes)))


if __name__ == "__main__":
    sys.exit(main(run, parse(Sizes)))
