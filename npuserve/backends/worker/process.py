"""Worker processes as the server sees them: fork servers, their workers, and their output.

A worker is forked by a fork server, a small process of the worker's interpreter that has NumPy
imported already: a worker is up in milliseconds, its memory is shared with its siblings, and
the server itself, with its threads, is never forked. Everything here runs on the event loop.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from npuserve.backends.worker import wire
from npuserve.backends.worker.channel import rights
from npuserve.errors import InternalError

_SCRIPT = str(Path(__file__).with_name("fork_server.py"))

# A line longer than this is logged in pieces.
_MAX_LINE_BYTES = 1 << 16


@dataclass(frozen=True)
class Interpreter:
    """What runs the workers of a model.

    Attributes:
        python: path of the interpreter.
        activate: script to source before, as conda-pack environments want; "" for none.
    """

    python: str = sys.executable
    activate: str = ""

    def command(self, arguments: list[str]) -> list[str]:
        """The command line that runs Python with these arguments."""
        if not self.activate:
            return [self.python, *arguments]
        script = '. "$0" && export LD_LIBRARY_PATH="${1%/bin/*}/lib:$LD_LIBRARY_PATH" && exec "$@"'
        return ["/bin/bash", "-c", script, self.activate, self.python, *arguments]


class WorkerProcess:
    """One forked worker.

    Attributes:
        pid: process id.
        exited: its wait status, once it ended.
    """

    def __init__(self, fork_server: ForkServer, pid: int) -> None:
        self.pid = pid
        self.exited: asyncio.Future[int] = fork_server.loop.create_future()
        self._fork_server = fork_server

    def kill(self) -> None:
        """SIGKILL, if it still runs. The fork server does it: it knows that the id is still its."""
        if not self.exited.done():
            self._fork_server.kill(self.pid)


class ForkServer:
    """A running fork server of one interpreter.

    Use `start` before anything else, `close` at the end. If it dies its workers die with it; it is
    started again for the next worker.
    """

    def __init__(self, interpreter: Interpreter) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._interpreter = interpreter
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._workers: dict[int, WorkerProcess] = {}
        self._waiting: dict[int, asyncio.Future[int]] = {}
        self._next_token = 1
        self._starting = asyncio.Lock()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop it was first used on."""
        assert self._loop is not None
        return self._loop

    async def fork(self, fds: list[int], timeout_s: float) -> WorkerProcess:
        """A new worker that owns copies of `fds` (channel, output).

        Raises:
            InternalError: the interpreter did not come up in time.
        """
        self._loop = asyncio.get_running_loop()
        async with self._starting:
            if self._control is None:
                await self._start(timeout_s)
            token = self._next_token
            self._next_token += 1
            pid = await self._request(token, wire.pack(wire.FORK, None, token), fds, timeout_s)
        return self._workers[pid]

    async def _start(self, timeout_s: float) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        number = theirs.fileno()
        command = self._interpreter.command([_SCRIPT, str(number)])
        try:
            with theirs:
                self._process = await asyncio.to_thread(
                    subprocess.Popen, command, pass_fds=[number], stdin=subprocess.DEVNULL
                )
        except BaseException:  # also when the model is unloaded meanwhile
            ours.close()
            raise
        self._control = ours
        self.loop.add_reader(ours, self._on_readable, ours)
        await self._request(0, b"", [], timeout_s)

    async def _request(self, token: int, data: bytes, fds: list[int], timeout_s: float) -> int:
        assert self._control is not None
        answer: asyncio.Future[int] = self.loop.create_future()
        self._waiting[token] = answer
        try:
            if data:
                self._control.sendmsg([data], rights(fds))
        except OSError:  # it has ended: so says `answer`, and so does `close`
            self.close()
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            self.close()
            raise InternalError(
                f"the interpreter {self._interpreter.python} of the Python backend did not start "
                f"within {timeout_s:g} seconds"
            ) from None
        finally:
            self._waiting.pop(token, None)

    def _on_readable(self, control: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            while control is self._control:
                try:
                    data = control.recv(4096)
                except ConnectionResetError:  # it ended without having read all
                    data = b""
                if not data:
                    self.close()
                    return
                kind, _, payload = wire.unpack(data)
                if kind == wire.FORKED:
                    self._forked(*payload)
                elif kind == wire.EXITED:
                    self._exited(*payload)

    def _forked(self, token: int, pid: int) -> None:
        if token:
            self._workers[pid] = WorkerProcess(self, pid)
        waiting = self._waiting.pop(token, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(pid)

    def _exited(self, pid: int, status: int) -> None:
        worker = self._workers.pop(pid, None)
        if worker is not None and not worker.exited.done():
            worker.exited.set_result(status)

    def kill(self, pid: int) -> None:
        """SIGKILL for one of its workers."""
        if self._control is None:
            return
        try:
            self._control.send(wire.pack(wire.KILL, None, pid))
        except (BrokenPipeError, ConnectionResetError):  # it has ended, and its workers with it
            self.close()

    def close_soon(self) -> None:
        """`close`, from any thread."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: `close` was called
                self._loop.call_soon_threadsafe(self.close)

    def close(self) -> None:
        """Let it go; workers that still run end with it."""
        control, self._control = self._control, None
        if control is not None:
            self.loop.remove_reader(control)
            control.close()
        error = InternalError(
            f"the interpreter {self._interpreter.python} of the Python backend ended: see its "
            "messages in the log (it must be Python 3.8 or newer with NumPy)"
        )
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(error)
        for pid in list(self._workers):
            self._exited(pid, signal.SIGKILL)
        process, self._process = self._process, None
        if process is not None:
            self.loop.run_in_executor(None, process.wait)


def describe_exit(status: int) -> str:
    """A wait status in words."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = "unknown signal"
        hint = ", perhaps for lack of memory" if number == signal.SIGKILL else ""
        return f"it was ended by signal {number} ({name}{hint})"
    return f"it exited with code {os.WEXITSTATUS(status)}"


class OutputReader:
    """Takes what a worker prints, line by line, as it comes.

    Args:
        write: gets each line without its end.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, fd: int, write: Callable[[str], None]):
        os.set_blocking(fd, False)
        self._loop = loop
        self._fd = fd
        self._write = write
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._rest = ""
        loop.add_reader(fd, self._on_readable)

    def _on_readable(self) -> None:
        if not self._read_once():
            self.close()

    def _read_once(self) -> bool:
        try:
            data = os.read(self._fd, _MAX_LINE_BYTES)
        except BlockingIOError:
            return True
        *lines, self._rest = (self._rest + self._decoder.decode(data)).split("\n")
        for line in lines:
            self._write(line.removesuffix("\r"))
        if len(self._rest) > _MAX_LINE_BYTES:
            self._flush()
        return bool(data)

    def drain(self) -> None:
        """Take what is there now, e.g. before a message that was sent after it."""
        if self._fd >= 0:
            self._on_readable()

    def _flush(self) -> None:
        rest, self._rest = self._rest, ""
        if rest:
            self._write(rest)

    def close(self) -> None:
        """Stop reading; an unfinished line is written."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._loop.remove_reader(fd)
            os.close(fd)
            self._flush()
