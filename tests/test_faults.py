"""Faults: kill -9, signals, broken numbers, exceptions, a full disk, damaged checkpoints: nothing
saved is lost.
"""

import errno
import gc
import io
import json
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import ppo_pmap as ppo
import pytest
from cli_helpers import (
    ROOT,
    SMALL,
    STEPS,
    checkpoint_steps,
    fingerprint,
    in_process,
    only_message,
    read_result,
    read_rows,
    read_until,
    run_python,
    start_script,
)

import pmaprl.runs.run
from pmaprl.cli.command import parse
from pmaprl.runs.checkpoints import UNFINISHED
from pmaprl.runs.console import Console
from pmaprl.runs.saving import Saver
from pmaprl.runs.signals import Interruption

pytestmark = pytest.mark.usefixtures("shared_programs")
TOTAL = 400 * STEPS
RUN = "; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
SLOWED = "import runpy, sys, time; from pmaprl.runs.run import Run; advance = Run.advance; "
SLOWED += "Run.advance = lambda run, *report: (advance(run, *report), time.sleep(0.2))" + RUN


def wait_until(process: subprocess.Popen, happened: Callable[[], bool]) -> None:
    """Look at what a process has done until something has happened, or until it ends."""
    while process.poll() is None and not happened():
        time.sleep(0.001)


COMMANDS = {
    "algorithm": [ppo.__file__],
    "play": ["-m", "pmaprl.play", "runs/a"],
    "plot": ["-m", "pmaprl.plot", "a"],
}


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
@pytest.mark.parametrize("module", ["tyro", "flax"])
def test_an_interrupt_while_a_command_starts_ends_it_without_a_traceback(words, module, tmp_path):
    """It comes while the first slow module is imported, and after the flags were read."""
    if module == "flax" and "pmaprl.play" not in words and words[0] == "-m":
        pytest.skip("this command does not import it")
    (tmp_path / f"{module}.py").write_text("import signal; signal.raise_signal(signal.SIGINT)")
    process = run_python(*words, PYTHONPATH=str(tmp_path))
    assert process.returncode in (130, -signal.SIGINT)
    assert process.stderr == ""


