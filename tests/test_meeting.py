"""How processes meet at a guarded address; here each one is a thread, and JAX is not started."""

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from cli_helpers import check_words

from pmaprl.cli.errors import UsageError
from pmaprl.machine import meeting
from pmaprl.machine.meeting import Meeting, meet

RUN = {
    "--run-dir": "/runs/a",
    "--seed": 0,
    "--hidden-sizes": (64, 64),
}
SOON = 30.0  # seconds in which a busy machine has done what takes none


@pytest.fixture
def opened(monkeypatch) -> Iterator[list[Any]]:
    """Sockets and guards that the test closes at its end; here a process retries at once."""
    monkeypatch.setattr(meeting, "RETRY_INTERVAL", 0.02)
    things = []
    yield things
    for thing in things:
        thing.close()


def free_address(host: str = "127.0.0.1") -> str:
    with meeting.listen(0) as server:
        return meeting.join_address(host, server.getsockname()[1])


class Newcomer(threading.Thread):
    """A process that meets the others in its thread."""

    def __init__(
        self,
        opened: list,
        address: str,
        process: int,
        count: int = 2,
        run: dict[str, Any] = RUN,
        timeout: float = SOON,
    ):
        super().__init__(daemon=True)
        self._opened = opened
        self._arguments = (address, process, count, run, timeout)
        self._met: Meeting | None = None
        self._error: UsageError | None = None
        self.start()

    def run(self) -> None:
        try:
            self._met = meet(*self._arguments)
            self._opened.append(self._met)
        except UsageError as error:
            self._error = error

    def met(self) -> Meeting:
        self.join(2 * SOON)
        assert self._met, self._error
        return self._met

    def refusal(self) -> str:
        self.join(2 * SOON)
        assert self._error, self._met
        return str(self._error)


def start_run(opened: list, address: str, count: int = 2) -> list[Meeting]:
    """A run under way: all of its processes, that come in an order of their own, have met."""
    processes = [Newcomer(opened, address, process, count) for process in reversed(range(count))]
    return [process.met() for process in reversed(processes)]


def connect(opened: list, address: str) -> socket.socket:
    stream = socket.create_connection(meeting.split_address(address), SOON)
    opened.append(stream)
    return stream


def hangs_up(stream: socket.socket) -> bool:
    """Tell whether the other side ends the connection, and says nothing before."""
    try:
        return stream.recv(100) == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_all_processes_are_told_the_same_coordinator_at_another_port(host, opened):
    if host == "[::1]" and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    address = free_address(host.strip("[]"))
    coordinators = {met.coordinator for met in start_run(opened, address, count=3)}
    (coordinator,) = coordinators
    assert coordinator != address
    assert coordinator.rpartition(":")[0] == host


def test_a_process_that_is_alone_meets_nobody(opened):
    assert start_run(opened, free_address(), count=1)


ANOTHER = RUN | {"--seed": 7}
ELSEWHERE = RUN | {"--run-dir": "/runs/b"}
STRANGERS = {
    "another run directory": ({"process": 1, "run": ELSEWHERE}, "--run-dir, /runs/b"),
    "another flag": ({"process": 1, "run": ANOTHER}, "--seed is 0 there, 7 here"),
    "another algorithm": ({"process": 1, "run": {"--tau": 1}}, "--tau is unset there, --seed is 0"),
    "more processes": ({"process": 1, "count": 4}, "processes is 2 there, 4 here"),
    "a number beyond": ({"process": 3, "count": 4}, "processes is 2 there, 4 here"),
    "the same command again": ({"process": 1}, "process 1 of 2, already"),
    "a process 0 here": ({"process": 0, "run": ANOTHER}, "cannot listen, another port"),
}


