"""A meeting of processes: process 0 guards their address, and tells its own from strangers.

If a process registers at JAX's coordinator under a number that is taken, the coordinator ends all
processes that it knows. Therefore the coordinator listens at a port of its own, which the guard
names to the processes of this run alone, once all of them are there. The guard answers as long as
the run lives, so a process of another run ends with a reason, and no process of this run ends.

Messages are lines of JSON. A newcomer says which process of which run it is (`Member`). The guard
lets it wait, or go on to the coordinator, or says why it refuses it.
"""

import dataclasses
import errno
import hashlib
import json
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeGuard

from pmaprl.cli.errors import UsageError, printable

PATIENCE = 10.0  # seconds until a connection has said who it is, or a guard has answered
POLL_INTERVAL = 0.2  # seconds between two looks at what is late
RETRY_INTERVAL = 0.5  # seconds between two attempts to reach the guard
DELAY = 5.0  # seconds beyond the timeout in which the guard may say who is missing
LONGEST_LINE = 2**18  # bytes; the flags of a run take a few thousand
LONGEST_TEXT = 100  # characters of a flag's value; a longer one is cut and gets a checksum
BACKLOG = 1024  # connections that the system keeps until the guard comes to them
MAX_UNKNOWN = 64  # connections that have not said yet who they are; the oldest are dropped
MAX_WARNINGS = 10  # different warnings about processes that were refused
MAX_NAMED = 4  # flags that differ, or processes that are missing, in one sentence

WAIT = "wait"
GO = "go"
ENDING = "ending"
TAKEN = "taken"
DIFFERENT = "different"
MISSING = "missing"
LOST = "lost"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Member:
    """A process as it presents itself.

    Attributes:
        process: its number, from 0.
        run: everything that all processes of its run have in common, as texts (see `shown`).
        key: a random text by which the guard knows it again.
    """

    process: int
    run: dict[str, str]
    key: str


def shown(value: Any) -> str:
    """A value as printable ASCII of limited length, which is equal for equal values only."""
    text = json.dumps(value, sort_keys=True, default=str).replace("\x7f", "\\u007f")
    if len(text) <= LONGEST_TEXT:
        return text
    checksum = hashlib.sha256(text.encode()).hexdigest()[:16]
    return f"{text[: LONGEST_TEXT - 30]}... ({checksum})"


# ----------------------------------------------------------------------------------------- messages


def to_line(message: dict[str, Any]) -> bytes:
    """A message as it is sent."""
    return json.dumps(message).encode() + b"\n"


def from_line(line: bytes) -> dict[str, Any]:
    """The message in a line. Raises ValueError where there is none."""
    try:
        message = json.loads(line)
    except RecursionError as error:
        raise ValueError("too deep") from error
    if not isinstance(message, dict):
        raise ValueError("not a message")
    return message


def _read_member(line: bytes) -> Member:
    """The process that has sent a line. Raises ValueError where it is none."""
    message = from_line(line)
    process = message.get("process")
    key = message.get("key")
    if type(process) is not int or not 0 <= process < 2**31 or not _is_plain(key):
        raise ValueError("not a process")
    return Member(process=process, run=_read_texts(message.get("run")), key=key)


def _read_texts(texts: Any) -> dict[str, str]:
    """A dictionary from outside, fit to be printed. Raises ValueError where it is not."""
    if not isinstance(texts, dict) or not all(map(_is_plain, [*texts.keys(), *texts.values()])):
        raise ValueError("not printable")
    return texts


def _is_plain(text: Any) -> TypeGuard[str]:
    if not isinstance(text, str) or len(text) > LONGEST_TEXT:
        return False
    return text.isascii() and text.isprintable()


