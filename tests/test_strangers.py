"""A run directory that a stranger sent: nothing in it is run, nothing outside is touched, all may
be odd.
"""

import io
import itertools
import json
import os
import re
import shutil
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cli_helpers import SMALL, only_message, refusal
from helpers import TINY, small_args

import pmaprl.compare
import pmaprl.export
import pmaprl.play
import pmaprl.plot
import pmaprl.runs.run
from algos import ppo_pmap as ppo
from pmaprl.cli.command import exit_code, parse
from pmaprl.cli.env_flags import named_by_text
from pmaprl.cli.errors import TrainingError, UsageError, printable
from pmaprl.cli.stored import DEEPEST, opened, read_json
from pmaprl.envs.spaces import EnvSpec
from pmaprl.policy import load_policy
from pmaprl.runs.checkpoints import Checkpoints, Damaged, read
from pmaprl.runs.directory import claim_directory
from pmaprl.runs.lock import LOCK, locked
from pmaprl.runs.metrics import LogWriter, read_log
from pmaprl.runs.results import stored_evaluation
from pmaprl.runs.saving import InitialState, Saver

STOPPED = "stopped before it compiles"
MARKER = "module_of_a_stranger"


@pytest.fixture
def run_dir(trained, tmp_path) -> Path:
    return shutil.copytree(trained("normalized")[0], tmp_path / "run")


@pytest.fixture
def stopping(monkeypatch):
    """Training ends before anything is compiled, and playing once there is an environment."""

    def stop(*_: Any, **__: Any) -> None:
        raise UsageError(STOPPED)

    def play_nothing(args, policy, name, env_params, console):
        make = pmaprl.play.make_host if pmaprl.play.steps_on_host(name) else pmaprl.play.make
        how = (1, 0, env_params) if pmaprl.play.steps_on_host(name) else (env_params,)
        make(name, *how)
        stop()

    monkeypatch.setattr(pmaprl.runs.run, "compile_together", stop)
    for where in ("_play_on_device", "_play_on_host"):
        monkeypatch.setattr(pmaprl.play, where, play_nothing)


def changed(run_dir: Path, **changes: Any) -> Path:
    """Change entries of the run's `config.json`: of its flags if there is such a flag, else of the
    top.
    """
    path = run_dir / "config.json"
    config = json.loads(path.read_text())
    for name, value in changes.items():
        inner = config["args"] if name in config["args"] else config
        inner[name] = value
    path.write_text(json.dumps(config))
    return run_dir


COMMANDS = {
    "load": None,
    "play": (pmaprl.play.play, pmaprl.play.Args, "RUN --episodes 1"),
    "export": (pmaprl.export.export, pmaprl.export.Args, "RUN --out p.stablehlo"),
    "compare": (pmaprl.compare.run_command, pmaprl.compare.Args, "RUN"),
    "plot": (pmaprl.plot.plot, pmaprl.plot.Args, "RUN --out p.png"),
    "resume": (ppo.train, ppo.Args, "--resume RUN --total-timesteps 512"),
    "init": (ppo.train, ppo.Args, " ".join(["--init-from RUN --run-dir new", *SMALL])),
}


def outcome(name: str, run_dir: Path) -> str:
    """Words of a command on stderr; it raises nothing unknown and prints nothing that a terminal
    obeys.
    """
    stdout = io.StringIO()
    stderr = io.StringIO()
    with redirect_stdout(stdout), redirect_stderr(stderr):
        try:
            if COMMANDS[name] is None:
                load_policy(run_dir)
            else:
                command, args_class, words = COMMANDS[name]
                words = words.replace("RUN", str(run_dir)).split()
                exit_code(command, parse(args_class, words))
        except UsageError as error:
            print(f"error: {error}", file=sys.stderr)
        except SystemExit:
            pass
    for text in (stdout.getvalue(), stderr.getvalue()):
        assert all(character.isprintable() or character == "\n" for character in text), repr(text)
    return stderr.getvalue()