@pytest.mark.parametrize(("how", "words"), STRANGERS.values(), ids=STRANGERS)
def test_a_stranger_is_refused_by_a_run_that_is_under_way(how, words, opened, capsys):
    address = free_address()
    first, second = start_run(opened, address)
    refusal = Newcomer(opened, address, **how).refusal()
    check_words(refusal, words)
    check_words(refusal, address)
    assert losses(first, 0.1) == losses(second, 0.1) == []
    if how["process"]:
        assert capsys.readouterr().err.count("warning: ") == 1  # process 0 tells of it


def losses(met: Meeting, seconds: float) -> list[int]:
    """The process that this one loses, if it loses one within some seconds."""
    lost = queue.SimpleQueue()
    with met.watched(lost.put), suppress(queue.Empty):
        return [lost.get(timeout=seconds)]
    return []


def test_a_process_0_on_another_machine_is_refused(opened, monkeypatch):
    """Its own guard listens there, while the address leads to that of the run under way."""
    address = free_address()
    start_run(opened, address)
    monkeypatch.setattr(meeting, "_listen_or_refuse", lambda *where: meeting.listen(0))
    check_words(Newcomer(opened, address, 0).refusal(), "process 0 of 2, already")
    check_words(Newcomer(opened, address, 0, run=ANOTHER).refusal(), "--seed is 0 there")


def test_a_process_0_on_another_machine_does_not_take_the_place_of_the_right_one(opened):
    address = free_address()
    own = meeting.Member(process=0, run={}, key="a")
    other = meeting.Member(process=0, run={}, key="b")
    server = meeting.listen(meeting.split_address(address)[1])
    opened.append(meeting.Guard(server, own, 1, 1234, SOON, warn=print))
    with pytest.raises(UsageError, match="process 0 .* there already"):
        meeting.join(address, other, SOON)
    link, port = meeting.join(address, own, SOON)
    opened.append(link)
    assert port == 1234


def test_a_stranger_does_not_end_a_run_that_is_still_meeting(opened):
    address = free_address()
    first = Newcomer(opened, address, 0)
    check_words(Newcomer(opened, address, 1, run=ANOTHER).refusal(), "--seed is 0 there, 7 here")
    second = Newcomer(opened, address, 1)
    assert first.met().coordinator == second.met().coordinator


def test_a_process_that_dies_while_others_are_awaited_can_come_again(opened):
    address = free_address()
    first = Newcomer(opened, address, 0, count=3)
    dead = wait_for(lambda: connect(opened, address))
    texts = {name: meeting.shown(value) for name, value in RUN.items()}
    texts["the number of processes"] = "3"
    dead.sendall(meeting.to_line({"process": 1, "run": texts, "key": "of the dead one"}))
    assert b"wait" in dead.recv(100)
    check_words(Newcomer(opened, address, 1, count=3).refusal(), "already")
    dead.close()
    second, third = (Newcomer(opened, address, process, count=3) for process in (1, 2))
    assert first.met().coordinator == second.met().coordinator == third.met().coordinator


def test_a_process_comes_again_where_its_run_is_still_ending(opened):
    """Such as one that is started anew when process 0 has not noticed yet that it has died."""
    address = free_address()
    first, second = start_run(opened, address)
    second.close()
    waiting = Newcomer(opened, address, 1)
    time.sleep(0.1)
    assert waiting.is_alive()
    first.close()
    anew = Newcomer(opened, address, 0)
    assert anew.met().coordinator == waiting.met().coordinator