def _differences(there: dict[str, str], here: dict[str, str]) -> str:
    """Say in words which entries differ."""
    texts = []
    for name in {**here, **there}:
        then = there.get(name, "unset")
        now = here.get(name, "unset")
        if then != now:
            texts.append(f"{name} is {then} there, {now} here")
    more = f"; and {len(texts) - MAX_NAMED} more" if len(texts) > MAX_NAMED else ""
    return "; ".join(texts[:MAX_NAMED]) + more


# ---------------------------------------------------------------------------------------- addresses


def split_address(address: str) -> tuple[str, int]:
    """Host and port; an IPv6 host may stand in brackets."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen(port: int, host: str = "") -> socket.socket:
    """A socket that listens at a port, on all interfaces or on that of `host`.

    With port 0 it is one that is free. Raises OSError.
    """
    if host in ("", "::") and socket.has_dualstack_ipv6():
        try:
            both = {"family": socket.AF_INET6, "dualstack_ipv6": True}
            return socket.create_server(("", port), backlog=BACKLOG, **both)
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise  # else there is no IPv6 here
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), backlog=BACKLOG, family=family)


def _listen_or_refuse(port: int, host: str, where: str) -> socket.socket:
    try:
        return listen(port, host)
    except OSError as error:
        cause = (error.strerror or str(error)).partition(" (while")[0]
        reason = f"process 0 cannot listen at {where}: {cause}"
        advice = "; name another port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else ""
        raise UsageError(reason + advice) from error


def _choose_port(host: str) -> int:
    """A port for JAX's coordinator: the one that JAX's own variable names, or one that is free."""
    name = "JAX_COORDINATOR_PORT"
    wanted = os.environ.get(name, "0")
    if not wanted.isdecimal() or int(wanted) >= 2**16:
        raise UsageError(f"{name} is {shown(wanted)}: it has to be the number of a port")
    with _listen_or_refuse(int(wanted), host, f"port {wanted} of {name}") as server:
        return server.getsockname()[1]


# ---------------------------------------------------------------------------------------- the guard


class _Connection:
    """A connection to the guard. It has a `member` once that has said who it is."""

    def __init__(self, stream: socket.socket, source: str):
        stream.setblocking(False)
        self.stream = stream
        self.source = source
        self.buffer = b""
        self.since = time.monotonic()
        self.member: Member | None = None
        self.key = ""  # the member's key, by which the guard knows it again

    def send(self, **message: Any) -> None:
        with suppress(OSError):  # the other side is gone, which the next read notices
            self.stream.sendall(to_line(message))


class Guard:
    """Answers whoever comes to a server's address, in a thread that lives as long as the process.

    Nobody can hold it up: it waits for no connection, reads a limited number of bytes of each, and
    hangs up on those that do not say in time who they are.
    """

    def __init__(
        self,
        server: socket.socket,
        own: Member,
        count: int,
        port: int,
        timeout: float,
        warn: Callable[[str], None],
    ):
        """Begin to answer.

        Args:
            server: the socket that listens at the address, which the guard closes.
            own: this process, the only one to be process 0.
            count: number of processes.
            port: the port of JAX's coordinator.
            timeout: seconds within which all processes have to come.
            warn: gets a sentence about each process that was refused.
        """
        server.setblocking(False)
        self._server = server
        self._own = own
        self._count = count
        self._port = port
        self._until = time.monotonic() + timeout
        self._timeout = timeout
        self._warn = warn
        self._warnings: set[str] = set()
        self._complete = False
        self._keys: dict[int, str] = {}  # of all members, once they were complete
        self._members: dict[int, _Connection] = {}
        self._unknown: list[_Connection] = []
        self._alarm, self._bell = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ)
        self._selector.register(self._alarm, selectors.EVENT_READ)
        os.register_at_fork(after_in_child=self._close_in_child)
        self._thread = threading.Thread(target=self._serve, name="pmaprl guard", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End, and hang up on everybody."""
        self._bell.close()
        self._thread.join()

    def _close_in_child(self) -> None:
        """Leave the address to the parent alone, so that it is free when that is gone."""
        for connection in [*self._unknown, *self._members.values()]:
            connection.stream.close()
        self._server.close()

    def _serve(self) -> None:
        while self._answer_events():
            now = time.monotonic()
            for connection in [each for each in self._unknown if now - each.since > PATIENCE]:
                self._drop(connection)
            if not self._complete and now > self._until:
                self._give_up()
        for connection in [*self._unknown, *self._members.values()]:
            self._drop(connection)
        self._selector.close()
        self._server.close()
        self._alarm.close()

    def _answer_events(self) -> bool:
        """Wait for events and answer them; return False if the guard is to end."""
        timeout = None if self._complete and not self._unknown else POLL_INTERVAL
        for event, _ in self._selector.select(timeout):
            if event.fileobj is self._alarm:
                return False
            if event.fileobj is self._server:
                self._accept()
            else:
                self._read(event.data)
        return True

    def _accept(self) -> None:
        try:
            stream, source = self._server.accept()
        except OSError:
            time.sleep(RETRY_INTERVAL)  # or this would spin where too many files are open
            return
        connection = _Connection(stream, source[0].removeprefix("::ffff:"))
        self._selector.register(stream, selectors.EVENT_READ, connection)
        self._unknown.append(connection)
        if len(self._unknown) > MAX_UNKNOWN:
            self._drop(self._unknown[0])

    def _read(self, connection: _Connection) -> None:
        """Read from a connection, and answer a complete line.

        A connection that hangs up is dropped, and so is a member that sends anything more.
        """
        if connection.stream.fileno() < 0:
            return  # an earlier event has closed it
        try:
            data = connection.stream.recv(2**16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        connection.buffer += data
        if not data or connection.member or len(connection.buffer) > LONGEST_LINE:
            self._drop(connection)
            if connection.member and self._complete:
                for each in self._members.values():
                    each.send(answer=LOST, process=connection.member.process)
            return
        line, end, _ = connection.buffer.partition(b"\n")
        if not end:
            return
        try:
            member = _read_member(line)
        except ValueError:
            self._drop(connection)  # a scanner of ports, or another program
            return
        self._receive(connection, member)

    def _receive(self, connection: _Connection, member: Member) -> None:
        """Let a process in, or refuse it."""
        known = self._members.get(member.process)
        comes_again = member.key == (known.key if known else self._keys.get(member.process))
        poses_as_first = member.process == 0 and member.key != self._own.key
        if comes_again:  # it has lost its connection, which may not be noticed here yet
            if known:
                self._drop(known)
            self._admit(connection, member)
        elif self._complete and len(self._members) < self._count:
            connection.send(answer=ENDING)  # JAX ends the processes of a run that has lost one
            self._drop(connection)
        elif member.run != self._own.run:
            reason = _differences(member.run, self._own.run)
            self._refuse(connection, member, reason, answer=DIFFERENT, run=self._own.run)
        elif known or poses_as_first or member.process >= self._count:
            self._refuse(connection, member, "it is here already", answer=TAKEN)
        else:
            self._admit(connection, member)

    def _admit(self, connection: _Connection, member: Member) -> None:
        """Admit a process to this run, and let all go on once they are complete."""
        connection.member = member
        connection.key = member.key
        connection.buffer = b""
        self._unknown.remove(connection)
        self._members[member.process] = connection
        connection.send(answer=WAIT)
        if self._complete:
            connection.send(answer=GO, port=self._port)
        elif len(self._members) == self._count:
            self._complete = True
            for process, each in self._members.items():
                self._keys[process] = each.key
                each.send(answer=GO, port=self._port)

    def _refuse(self, connection: _Connection, member: Member, reason: str, **message: Any) -> None:
        connection.send(**message)
        self._drop(connection)
        warning = f"process {member.process} from {connection.source} was refused: {reason}"
        if warning not in self._warnings and len(self._warnings) < MAX_WARNINGS:
            self._warnings.add(warning)
            self._warn(warning)

    def _give_up(self) -> None:
        """Tell the processes that are here which ones are missing, and hang up."""
        missing = [process for process in range(self._count) if process not in self._members]
        named = missing[: MAX_NAMED + 1]
        for connection in list(self._members.values()):
            connection.send(answer=MISSING, processes=named, seconds=float(self._timeout))
            self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        if connection in self._unknown:
            self._unknown.remove(connection)
        if connection.member and self._members.get(connection.member.process) is connection:
            del self._members[connection.member.process]
        if connection.stream.fileno() >= 0:
            self._selector.unregister(connection.stream)
            connection.stream.close()


# ---------------------------------------------------------------------------------- those that come


def join(address: str, member: Member, timeout: float) -> tuple["Link", int]:
    """Wait until all processes of a run are at its guard.

    Args:
        address: where the guard listens, HOST:PORT; a guard that is not there yet is waited for.
        member: this process.
        timeout: seconds to wait.

    Returns:
        The link to the guard, by which it knows that this process lives, and the port of JAX's
        coordinator.

    Raises:
        UsageError: this process is refused, another program listens there, or not all have come in
            time.
    """
    end = time.monotonic() + timeout
    while True:
        try:
            return _ask(address, member, end)
        except UnicodeError as error:  # of a name that cannot be one
            raise UsageError(f"{address}: {error}") from error
        except OSError as error:
            problem = error.strerror or str(error) or "it does not answer"
        if time.monotonic() + RETRY_INTERVAL > end:
            fault = "is not there" if member.process else "does not reach itself there"
            raise UsageError(f"process 0 {fault} within {timeout:g} s: {problem}")
        time.sleep(RETRY_INTERVAL)


def _ask(address: str, member: Member, end: float) -> tuple["Link", int]:
    """Make one attempt to `join`; raise OSError where it is worth another one."""
    soon = min(time.monotonic() + PATIENCE, end)
    stream = socket.create_connection(split_address(address), max(soon - time.monotonic(), 0.1))
    link = Link(stream)
    try:
        stream.sendall(to_line(dataclasses.asdict(member)))
        message = link.read(soon)
        if message.get("answer") == WAIT:
            message = _read_last(link, end + DELAY)
        port = _read_answer(message, member)
    except BaseException:
        link.close()
        raise
    # If a child kept the connection open, the guard would not notice the end of this process
    os.register_at_fork(after_in_child=link.close)
    return link, port


def _read_last(link: "Link", end: float) -> dict[str, Any]:
    try:
        return link.read(end)
    except TimeoutError:
        raise UsageError("process 0 is there, but others have not come in time") from None


class Link:
    """A connection to the guard, which gives messages of limited length in limited time."""

    def __init__(self, stream: socket.socket):
        self._stream = stream
        self._buffer = b""

    def close(self) -> None:
        self._stream.close()

    def read(self, end: float) -> dict[str, Any]:
        """Read the next message.

        Raises OSError if none comes until `end`, UsageError if another program has sent it.
        """
        while b"\n" not in self._buffer:
            left = end - time.monotonic()
            if left <= 0:
                raise TimeoutError("what listens there does not answer")
            self._stream.settimeout(left)
            data = self._stream.recv(2**12)
            if not data:
                raise ConnectionError("what listens there hangs up")
            self._buffer += data
            if not self._buffer.startswith(b"{") or len(self._buffer) > LONGEST_LINE:
                raise _other_program()
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            return from_line(line)
        except ValueError:
            raise _other_program() from None


def _read_answer(message: dict[str, Any], member: Member) -> int:
    """The port in a guard's answer.

    Raises UsageError for a refusal, OSError where it is worth another attempt.
    """
    answer = message.get("answer")
    port = message.get("port")
    if answer == GO and type(port) is int and 0 < port < 2**16:
        return port
    if answer == ENDING:
        raise ConnectionError("a run that has lost a process is still ending there")
    if answer == TAKEN:
        which = f"process {member.process} of this very run"
        raise UsageError(f"{which} is there already; name another port")
    if answer == MISSING:
        raise UsageError(_missing(message))
    if answer == DIFFERENT:
        try:
            there = _read_texts(message.get("run"))
        except ValueError:
            raise _other_program() from None
        raise UsageError(f"the run there is another one: {_differences(there, member.run)}")
    raise _other_program()


def _missing(message: dict[str, Any]) -> str:
    processes = message.get("processes")
    seconds = message.get("seconds")
    if not isinstance(processes, list) or not isinstance(seconds, float):
        raise _other_program()
    numbers = [str(process) for process in processes if type(process) is int]
    named = ", ".join(numbers[:MAX_NAMED]) + ", ..." * (len(numbers) > MAX_NAMED)
    who = f"processes {named} have" if len(numbers) > 1 else f"process {named} has"
    return f"{who} not come within {seconds:g} s"


def _other_program() -> UsageError:
    return UsageError("what listens there is no process 0 of such a run; name another port")


@dataclasses.dataclass(frozen=True)
class Meeting:
    """All processes of a run, once they have met.

    Attributes:
        coordinator: the address of JAX's coordinator.
        bind_address: where process 0 lets it listen; None for JAX's default.
    """

    coordinator: str
    bind_address: str | None
    _link: Link  # open as long as this process lives
    _guard: Guard | None

    def close(self) -> None:
        """Leave the meeting, as if this process had ended."""
        self._link.close()
        if self._guard:
            self._guard.close()

    @contextmanager
    def watched(self, on_loss: Callable[[int], None]) -> Iterator[None]:
        """Call `on_loss` in a thread with the number of a lost process, while inside."""
        stop = threading.Event()
        thread = threading.Thread(target=self._watch, args=(on_loss, stop), daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _watch(self, on_loss: Callable[[int], None], stop: threading.Event) -> None:
        while not stop.is_set():
            try:
                message = self._link.read(time.monotonic() + POLL_INTERVAL)
            except TimeoutError:
                continue
            except (OSError, UsageError):
                message = {"answer": LOST, "process": 0}
            if message.get("answer") == LOST and type(message.get("process")) is int:
                on_loss(message["process"])
                return


def meet(address: str, process: int, count: int, run: dict[str, Any], timeout: float) -> Meeting:
    """Wait until all processes of a run are there.

    Args:
        address: HOST:PORT of process 0.
        process: number of this process.
        count: number of processes.
        run: values that all of them have in common; a process with others is refused.
        timeout: seconds to wait.

    Raises:
        UsageError: this process is refused, process 0 cannot listen there, or not all have come in
            time.
    """
    texts = {name: shown(value) for name, value in run.items()}
    texts["the number of processes"] = shown(count)
    member = Member(process=process, run=texts, key=secrets.token_hex(16))
    host, port = split_address(address)
    bind_host = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", "").rpartition(":")[0].strip("[]")
    guard = None
    if process == 0:
        server = _listen_or_refuse(port, bind_host, address)
        try:
            coordinator_port = _choose_port(bind_host)
        except UsageError:
            server.close()
            raise
        guard = Guard(server, member, count, coordinator_port, timeout, _warn)
    try:
        link, coordinator_port = join(address, member, timeout)
    except BaseException as error:
        if guard:
            guard.close()
        if isinstance(error, UsageError):
            who = f"process {process} of {count} could not meet the others at {address}"
            raise UsageError(f"{who}: {error}") from error
        raise
    bind_address = join_address(bind_host, coordinator_port) if bind_host else None
    return Meeting(
        coordinator=join_address(host, coordinator_port),
        bind_address=bind_address,
        _link=link,
        _guard=guard,
    )


def _warn(text: str) -> None:
    with suppress(OSError, ValueError):  # nobody reads it any more
        print(f"warning: {printable(text)}", file=sys.stderr, flush=True)