# --------------------------------------------------------------------------------------------------
# code and paths


def places_of_texts(value: Any, path: tuple = ()) -> list[tuple]:
    """The path of every text in a value of JSON."""
    if isinstance(value, str):
        return [path]
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [place for key, part in items for place in places_of_texts(part, (*path, key))]


def with_text(value: Any, path: tuple, text: str) -> Any:
    """The same value of JSON with a text at this path."""
    value = json.loads(json.dumps(value))
    inner = value
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = text
    return value


TEXTS = [
    f"{MARKER}:make",
    f"gymnasium:{MARKER}:X-v0",
    json.dumps({"whole": f"{MARKER}:X-v0"}),
    f"{MARKER}.py",
    MARKER,
]


@pytest.mark.slow
@pytest.mark.parametrize("env", ["CartPole-v1", "gymnasium:pmaprl/PartialCartPole-v1"])
def test_no_text_of_a_run_is_imported(run_dir, tmp_path, monkeypatch, stopping, env):
    """A module is behind every text in every file of JSON, by each form of name, and nobody imports
    it.
    """
    marker = tmp_path / "executed"
    (tmp_path / f"{MARKER}.py").write_text(
        f"open({str(marker)!r}, 'w').close()\ndef make(): pass\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    changed(run_dir, env=env)
    if "gymnasium" in env:
        flags = {
            "num_seeds": 1,
            "vectorization": "sync",
            "eval_env_params": "",
            "init_from": "",
        }
        path = run_dir / "config.json"
        config = json.loads(path.read_text())
        config["args"] |= flags
        path.write_text(json.dumps(config))
    tried = 0
    for name in ("config.json", "result.json"):
        content = json.loads((run_dir / name).read_text())
        for index, place in enumerate(places_of_texts(content)):
            of_flag = place[0] == "args"
            texts = TEXTS if of_flag else [TEXTS[index % len(TEXTS)]]
            commands = ("play", "resume") if of_flag else ("play",)
            for text, command in itertools.product(texts, commands):
                (run_dir / name).write_text(json.dumps(with_text(content, place, text)))
                outcome(command, run_dir)
                tried += 1
                assert not marker.exists(), f"{name} {place} {text} {command}"
        (run_dir / name).write_text(json.dumps(content))
    assert tried > 100


EVIL = json.dumps({"whole": f"{MARKER}:X-v0"})
PARTIAL = "gymnasium:pmaprl/PartialCartPole-v1"


@pytest.mark.parametrize(
    ("env", "params", "odd"),
    [
        (PARTIAL, EVIL, "whole"),
        (PARTIAL, '{"whole": "CartPole-v1"}', "whole"),
        (PARTIAL, json.dumps({"kwargs": {"module": "evil"}}), "kwargs"),
        (
            "envpool:Pong-v5",
            json.dumps({"config": {"deep": [{"import_module": "evil"}]}}),
            "config",
        ),
        ("gymnasium:Ant-v5", '{"xml_file": "mine.xml"}', "xml_file"),
        ("gymnasium:ALE/Pong-v5", '{"a": [{"b": "../pong"}]}', "a"),
        ("gymnasium:ALE/Pong-v5", '{"a": {"https://b": 1}}', "a"),
        ("gymnasium:CartPole-v1", '{"a": "choice:A"}', "a"),
        ("envpool:Pong-v5", '{"base_path": "mine"}', "base_path"),
        ("gymnasium:CartPole-v1", '{"reward": "mine.reward"}', "reward"),
        ("gymnasium:CartPole-v1", '{"reward": "v0.5"}', ""),
        ("mine:make", '{"level": "hard"}', "level"),
        ("mine:make", '{"level": {"hard": 1}}', "level"),
        ("mine:make", '{"gravity": "uniform:8:12"}', ""),
        ("CartPole-v1", '{"gravity": "choice:8,1e1"}', ""),
        ("CartPole-v1", '{"gravity": "choice:/a"}', "gravity"),
        ("brax:ant", '{"backend": "mjx"}', ""),
        ("gymnasium:FrozenLake-v1", '{"map_name": "8x8", "desc": ["SF", "FG"]}', ""),
        ("gymnasium:ALE/Pong-v5", '{"obs_type": "ram", "frameskip": 4}', ""),
        ("CartPole-v1", "no JSON", ""),
        ("CartPole-v1", "", ""),
    ],
)
def test_texts_that_may_name_files_or_code_are_told_from_settings(env, params, odd):
    assert named_by_text(env, params) == odd


@pytest.mark.parametrize("flag", ["env_params", "eval_env_params"])
def test_parameters_that_may_name_code_have_to_be_named_again(run_dir, flag, tmp_path):
    path = run_dir / "config.json"
    config = json.loads(path.read_text())
    config["args"] |= {"env": PARTIAL, "eval_env_params": "", flag: EVIL}
    path.write_text(json.dumps(config))
    named = flag.replace("_", "-")
    message = refusal(ppo.train, ppo.Args, ["--resume", str(run_dir)])
    assert f"--{named}" in message
    assert "trust" in message
    with pytest.raises(UsageError, match="trust"):
        ppo.Args.from_run(run_dir)
    config["args"] |= {"num_seeds": 1, flag: EVIL}
    path.write_text(json.dumps(config))
    for words in (
        ["--resume", str(run_dir)],
        ["--run-dir", str(run_dir), "--resume-or-start", "--env", PARTIAL],
    ):
        args = parse(ppo.Args, [*words, f"--{named}", EVIL])
        assert getattr(args, flag) == EVIL
        assert args.resume == str(run_dir)
    policy = SimpleNamespace(run_dir=run_dir, config=config)
    with pytest.raises(UsageError, match="trust.*--env-params"):
        pmaprl.play.environment_of(pmaprl.play.Args(run=str(run_dir)), policy)
    named = pmaprl.play.Args(run=str(run_dir), env_params=EVIL)
    assert pmaprl.play.environment_of(named, policy) == (PARTIAL, EVIL)


def test_our_own_environments_take_no_module(monkeypatch):
    from pmaprl.suites.tools import processes

    monkeypatch.setattr(processes.gymnasium, "make", lambda *_, **__: pytest.fail("it was made"))
    with pytest.raises(KeyError):
        processes.make_partial(f"{MARKER}:X-v0")


def test_a_run_that_began_from_another_does_not_say_which_is_read(run_dir, stopping):
    shutil.rmtree(run_dir / "checkpoints")
    (run_dir / "DONE").unlink()
    changed(run_dir, init_from=str(run_dir.parent / "elsewhere"))
    assert "--init-from" in outcome("resume", run_dir)
    words = [
        "--run-dir",
        str(run_dir),
        "--resume-or-start",
        "--init-from",
        str(run_dir.parent / "elsewhere"),
    ]
    assert "that may load: none" in refusal(ppo.train, ppo.Args, words), "it was looked for there"


# --------------------------------------------------------------------------------------------------
# files and folders

KINDS = ["symbolic link", "hard link", "regular file", "bytes"]


def replace_by(kind: str, path: Path, outside: Path) -> None:
    """Put something else into the place of a file, which keeps its content where it can."""
    outside.write_bytes(path.read_bytes() if path.exists() else b"")
    path.unlink(missing_ok=True)
    if kind == "symbolic link":
        path.symlink_to(outside)
    elif kind == "hard link":
        os.link(outside, path)
    elif kind == "regular file":
        os.mkfifo(path)
    else:
        with path.open("wb") as file:
            file.truncate(2**34)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name",
    ["config.json", "metrics.jsonl", "result.json", LOCK, "DONE", "curve.png", "elo.json"],
)
def test_a_file_of_a_run_is_a_regular_one_with_one_link(run_dir, tmp_path, stopping, name, kind):
    outside = tmp_path / "outside"
    try:
        replace_by(kind, run_dir / name, outside)
    except OSError:
        pytest.skip("no such file can be made here")
    before = outside.read_bytes()
    read_by = {"config.json": [*COMMANDS], "metrics.jsonl": ["compare", "plot", "resume"]}.get(
        name,
        ["resume"],
    )
    for command in read_by:
        assert kind in outcome(command, run_dir), command
    assert outside.read_bytes() == before


