"""A trained policy as one file that needs no code of this repository.

python -m pmaprl.export runs/NAME --out policy.stablehlo
python -m pmaprl.export runs/NAME --out policy.onnx

docs/using-a-policy.md shows the few lines that load it.
"""

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from pmaprl.cli.command import PolicyArgs, main, parse
from pmaprl.cli.errors import UsageError
from pmaprl.cli.files import check_target, replacing, write_json
from pmaprl.runs.console import Console


@dataclass
class Args(PolicyArgs):
    """Write a trained policy as one file: raw observations in, greedy actions out, any batch
    size.
    """

    out: str = "policy.stablehlo"
    """File to write, .stablehlo for jax.export or .onnx, beside FILE.json, which describes it."""


if __name__ == "__main__":
    ARGS = parse(Args)  # before the slow imports: --help and usage errors answer at once

import jax
import jax.export

from pmaprl.device.agents import PolicyInput, at_start
from pmaprl.device.sharding import by_name
from pmaprl.envs.suite_tools import import_package, readable_errors
from pmaprl.export_check import Checked, check_file
from pmaprl.policy import Policy, load_named
from pmaprl.runs.directory import versions
from pmaprl.runs.metrics import jsonable

PLATFORMS = "cpu", "cuda"


def inputs_of(policy: Policy, batch: Any = "batch") -> dict[str, Any]:
    """Shapes of what the exported function takes, in this order: arrays [batch, ...], of memory by
    their names.
    """

    def batches(tree):
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((batch, *x.shape), x.dtype), tree)

    inputs = {"obs": batches(policy.env.given_like)}
    if policy.has_memory:
        one = jax.eval_shape(lambda: jax.tree.map(lambda x: x[0], policy.initial_memory(1)))
        inputs |= {"memory": batches(by_name(one)), "first": jax.ShapeDtypeStruct((batch,), bool)}
    if policy.wants_reward:
        inputs["reward"] = jax.ShapeDtypeStruct((batch,), "float32")
    return inputs


def function_of(policy: Policy) -> Callable:
    """The greedy policy, from `inputs_of(policy)` to actions; with memory to those and it."""
    act = policy.player().act
    like = jax.eval_shape(lambda: policy.initial_memory(1))

    def function(obs, memory=None, first=None, reward=None):
        obs = policy.env.with_channels_last(obs)
        seen = at_start(obs)
        seen = PolicyInput(
            obs, seen.first if first is None else first, seen.reward if reward is None else reward
        )
        memory = jax.tree.unflatten(
            jax.tree.structure(like), [memory[name] for name in by_name(like)]
        )
        action, memory = act(seen, memory, None)
        return (action, by_name(memory)) if policy.has_memory else action

    return function


def to_stablehlo(policy: Policy) -> bytes:
    """The greedy policy as a serialized `jax.export` artifact: observations [batch, *shape] to
    actions [batch, ...].
    """
    (batch,) = jax.export.symbolic_shape("batch")
    inputs = inputs_of(policy, batch).values()
    return jax.export.export(jax.jit(function_of(policy)), platforms=PLATFORMS)(*inputs).serialize()


def to_onnx(policy: Policy) -> bytes:
    """The greedy policy as an ONNX model with an input for each array, and as outputs the action
    and `next/...` memory.

    Raises UsageError without jax2onnx.
    """
    # They speak of plugins for other libraries, and of shapes without names
    for name in ("jax2onnx", "onnx_ir"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    convert = import_package("jax2onnx", use=" for an .onnx file").to_onnx
    import_package("onnxruntime", use=" to try an .onnx file")  # before the work
    inputs = inputs_of(policy)
    act = function_of(policy)
    outcome = jax.eval_shape(act, **inputs_of(policy, 1))
    outputs = (
        {"action": outcome[0], "next/memory": outcome[1]}
        if policy.has_memory
        else {"action": outcome}
    )
    arrays, structure = jax.tree.flatten(inputs)

    def on_arrays(*arrays):
        return jax.tree.leaves(act(**jax.tree.unflatten(structure, arrays)))

    # The warnings are of its own arithmetic; nested jits are inlined, because it knows them of one
    # version of JAX only.
    with warnings.catch_warnings(action="ignore"), jax.disable_jit():
        model = convert(
            on_arrays, arrays, input_names=[*by_name(inputs)], output_names=[*by_name(outputs)]
        )
    return model.SerializeToString()


def check_out(out: Path) -> Path:
    """Path of the description of `out`. Raises UsageError where one of both cannot be written."""
    if not out.name:
        raise UsageError(f"--out {str(out)!r} names no file: it must end in {' or '.join(FORMATS)}")
    check_target(out, *FORMATS)
    sidecar = out.with_name(out.name + ".json")
    check_target(sidecar)
    return sidecar


FORMATS = {".stablehlo": to_stablehlo, ".onnx": to_onnx}


def export_policy(policy: Policy, out: Path) -> tuple[Path, Checked]:
    """Write `policy` to `out` and a description beside it, or leave what was there as it is.

    Args:
        policy: The policy.
        out: The file; what its name ends in is the format.

    Returns:
        The path of the description, and how the file was compared with the policy.

    Raises:
        UsageError: The file cannot be made, or written, or it does not act as the policy does.
    """
    sidecar = check_out(out)
    with readable_errors(f"this policy cannot be written as {out.suffix}"):
        content = FORMATS[out.suffix](policy)
    with replacing(out) as policy_file, replacing(sidecar) as description:
        policy_file.write_bytes(content)
        checked = check_file(policy, policy_file, out.suffix)
        write_json(description, describe(policy, out, content))
    return sidecar, checked


def describe(policy: Policy, out: Path, content: bytes) -> dict[str, Any]:
    """What a user of the file has to know."""
    config = policy.config
    inputs = inputs_of(policy)
    # In their order
    named = {name: x for key, tree in inputs.items() for name, x in by_name({key: tree}).items()}
    memory = ", and memory, whose arrays are zeros at first" if policy.has_memory else ""
    return {
        "file": out.name,
        "sha256": sha256(content).hexdigest(),
        "input": "raw observations [batch, *shape], as the environment gives them; "
        f"normalisation is inside{memory}",
        "output": "greedy actions [batch, *shape], as the environment takes "
        f"them{memory and ', and the new memory'}",
        "inputs": {
            name: {"shape": list(x.shape), "dtype": str(x.dtype)} for name, x in named.items()
        },
        "env_spec": policy.env.to_json(),
        "env": config["args"]["env"],
        "env_params": config["args"].get("env_params", ""),
        "algorithm": config["algorithm"],
        "run": str(policy.run_dir),
        "step": policy.step,
        "seed": policy.seed,
        "return": None if policy.evaluation is None else jsonable(policy.evaluation),
        "versions": versions(),
    }


def export(args: Args) -> None:
    """What the command does."""
    out = Path(args.out)
    check_out(out)
    console = Console(quiet=False, total_steps=0)
    policy = load_named(args, console)
    sidecar, checked = export_policy(policy, out)
    console.say(f"policy   {policy.env.name}, step {policy.step:,}, {policy.who}")
    shapes = (f"{name} {x.dtype}{list(x.shape)}" for name, x in by_name(inputs_of(policy)).items())
    console.say(f"takes    {', '.join(shapes)}".replace("'batch'", "batch"))
    console.say(f"saved    {out} ({out.stat().st_size:,} bytes), described in {sidecar}")
    console.say(f"checked  {checked}")


if __name__ == "__main__":
    main(export, ARGS)
