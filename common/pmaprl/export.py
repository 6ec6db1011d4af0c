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
    """Write a trained policy as one file: raw observations in, greedy actions out, any batch."""

    out: str = "policy.stablehlo"
    """File to write, .stablehlo for jax.export or .onnx, beside FILE.json, which describes it."""


# Before the slow imports: --help and usage errors answer at once
ARGS = parse(Args) if __name__ == "__main__" else None

import jax
import jax.export

from pmaprl.device.interface import PolicyInput
from pmaprl.device.state import by_name
from pmaprl.envs.foreign_code import import_package, readable_errors
from pmaprl.export_check import Checked, check_file
from pmaprl.policies.policy import Policy
from pmaprl.policy import StoredPolicy, load_named
from pmaprl.runs.directory import versions
from pmaprl.runs.metrics import jsonable

PLATFORMS = "cpu", "cuda"


def inputs_of(policy: Policy, batch: Any = "batch") -> dict[str, Any]:
    """Shapes of the exported function's inputs [batch, ...] in order, those of memory by name."""

    def batches(tree):
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((batch, *x.shape), x.dtype), tree)

    inputs = {"obs": batches(policy.env.given_like)}
    if policy.has_memory:
        one = jax.eval_shape(lambda: jax.tree.map(lambda x: x[0], policy.initial_memory(1)))
        inputs |= {"memory": batches(by_name(one)), "first": jax.ShapeDtypeStruct((batch,), bool)}
    if policy.wants_reward:
        inputs["reward"] = jax.ShapeDtypeStruct((batch,), "float32")
    return inputs


def outputs_of(policy: Policy, batch: Any = "batch") -> dict[str, Any]:
    """Shapes of the exported function's outputs [batch, ...] in order."""
    outcome = jax.eval_shape(function_of(policy), **inputs_of(policy, 1))
    outputs = {"action": outcome}
    if policy.has_memory:
        action, memory = outcome
        outputs = {"action": action, "next/memory": memory}
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype), outputs)


def arrays_of(trees: dict[str, Any]) -> dict[str, Any]:
    """All arrays of inputs or outputs by name, in order.

    The trees are taken one by one, because JAX would sort them by name.
    """
    arrays = {}
    for key, tree in trees.items():
        arrays |= by_name({key: tree})
    return arrays


def function_of(policy: Policy) -> Callable:
    """The greedy policy as a function of `inputs_of(policy)`.

    It returns actions; with memory, actions and the new memory.
    """
    act = policy.player().act
    like = jax.eval_shape(lambda: policy.initial_memory(1))

    def function(obs, memory=None, first=None, reward=None):
        obs = policy.env.with_channels_last(obs)
        start = PolicyInput.at_start(obs)
        seen = PolicyInput(
            obs=obs,
            first=start.first if first is None else first,
            reward=start.reward if reward is None else reward,
        )
        named_arrays = memory or {}
        arrays = [named_arrays[name] for name in by_name(like)]
        memory = jax.tree.unflatten(jax.tree.structure(like), arrays)
        action, memory = act(seen, memory, None)
        if policy.has_memory:
            return action, by_name(memory)
        return action

    return function


def to_stablehlo(policy: Policy) -> bytes:
    """Export the greedy policy as a serialized `jax.export` artifact, for any batch size."""
    (batch,) = jax.export.symbolic_shape("batch")
    inputs = inputs_of(policy, batch)
    export_function = jax.export.export(jax.jit(function_of(policy)), platforms=PLATFORMS)
    return bytes(export_function(*inputs.values()).serialize())


def to_onnx(policy: Policy) -> bytes:
    """Export the greedy policy as an ONNX model.

    It has an input for each array. Its outputs are the action and the new memory, `next/...`.

    Raises:
        UsageError: jax2onnx or onnxruntime is not installed.
    """
    # Both packages warn of plugins for other libraries, and of shapes without names
    for name in ("jax2onnx", "onnx_ir"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    convert = import_package("jax2onnx", use=" for an .onnx file").to_onnx
    import_package("onnxruntime", use=" to try an .onnx file")  # before the work
    inputs = inputs_of(policy)
    act = function_of(policy)
    arrays, structure = jax.tree.flatten(tuple(inputs.values()))

    def on_arrays(*arrays):
        values = jax.tree.unflatten(structure, arrays)
        return jax.tree.leaves(act(*values))

    # jax2onnx warns of its own arithmetic. Nested jits are inlined, because it supports those of
    # one version of JAX only.
    with warnings.catch_warnings(action="ignore"), jax.disable_jit():
        model = convert(
            on_arrays,
            arrays,
            input_names=[*arrays_of(inputs)],
            output_names=[*arrays_of(outputs_of(policy))],
        )
    return model.SerializeToString()


def check_out(out: Path) -> Path:
    """Path of the description of `out`.

    Raises:
        UsageError: `out` or its description cannot be written.
    """
    if not out.name:
        raise UsageError(f"--out {str(out)!r} names no file: it must end in {' or '.join(FORMATS)}")
    check_target(out, *FORMATS)
    sidecar = out.with_name(out.name + ".json")
    check_target(sidecar)
    return sidecar


FORMATS = {".stablehlo": to_stablehlo, ".onnx": to_onnx}


def export_policy(policy: StoredPolicy, out: Path) -> tuple[Path, Checked]:
    """Write `policy` to `out` and a description beside it, or leave what was there as it is.

    Args:
        policy: The policy.
        out: The file; the ending of its name decides the format.

    Returns:
        The path of the description, and the comparison of the file with the policy.

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


def describe(policy: StoredPolicy, out: Path, content: bytes) -> dict[str, Any]:
    """Contents of the JSON file beside an exported policy: its inputs, its outputs and its run."""
    config = policy.config
    input_text = (
        "raw observations [batch, *shape], as the environment gives them; normalization is inside"
    )
    output_text = "greedy actions [batch, *shape], as the environment takes them"
    if policy.has_memory:
        input_text += ", and memory, whose arrays are zeros at first"
        output_text += ", and the new memory"
    return {
        "file": out.name,
        "sha256": sha256(content).hexdigest(),
        "input": input_text,
        "output": output_text,
        "inputs": _described(inputs_of(policy)),
        "outputs": _described(outputs_of(policy)),
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


def _described(trees: dict[str, Any]) -> dict[str, Any]:
    """Shapes and types of all arrays, in order."""
    return {
        name: {"shape": list(x.shape), "dtype": str(x.dtype)}
        for name, x in arrays_of(trees).items()
    }


def export(args: Args) -> None:
    """Run the command."""
    out = Path(args.out)
    check_out(out)
    console = Console(quiet=False, total_steps=0)
    policy = load_named(args, console)
    sidecar, checked = export_policy(policy, out)
    console.say(f"policy   {policy.env.name}, step {policy.step:,}, {policy.who}")
    shapes = (
        f"{name} {x.dtype}{list(x.shape)}" for name, x in arrays_of(inputs_of(policy)).items()
    )
    console.say(f"takes    {', '.join(shapes)}".replace("'batch'", "batch"))
    console.say(f"saved    {out} ({out.stat().st_size:,} bytes), described in {sidecar}")
    console.say(f"checked  {checked}")


if __name__ == "__main__":
    main(export, ARGS)