def test_a_device_is_not_opened(run_dir):
    for name in ("config.json", "metrics.jsonl"):
        (run_dir / name).unlink()
        (run_dir / name).symlink_to("/dev/zero")
        assert "symbolic link" in outcome("compare", run_dir)


@pytest.mark.parametrize(
    "place",
    ["checkpoints", "checkpoints/256", "checkpoints/256/state", "checkpoints/256/metrics"],
)
def test_a_folder_of_a_run_is_no_link(run_dir, tmp_path, stopping, place):
    outside = tmp_path / "outside"
    folder = run_dir / place
    folder.mkdir(exist_ok=True)
    shutil.move(folder, outside)
    folder.symlink_to(outside)
    files = sorted(outside.rglob("*"))
    for command in ("load", "resume"):
        assert "symbolic link" in outcome(command, run_dir), command
    words = ["--run-dir", str(run_dir), "--overwrite", *SMALL]
    assert "symbolic link" in refusal(ppo.train, ppo.Args, words)
    assert sorted(outside.rglob("*")) == files


def test_a_folder_of_checkpoints_that_becomes_a_link_is_not_written_through(tmp_path):
    """It becomes one after the save has looked at it, and before it writes."""
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    (tmp_path / "outside").mkdir()

    def swap():
        folder.rmdir()
        folder.symlink_to(tmp_path / "outside")
        return {"learner": np.zeros(2)}

    checkpoints = Checkpoints(folder)
    checkpoints.save(1, swap, None)
    with pytest.raises((TrainingError, UsageError), match="symbolic link"):
        checkpoints.wait()
    assert not list((tmp_path / "outside").iterdir())