def test_a_program_that_imports_an_algorithm_keeps_its_interrupts(tmp_path):
    """Also one that is interrupted meanwhile."""
    (tmp_path / "program.py").write_text(
        "import signal, sys\n"
        "try:\n    import pmaprl.algos.ppo_pmap\nexcept KeyboardInterrupt:\n    "
        "print('interrupted')\n"
        "print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    )
    path = str(ROOT / "common")
    assert run_python(tmp_path / "program.py", PYTHONPATH=path).stdout == "True\n"
    (tmp_path / "tyro.py").write_text("import signal; signal.raise_signal(signal.SIGINT)")
    assert run_python(tmp_path / "program.py", PYTHONPATH=path).stdout == "interrupted\nTrue\n"


@pytest.mark.slow
def test_kills_change_nothing(tmp_path):
    """kill -9 after a save and within one, and once while it starts; then the end is as if
    undisturbed.

    Between its chunks the run that is killed rests, so that it is not over before, however busy the
    machine is.
    """
    flags = [
        *SMALL,
        "--total-timesteps",
        20 * STEPS,
        "--checkpoint-interval",
        STEPS,
        "--log-interval",
        STEPS,
    ]
    whole = tmp_path / "whole"
    run_dir = tmp_path / "run"
    assert in_process(*flags, "--quiet", "--run-dir", whole) == 0
    words = [*flags, "--quiet", "--run-dir", "run"]
    reached = [0]
    for kill in range(3):
        process = start_script(
            SLOWED,
            ppo.__file__,
            *words,
            script="-c",
            cwd=tmp_path,
        )
        if kill == 2:
            time.sleep(2.5)  # while importing, compiling or loading
        else:
            wait_until(process, lambda: max(checkpoint_steps(run_dir), default=0) > reached[-1])
        if kill == 1:
            saves = run_dir / "checkpoints"
            wait_until(process, lambda: any(not path.name.isdigit() for path in saves.iterdir()))
        process.kill()
        rest = process.communicate()[0]
        assert process.returncode == -signal.SIGKILL, f"the run ended before kill {kill}: {rest}"
        reached.append(max(checkpoint_steps(run_dir), default=0))
        words = ["--resume", "run", "--quiet"]
    assert reached == sorted(reached), "a kill lost a checkpoint"
    assert in_process("--resume", run_dir, "--quiet") == 0
    assert read_result(run_dir)["state_sha256"] == read_result(whole)["state_sha256"]
    assert [row["env_steps"] for row in read_rows(run_dir)] == [
        row["env_steps"] for row in read_rows(whole)
    ]


@pytest.mark.slow
def test_a_signal_saves_before_the_exit_but_a_second_one_exits_at_once(tmp_path):
    """The second in the middle of a chunk that takes minutes."""
    words = [
        *SMALL,
        "--total-timesteps",
        10_000 * TOTAL,
        "--log-interval",
        STEPS,
        "--run-dir",
        "run",
    ]
    process = start_script(*words, cwd=tmp_path)
    read_until(process, "step ")
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 143, output
    assert "Traceback" not in output
    assert "--resume run" in output
    result = read_result(tmp_path / "run")
    assert result["status"] == "interrupted"
    assert (
        checkpoint_steps(tmp_path / "run")
        == [result["env_steps"]]
        == [int(Path(result["checkpoint"]).name)]
    )
    assert not (tmp_path / "run" / "DONE").exists()
    process = start_script("--resume", "run", "--log-interval", 10**9, cwd=tmp_path)
    try:
        read_until(process, "compiled")
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        read_until(process, "interrupted")
        process.send_signal(signal.SIGINT)
        assert "--resume run" in read_until(process, "exited at once")
        assert process.wait(timeout=60) == 130
    finally:
        process.kill()
        process.communicate()


def test_a_second_interrupt_speaks_its_last_words_before_the_exit(monkeypatch):
    said = []
    ended = threading.Event()

    def end(code):
        said.append(code)
        ended.set()

    monkeypatch.setattr("os._exit", end)
    console = SimpleNamespace(say=said.append, show_cursor=lambda: None)
    interruption = Interruption(console)
    interruption.last_words = lambda: "saved"
    with interruption:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert ended.wait(60)
    assert said[1:] == ["saved", 130]


def test_a_run_that_is_interrupted_before_it_trains_has_no_curve(tmp_path, monkeypatch):
    compile_together = pmaprl.runs.run.compile_together

    def interrupted(*programs):
        signal.raise_signal(signal.SIGINT)
        time.sleep(0.5)  # another thread takes the signal
        return compile_together(*programs)

    monkeypatch.setattr(
        pmaprl.runs.run,
        "compile_together",
        interrupted,
    )
    assert in_process(*SMALL, "--total-timesteps", TOTAL, "--run-dir", tmp_path / "run") == 130
    assert read_result(tmp_path / "run")["env_steps"] == 0
    assert not (tmp_path / "run" / "curve.png").exists()


def test_an_interrupted_run_says_of_which_step_its_evaluation_is(tmp_path, capsys):
    def interrupt(row):
        if row["env_steps"] == 52 * STEPS:
            signal.raise_signal(signal.SIGINT)
            time.sleep(0.5)  # another thread takes the signal

    steps = [
        "--total-timesteps",
        100 * STEPS,
        "--log-interval",
        2 * STEPS,
        "--eval-interval",
        50 * STEPS,
    ]
    args = parse(ppo.Args, [str(word) for word in (*SMALL, *steps, "--run-dir", tmp_path / "run")])
    with pytest.raises(KeyboardInterrupt):
        ppo.train(args, callback=interrupt)
    assert f"at step {50 * STEPS:,}" in capsys.readouterr().out
    result = read_result(tmp_path / "run")
    assert result["status"] == "interrupted"
    assert result["eval/env_steps"] == 50 * STEPS
    assert checkpoint_steps(tmp_path / "run") == [result["env_steps"]]


class Terminal(io.StringIO):
    closed_by_user = False

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self.closed_by_user:
            raise OSError(errno.EIO, "Input/output error")
        return len(text)


def test_a_run_goes_on_without_its_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    err = Terminal()
    for stream, terminal in (("stdout", out), ("stderr", err)):
        monkeypatch.setattr(sys, stream, terminal)
    console = Console(quiet=False, total_steps=100)
    console.show_bar(0)
    out.closed_by_user = err.closed_by_user = True
    for _ in range(2):
        console.update(
            10,
            {"episode/return": 1.0, "episode/count": 2.0, "time/sps": 1.0, "time/sps_wall": 1.0},
        )
        console.warn("something")
        console.say("something")
    console.stop(10)


def test_the_bar_says_in_one_line_what_goes_on_and_ends_at_what_is_trained(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    out = Terminal()
    written = []
    monkeypatch.setattr(out, "write", written.append)
    monkeypatch.setattr(sys, "stdout", out)
    console = Console(quiet=False, total_steps=123_456_789)
    console.show_bar(0)
    row = {
        "episode/return": [9123.0, 16223.0],
        "episode/count": 2.0,
        "time/sps": 1e6,
        "time/sps_wall": 1e6,
    }
    console.update(20_000_000, row)
    console.doing("collecting")
    console.stop(60_000_000)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", "".join(written))
    lines = re.split(r"[\r\n]+", text)
    assert max(map(len, lines)) <= 80
    assert "return 12,673 ± " in text
    assert [line for line in lines if line][-1].startswith("60,000,000/123,456,789 ")
    assert "collecting" not in lines[-1]


@pytest.mark.parametrize(
    ("before", "number"),
    [(lambda *_: None, signal.SIGHUP), (signal.SIG_IGN, 0)],
)
def test_a_closed_terminal_stops_a_run_unless_nohup_has_it_go_on(before, number):
    noticed = threading.Event()
    interruption = Interruption(SimpleNamespace(say=lambda text: noticed.set(), show_cursor=None))
    previous = signal.signal(signal.SIGHUP, before)
    try:
        interruption.start()
        assert (signal.getsignal(signal.SIGHUP) is before) == (not number)
        signal.raise_signal(signal.SIGHUP)
        assert noticed.wait(60 if number else 0) == bool(number)
        assert interruption.signal_of_any_process() == number
        interruption.stop()
        assert signal.getsignal(signal.SIGHUP) is before
    finally:
        signal.signal(signal.SIGHUP, previous)
    if number:
        with pytest.raises(SystemExit) as end:  # after the last look, too
            interruption.raise_received()
        assert end.value.code == 129


def test_a_nan_stops_the_run_with_a_reason(tmp_path, capsys):
    """The reward is NaN from step 41 of each environment on, that is in update 6; updates 1 to 5
    are good.
    """
    words = [
        *SMALL,
        "--env",
        "helpers:Poison",
        "--total-timesteps",
        100 * STEPS,
        "--run-dir",
        tmp_path / "run",
    ]
    words += [
        "--checkpoint-interval",
        2 * STEPS,
        "--log-interval",
        5 * STEPS,
        "--num-seeds",
        2,
        "--seed",
        7,
    ]
    assert in_process(*words) == 1
    printed = capsys.readouterr()
    message = only_message(printed.err[printed.err.index("error:") :])
    assert f"not finite at step {6 * STEPS}" in message
    assert "seed 7" in message
    assert message.split("error: ")[1].split()[0] in read_rows(tmp_path / "run")[0], (
        "the metric's name comes first"
    )
    assert f"step {4 * STEPS}" in message
    shown = [line.split()[1] for line in printed.out.splitlines() if line.startswith("step ")]
    assert all(int(step) < 6 * STEPS for step in shown), "a broken number is shown before the error"
    assert checkpoint_steps(tmp_path / "run") == [2 * STEPS, 4 * STEPS]
    result = read_result(tmp_path / "run")
    assert result["status"] == "failed"
    assert "not finite" in result["reason"]
    assert None in read_rows(tmp_path / "run")[-1]["loss/value"], (
        "the row that shows the broken number is there"
    )
    resumed = ["--resume", tmp_path / "run", "--env", "helpers:Poison", "--quiet"]
    assert in_process(*resumed, "--stop-after", 5 * STEPS) == 0
    assert read_result(tmp_path / "run")["env_steps"] == 5 * STEPS


@pytest.mark.slow
def test_a_full_disk_is_said_clearly(tmp_path, capfd):
    """Files may not grow beyond a limit that the checkpoint exceeds and everything else keeps: as
    on a full disk.
    """
    wide = [
        *SMALL,
        "--hidden-sizes",
        128,
        128,
        "--total-timesteps",
        6 * STEPS,
        "--run-dir",
        tmp_path / "run",
    ]
    assert (
        in_process(*wide, "--checkpoint-interval", STEPS, "--stop-after", 2 * STEPS, "--quiet") == 0
    )
    before = fingerprint(tmp_path / "run" / "checkpoints")
    resume = "--resume", tmp_path / "run", "--quiet"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    capfd.readouterr()
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, hard))
    try:
        assert in_process(*resume) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    gc.collect()
    message = only_message(capfd.readouterr().err)
    assert f"checkpoint {3 * STEPS} " in message
    assert "File too large" in message
    assert message.startswith("error: ") and message.endswith(f"{STEPS}, {2 * STEPS}"), (
        "orbax complains as well"
    )
    assert read_result(tmp_path / "run")["status"] == "failed"
    after = fingerprint(tmp_path / "run" / "checkpoints")
    # Written since, by threads that had not noticed
    late = {name for name in after if UNFINISHED in name}
    assert {name: digest for name, digest in after.items() if name not in late} == before
    assert in_process(*resume) == 0
    assert read_result(tmp_path / "run")["env_steps"] == 6 * STEPS


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Path, str]:
    """A run of 8 updates, stopped after 6, with checkpoints after 2, 4 and 6; and the checksum
    after 8.
    """
    folder = tmp_path_factory.mktemp("saved")
    words = [*SMALL, "--total-timesteps", 8 * STEPS, "--checkpoint-interval", 2 * STEPS, "--quiet"]
    assert in_process(*words, "--run-dir", folder / "run", "--stop-after", 6 * STEPS) == 0
    shutil.copytree(folder / "run", folder / "whole")
    assert in_process("--resume", folder / "whole", "--quiet") == 0
    return folder / "run", read_result(folder / "whole")["state_sha256"]