def test_a_process_that_has_lost_its_connection_is_known_again(opened):
    address = free_address()
    server = meeting.listen(meeting.split_address(address)[1])
    own = meeting.Member(process=0, run={}, key="a")
    other = meeting.Member(process=1, run={}, key="b")
    guard = meeting.Guard(server, own, 2, 1234, SOON, warn=pytest.fail)
    opened.append(guard)
    links: dict[int, meeting.Link] = {}

    def come(member: meeting.Member) -> None:
        links[member.process], port = meeting.join(address, member, SOON)
        assert port == 1234

    both = [threading.Thread(target=come, args=(member,)) for member in (own, other)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join(SOON)
    links[1].close()
    come(other)
    for link in links.values():
        link.close()


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_the_others_know_soon_that_a_process_is_gone(lost, opened):
    processes = start_run(opened, free_address(), count=3)
    processes[lost].close()
    for other in {0, 1, 2} - {lost}:
        assert losses(processes[other], SOON) == [lost]


def test_whoever_is_there_says_who_is_missing(opened):
    address = free_address()
    first, second = (Newcomer(opened, address, process, count=4, timeout=1.0) for process in (0, 1))
    check_words(first.refusal(), "processes 2, 3 have, 1 s")
    check_words(second.refusal(), "processes 2, 3 have, 1 s")
    assert start_run(opened, address)  # which is free again


def test_a_process_0_that_never_comes_is_not_waited_for_longer(opened):
    nobody = Newcomer(opened, free_address(), 1, timeout=0.3)
    check_words(nobody.refusal(), "process 0, 0.3 s, refused")
    unknown = Newcomer(opened, "no.such.host.invalid:1234", 1, timeout=0.3)
    check_words(unknown.refusal(), "process 0, 0.3 s")
    impossible = Newcomer(opened, f"{'x' * 70}.a:1234", 1)
    check_words(impossible.refusal(), "x.a:1234")


def serve(opened: list, answer: Callable[[socket.socket], None]) -> str:
    """The address of a program that is no guard."""
    server = meeting.listen(0)
    opened.append(server)

    def run() -> None:
        while True:
            try:
                stream, _ = server.accept()
            except OSError:
                return
            opened.append(stream)
            answer(stream)

    threading.Thread(target=run, daemon=True).start()
    return f"127.0.0.1:{server.getsockname()[1]}"


FOREIGN = {
    "a banner": b"SSH-2.0-OpenSSH_9.6\r\n",
    "gRPC": b"\x00\x00\x12\x04\x00\x00\x00\x00\x00",
    "JSON": b'{"answer": []}\n',
    "a list": b'{"answer": "different", "run": ["a"]}\n',
    "an escape sequence": b'{"answer": "different", "run": {"--seed": "\\u001b[2J"}}\n',
    "a port that is none": b'{"answer": "go", "port": 1e9}\n',
    "nobody missing": b'{"answer": "missing", "processes": {}, "seconds": null}\n',
    "deep": b'{"a":' * 40_000 + b"\n",
    "without an end": b"{" + b" " * 2**19,
}


@pytest.mark.parametrize("said", FOREIGN.values(), ids=FOREIGN)
def test_another_program_that_answers_there_is_refused(said, opened):
    def answer(stream: socket.socket) -> None:
        with suppress(OSError):
            stream.sendall(said)

    refusal = Newcomer(opened, serve(opened, answer), 1).refusal()
    check_words(refusal, "no process 0, another port")
    assert refusal.isprintable()


def test_a_server_of_web_pages_is_refused(opened):
    server = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        address = f"127.0.0.1:{server.server_port}"
        check_words(Newcomer(opened, address, 1).refusal(), "no process 0")
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("hang_up", [False, True])
def test_a_program_that_does_not_answer_is_not_waited_for_longer(hang_up, opened, monkeypatch):
    monkeypatch.setattr(meeting, "PATIENCE", 0.2)
    address = serve(opened, socket.socket.close if hang_up else lambda stream: None)
    check_words(Newcomer(opened, address, 1, timeout=0.5).refusal(), "process 0, 0.5 s")


NO_PROCESS = {
    "web": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "gRPC": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "bytes": bytes(range(256)) + b"\n",
    "deep": b"[" * 100_000 + b"\n",
    "a number": b"1\n",
    "a negative process": b'{"process": -1, "run": {}, "key": "k"}\n',
    "a process that is none": b'{"process": true, "run": {}, "key": "k"}\n',
    "no run": b'{"process": 1, "run": null, "key": "k"}\n',
    "a nested run": b'{"process": 1, "run": {"--seed": {}}, "key": "k"}\n',
    "an escape sequence": b'{"process": 1, "run": {"--seed": "\\u001b[2J"}, "key": "k"}\n',
    "without an end": b"{" + b" " * 2**19,
}


@pytest.mark.parametrize("said", NO_PROCESS.values(), ids=NO_PROCESS)
def test_a_guard_hangs_up_on_what_is_no_process(said, opened, capfd):
    address = free_address()
    first = Newcomer(opened, address, 0)
    stranger = wait_for(lambda: connect(opened, address))
    with suppress(ConnectionError):
        stranger.sendall(said)
    assert hangs_up(stranger)
    second = Newcomer(opened, address, 1)
    assert first.met().coordinator == second.met().coordinator
    assert not capfd.readouterr().err


def wait_for(attempt: Callable[[], Any]) -> Any:
    """The result of an attempt, once it is not refused any more."""
    end = time.monotonic() + SOON
    while True:
        try:
            return attempt()
        except ConnectionError:
            assert time.monotonic() < end
            time.sleep(0.01)


def test_a_guard_is_not_held_up_by_those_that_say_nothing(opened, monkeypatch):
    monkeypatch.setattr(meeting, "MAX_UNKNOWN", 4)
    address = free_address()
    first = Newcomer(opened, address, 0)
    silent = [wait_for(lambda: connect(opened, address)) for _ in range(20)]
    for stream in silent[-2:]:
        stream.sendall(b'{"process": ')
    second = Newcomer(opened, address, 1)
    assert first.met().coordinator == second.met().coordinator
    assert hangs_up(silent[0])


def test_a_guard_hangs_up_on_those_that_say_nothing_for_long(opened, monkeypatch):
    monkeypatch.setattr(meeting, "PATIENCE", 0.3)
    address = free_address()
    start_run(opened, address)
    assert hangs_up(connect(opened, address))


def test_the_port_of_the_coordinator_is_the_one_that_a_variable_of_jax_names(opened, monkeypatch):
    address = free_address()
    coordinator = free_address()
    monkeypatch.setenv("JAX_COORDINATOR_PORT", coordinator.rpartition(":")[2])
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", "127.0.0.1:1")
    first, _ = start_run(opened, address)
    assert first.coordinator == first.bind_address == coordinator


@pytest.mark.parametrize("port", ["80a", "65536", "-1"])
def test_a_variable_that_names_no_port_is_refused(port, opened, monkeypatch):
    monkeypatch.setenv("JAX_COORDINATOR_PORT", port)
    address = free_address()
    refusal = Newcomer(opened, address, 0).refusal()
    check_words(refusal, f"JAX_COORDINATOR_PORT, {port}")
    monkeypatch.delenv("JAX_COORDINATOR_PORT")
    assert start_run(opened, address)  # which is free again


def test_the_coordinator_cannot_be_where_the_guard_is(opened, monkeypatch):
    address = free_address()
    monkeypatch.setenv("JAX_COORDINATOR_PORT", address.rpartition(":")[2])
    check_words(Newcomer(opened, address, 0).refusal(), "cannot listen, JAX_COORDINATOR_PORT")


def test_a_long_value_differs_though_it_begins_alike():
    long, other = (meeting.shown("x" * 1000 + end) for end in "ab")
    assert long != other
    assert len(long) <= meeting.LONGEST_TEXT
    assert meeting.shown((1, 2)) == meeting.shown([1, 2])
    assert meeting.shown("\x1b\x7fä").isprintable()
    assert meeting.shown("ä").isascii()


def test_a_guard_warns_of_many_strangers_a_few_times(opened, capsys):
    address = free_address()
    start_run(opened, address)
    for seed in range(2 * meeting.MAX_WARNINGS):
        Newcomer(opened, address, 1, run=RUN | {"--seed": seed + 1}).refusal()
    assert 0 < capsys.readouterr().err.count("warning: ") <= meeting.MAX_WARNINGS