def test_the_directory_of_a_run_may_be_a_link_itself(run_dir, tmp_path, stopping):
    (tmp_path / "link").symlink_to(run_dir)
    assert load_policy(tmp_path / "link").step == 256
    for command in ("play", "resume"):
        assert STOPPED in outcome(command, tmp_path / "link")
    with locked(tmp_path / "link"):
        assert (run_dir / LOCK).exists()


def test_a_link_below_a_folder_is_not_followed(tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text("{}")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics").symlink_to(tmp_path / "outside")
    with pytest.raises(UsageError, match="symbolic link"):
        read_json(tmp_path / "run", "metrics/file")
    assert read_json(tmp_path / "outside", "file") == {}


@pytest.mark.parametrize(
    ("name", "claim"),
    [
        ("sha256/learner", np.zeros((4096, 4096), np.uint8)),
        ("sha256/learner", np.zeros((1, 32), np.float32)),
        ("learner/opt_state/more", np.zeros((600, 2**20), np.uint8)),
    ],
)
def test_a_checkpoint_that_claims_more_than_is_wanted_is_not_read(
    tmp_path, monkeypatch, name, claim
):
    from orbax.checkpoint import v1 as orbax

    arrays = {
        "learner/params/a": np.ones(4, np.float32),
        "sha256/learner": np.zeros((1, 32), np.uint8),
    }
    orbax.save(tmp_path / "8", arrays | {name: claim})
    monkeypatch.setattr(orbax, "load", lambda *_: pytest.fail("it was read"))
    with pytest.raises(Damaged, match="claims|uint8"):
        read(tmp_path / "8", {"learner/params/a": arrays["learner/params/a"]}, ("learner/params/",))


def test_a_name_of_an_array_is_no_path(tmp_path, monkeypatch):
    from orbax.checkpoint import v1 as orbax

    orbax.save(tmp_path / "8", {"learner/a": np.ones(4)})
    path = tmp_path / "8" / "state" / "_METADATA"
    path.write_text(path.read_text().replace("learner/a", "learner/../../../a"))
    monkeypatch.setattr(orbax, "load", lambda *_: pytest.fail("it was read"))
    with pytest.raises(Damaged):
        read(tmp_path / "8", None, ("learner/",))


# --------------------------------------------------------------------------------------------------
# odd content

ESCAPES = "\x1b]0;title\x07\x1b[31mred\r\nerror: more\x9b2J\u202e$\\frac{"


def test_what_is_printed_leaves_the_terminal_alone():
    assert printable("a\x1b[31m\tb\n") == r"a\x1b[31m b "
    assert printable("ü – 名 ±") == "ü – 名 ±"
    assert str(UsageError("a\x07")) == r"a\x07"


@pytest.mark.parametrize(
    "name",
    [
        "env",
        "algorithm",
        "recipe",
        "gamma",
        "members",
        "versions",
        "env_spec",
        "script",
        "earlier_flags",
    ],
)
def test_escapes_of_a_run_reach_neither_terminal_nor_picture(
    run_dir, tmp_path, monkeypatch, stopping, name
):
    monkeypatch.chdir(tmp_path)
    value = {
        "members": [{"seed": 0, ESCAPES: 1}],
        "versions": {"pmaprl": ESCAPES},
        "earlier_flags": {"gamma": [[ESCAPES, 1]]},
    }.get(name, ESCAPES)
    if name == "env_spec":
        spec = json.loads((run_dir / "config.json").read_text())["env_spec"]
        value = spec | {"name": ESCAPES}
    changed(run_dir, **{name: value})
    (run_dir / "config.json").write_text(
        (run_dir / "config.json").read_text().replace("0.99", json.dumps(ESCAPES))
    )
    for command in COMMANDS:
        if command != "export":  # which compiles
            outcome(command, run_dir)
    stderr = outcome("compare", run_dir)
    assert "error: more" not in re.findall("^error.*", stderr, re.MULTILINE)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "5",
        "\0",
        "[" * 100_000,
        '{"args": ' * 80 + "1" + "}" * 80,
        "1" * 5_000,
        '{"args": {}}',
        json.dumps(
            {"args": {"env": "CartPole-v1"}, "algorithm": "ppo_pmap", "script": "algos/\0.py"}
        ),
        json.dumps(
            {"args": {"env": "CartPole-v1"}, "algorithm": "ppo_pmap", "script": "algos/\ud800.py"}
        ),
        json.dumps(
            {
                "args": {"env": "CartPole-v1"},
                "algorithm": "ppo_pmap",
                "members": [{"seed": 0, "env": 1.5}],
            }
        ),
        *(
            json.dumps(
                {
                    "args": {"env": "CartPole-v1"},
                    "algorithm": "ppo_pmap",
                    "earlier_flags": earlier,
                }
            )
            for earlier in (None, {"env": 1}, {"env": [["a", "b"]]}, {"other": [[1, 1]]})
        ),
    ],
)
def test_a_config_that_is_none_is_refused(run_dir, stopping, text):
    (run_dir / "config.json").write_text(text)
    for command in COMMANDS:
        assert "is not a run directory" in only_message(outcome(command, run_dir)), command