def damage(folder: Path, how: str) -> None:
    """Empty a checkpoint, or cut off half of its biggest file, or flip a byte in that."""
    biggest = max(
        (path for path in folder.rglob("*") if path.is_file()),
        key=lambda path: path.stat().st_size,
    )
    content = bytearray(biggest.read_bytes())
    middle = len(content) // 2
    content[middle] ^= 0xFF
    biggest.write_bytes(content[:middle] if how == "cut" else content)
    if how == "emptied":
        shutil.rmtree(folder)
        folder.mkdir()


@pytest.mark.parametrize(("how", "newest"), [("cut", 1), ("flipped", 2), ("emptied", 1)])
def test_a_damaged_checkpoint_is_skipped_with_a_warning(
    how, newest, saved, tmp_path, capsys, caplog
):
    """A line of metrics is torn as well, as after a crash within a write; if all are damaged the
    run is refused.
    """
    run_dir = Path(shutil.copytree(saved[0], tmp_path / "run"))
    for updates in (6, 4)[:newest]:
        damage(run_dir / "checkpoints" / str(updates * STEPS), how)
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"env_steps": 448, "upd')
    assert in_process("--resume", run_dir) == 0
    output = capsys.readouterr()
    gc.collect()
    assert "Traceback" not in output.err + caplog.text
    assert output.err.count("warning:") == newest
    assert f"checkpoint {6 * STEPS}" in output.err
    assert f"at step {(6 - 2 * newest) * STEPS}" in output.out
    result = read_result(run_dir)
    assert result["status"] == "finished"
    assert result["state_sha256"] == saved[1]
    assert Path(result["checkpoint"]).name == str(8 * STEPS)
    steps = [row["env_steps"] for row in read_rows(run_dir)]
    assert steps == sorted(set(steps))
    for step in checkpoint_steps(run_dir):
        damage(run_dir / "checkpoints" / str(step), how)
    assert in_process("--resume", run_dir, "--quiet") == 2
    assert f"checkpoint {8 * STEPS}" in only_message(capsys.readouterr().err)