ODD = [None, {}, [[1]], 10**400, 1.5, "x"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "env",
        "env_params",
        "seed",
        "num_seeds",
        "recipe",
        "members",
        "versions",
        "env_spec",
        "earlier_flags",
    ],
)
def test_a_config_with_a_value_of_another_type_is_refused_or_does_no_harm(
    run_dir, tmp_path, monkeypatch, stopping, name
):
    monkeypatch.chdir(tmp_path)
    content = (run_dir / "config.json").read_text()
    for value in ODD:
        (run_dir / "config.json").write_text(content)
        changed(run_dir, **{name: value})
        for command in ("compare", "resume", "load"):
            outcome(command, run_dir)


def test_nested_json_is_read_to_a_depth(tmp_path):
    for depth, is_read in ((DEEPEST - 1, True), (DEEPEST + 1, False)):
        (tmp_path / "file").write_text("[" * depth + "]" * depth)
        assert (read_json(tmp_path, "file") is not None) == is_read


@pytest.mark.parametrize(
    "odd",
    [
        "x",
        {"a": 1},
        [[1.0]],
        ["1"],
        10**400,
        [1.0, 2.0, 3.0],
        [],
    ],
)
def test_a_metric_that_is_no_number_is_refused_with_its_name(tmp_path, odd):
    rows = [{"env_steps": step, "a": [1.0, None], "b": 1, "time/wall": odd} for step in (1, 2)]
    rows.append({"env_steps": 3, "a": odd})
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    log = read_log(tmp_path, ["b"])
    assert log.series["b"].values.tolist() == [[1.0], [1.0]]
    with pytest.raises(UsageError, match="a .* 3"):
        read_log(tmp_path, ["a"])


def test_numbers_of_more_agents_than_the_run_has_are_refused(run_dir):
    (run_dir / "metrics.jsonl").write_text(
        json.dumps({"env_steps": 64, "episode/return": [1.0, 2.0, 3.0]})
    )
    for command in ("compare", "plot"):
        assert "3 agents, in a run of 2" in only_message(outcome(command, run_dir))


def test_an_evaluation_of_more_agents_than_the_run_has_is_none_of_the_policy(run_dir):
    Checkpoints(run_dir / "checkpoints").add_evaluation(256, [0.0, 1.0, 2.0])
    assert load_policy(run_dir).evaluation is None


@pytest.mark.parametrize("dtype", ["M8[s]", "O", "S5", "complex64"])
def test_a_type_that_is_none_of_numbers_is_refused(dtype):
    space = {"type": "Box", "shape": [2], "low": 0, "high": 1}
    stored = {
        "name": "x",
        "observation_space": space,
        "obs_dtype": "float32",
        "action_space": space,
    }
    assert EnvSpec.from_json(stored).obs_dtype == np.float32
    for wrong in (
        stored | {"obs_dtype": dtype},
        stored | {"action_space": space | {"dtype": dtype}},
    ):
        with pytest.raises((ValueError, TypeError)):
            EnvSpec.from_json(wrong)


def test_a_line_without_an_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("pmaprl.runs.metrics.LONGEST_LINE", 100)
    (tmp_path / "metrics.jsonl").write_text('{"env_steps": 1}\n' + 101 * "x")
    with pytest.raises(UsageError, match="100"):
        read_log(tmp_path, [])


@pytest.mark.parametrize(
    "odd",
    [
        {"eval/return_mean": ["x"]},
        {"eval/return_mean": [1, 2, 3]},
        {"eval/return_std": None},
        {"eval/env_steps": "x"},
    ],
)
def test_a_result_that_is_none_is_refused(run_dir, odd):
    path = run_dir / "result.json"
    assert stored_evaluation(run_dir, 256, 2).returns
    path.write_text(json.dumps(json.loads(path.read_text()) | odd))
    with pytest.raises(UsageError, match="result.json"):
        stored_evaluation(run_dir, 256, 2)


def test_a_returned_evaluation_of_other_types_is_none(run_dir):
    for odd in (
        ["x"],
        [None],
        {"a": 1},
        [[1]],
        [10**400],
        "12",
    ):
        Checkpoints(run_dir / "checkpoints").add_evaluation(256, odd)
        assert 256 not in Checkpoints(run_dir / "checkpoints").evaluations(), odd


# ------------------------------------------------------------------------------------------- what
# kills leave