def test_only_what_loads_counts_among_the_newest_and_as_the_best(tmp_path):
    run_dir = tmp_path / "run"
    folder = tmp_path / "run" / "checkpoints"
    words = [
        *SMALL,
        "--total-timesteps",
        8 * STEPS,
        "--checkpoint-interval",
        STEPS,
        "--run-dir",
        run_dir,
        "--quiet",
    ]
    assert in_process(*words, "--stop-after", 5 * STEPS) == 0
    for updates, mean in enumerate([1e6, 3e6, 9e6, 2e6, 0.0], start=1):
        path = folder / str(updates * STEPS) / "metrics" / "metrics"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"returns": [mean]}))
    for updates in (3, 5):
        damage(folder / str(updates * STEPS), "cut")
    keep = "--keep-best", "--keep-checkpoints", 2, "--checkpoint-interval", 0
    assert in_process("--resume", run_dir, *keep, "--stop-after", 6 * STEPS) == 0
    assert checkpoint_steps(run_dir) == [2 * STEPS, 4 * STEPS, 6 * STEPS]
    aside = {path.name for path in folder.iterdir() if not path.name.isdigit()}
    assert aside == {f"{updates * STEPS}.damaged" for updates in (3, 5)}


@pytest.mark.parametrize(
    "is_copied",
    [False, True],
)
def test_a_directory_that_is_moved_away_ends_the_run(is_copied, tmp_path, monkeypatch, capsys):
    """A copy in its place, which has the text of the lock too, is not this run's directory."""
    save = Saver.save

    def moving(saver, step, state):
        if step == 2 * STEPS:
            saver.checkpoints.wait()
            (tmp_path / "run").rename(tmp_path / "elsewhere")
            if is_copied:
                shutil.copytree(
                    tmp_path / "elsewhere",
                    tmp_path / "run",
                )
        save(saver, step, state)

    monkeypatch.setattr(Saver, "save", moving)
    words = [*SMALL, "--total-timesteps", 4 * STEPS, "--checkpoint-interval", STEPS, "--quiet"]
    assert in_process(*words, "--run-dir", tmp_path / "run") == 1
    assert "moved" in only_message(capsys.readouterr().err)
    assert (tmp_path / "run").exists() == is_copied
    assert checkpoint_steps(tmp_path / "elsewhere") == [STEPS]
    if is_copied:
        assert checkpoint_steps(tmp_path / "run") == [STEPS]


@pytest.mark.parametrize(
    "is_replaced",
    [False, True],
)
def test_a_log_that_is_deleted_or_replaced_is_written_anew(
    is_replaced, tmp_path, monkeypatch, capsys
):
    save = Saver.save
    log = tmp_path / "run" / "metrics.jsonl"

    def losing(saver, step, state):
        save(saver, step, state)
        if step in (2 * STEPS, 4 * STEPS):  # the last one after the last row
            log.unlink()
            if is_replaced:
                log.write_text("other rows\n")

    monkeypatch.setattr(Saver, "save", losing)
    words = [
        *SMALL,
        "--total-timesteps",
        4 * STEPS,
        "--checkpoint-interval",
        STEPS,
        "--quiet",
    ]
    assert in_process(*words, "--log-interval", STEPS, "--run-dir", tmp_path / "run") == 0
    assert str(log) in capsys.readouterr().err
    steps = [row["env_steps"] for row in read_rows(tmp_path / "run")]
    assert sorted(set(steps)) == [
        STEPS,
        2 * STEPS,
        3 * STEPS,
        4 * STEPS,
    ]
    assert "other" not in log.read_text()