def test_what_a_kill_leaves_does_not_stand_in_the_way(tmp_path, stopping):
    path = tmp_path / "run"
    (path / "checkpoints" / "64.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    (path / ".config.123.json").write_text("{")
    (path / ".metrics.99.jsonl").touch()
    words = ["--run-dir", str(path), "--resume-or-start", *SMALL]
    assert STOPPED in refusal(ppo.train, ppo.Args, words)
    assert not [inside.name for inside in path.iterdir() if inside.name.startswith(".")]
    assert not list((path / "checkpoints").iterdir())


def test_a_complete_checkpoint_without_a_config_is_not_replaced(run_dir):
    (run_dir / "config.json").unlink()
    told = refusal(ppo.train, ppo.Args, ["--run-dir", str(run_dir), *SMALL])
    assert "config.json" in told
    assert (run_dir / "checkpoints" / "256").exists()


def test_files_of_a_user_that_look_like_temporary_ones_stay(tmp_path):
    for name in (".notes.1.json", ".config.json", ".config.1a.json"):
        (tmp_path / name).touch()
    claim_directory(tmp_path, {}, overwrite=False)
    assert {path.name for path in tmp_path.iterdir()} == {
        ".notes.1.json",
        ".config.json",
        ".config.1a.json",
        "config.json",
    }


def test_a_save_does_not_bring_back_a_directory_that_was_deleted(tmp_path):
    path = tmp_path / "run"
    (path / "checkpoints" / "0" / "state").mkdir(parents=True)
    (path / "checkpoints" / "64.orbax-checkpoint-tmp").mkdir()
    saver = Saver(path, small_args(**TINY), InitialState())
    (path / "config.json").touch()
    saver.withdraw()
    assert (path / "checkpoints" / "0").exists(), "it is a run's"
    (path / "config.json").unlink()
    saver.withdraw()
    assert not path.exists()


def test_tensorboard_hides_steps_that_a_resumed_run_makes_again(tmp_path, monkeypatch):
    made = []

    class Writer:
        def __init__(self, folder, purge_step=None):
            made.append(purge_step)

        def add_text(self, *args):
            """Not looked at here."""

    monkeypatch.setitem(sys.modules, "tensorboardX", type(sys)("tensorboardX"))
    sys.modules["tensorboardX"].SummaryWriter = Writer
    cases = (({}, 0), ({"resume": "a", "run_dir": "a"}, 128))
    for changes, step in cases:
        LogWriter(
            tmp_path,
            small_args(tensorboard=True, **TINY | changes),
            {},
            resume_at=step,
        )._file.close()
    assert made == [None, 129]


def test_the_name_of_a_run_in_weights_and_biases_is_one(tmp_path, monkeypatch):
    """It is sent there: another's would write into a run that the user has already."""
    monkeypatch.setitem(
        sys.modules,
        "wandb",
        SimpleNamespace(init=lambda **_: pytest.fail("it was used")),
    )
    (tmp_path / "wandb_id").write_text("../\x1b[31m")
    with pytest.raises(UsageError, match="wandb_id"):
        LogWriter(tmp_path, small_args(wandb=True, **TINY), {})


def test_settings_of_weights_and_biases_in_a_run_are_refused(run_dir, monkeypatch, stopping):
    """They say where data, and with it the user's key, is sent to."""
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace())
    (run_dir / "wandb").mkdir()
    (run_dir / "wandb" / "settings").write_text("[default]\nbase_url = https://elsewhere\n")
    words = ["--resume", str(run_dir), "--total-timesteps", "512"]
    assert STOPPED in refusal(ppo.train, ppo.Args, words)
    assert "wandb/settings" in refusal(ppo.train, ppo.Args, [*words, "--wandb"])


def test_the_reader_of_lines_gives_text(tmp_path):
    (tmp_path / "file").write_bytes(b"a\xff\n")
    with opened(tmp_path / "file") as file:
        assert file.readline() == "a\ufffd\n"
