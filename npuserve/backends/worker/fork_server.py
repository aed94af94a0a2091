"""The process that forks workers: the interpreter and NumPy are up when a worker starts.

Run as a script by the interpreter the workers shall have; it needs NumPy there and nothing of
this package's other dependencies. One message in, one fork; it also reaps the workers, tells
the server how they ended, and makes sure that none outlives the server, whatever kills that.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.util
import os
import signal
import socket
import sys
from types import ModuleType
from typing import Any

# How long workers have to end by themselves (finalize) once the server is gone.
_GRACE_S = 5

_PR_SET_PDEATHSIG = 1

# Added to a worker's oom_score_adj: a model that takes all memory is killed before the server,
# unless the server alone holds three quarters of it and no death of a worker would help.
_OOM_SCORE = 500
_OOM_SCORE_MAX = 1000
_OOM_SCORE_FILE = "/proc/self/oom_score_adj"


def _adopt_package() -> None:
    """Make `npuserve.backends.worker` importable, and nothing else from where it lies.

    Another environment has its own packages; putting our site-packages on its path would mix
    the two. Where the package is installed already, there is nothing to do.
    """
    worker = os.path.dirname(os.path.abspath(__file__))
    if sys.path and os.path.abspath(sys.path[0]) == worker:
        del sys.path[0]  # put there because this file is run as a script
    backends = os.path.dirname(worker)
    root = os.path.dirname(backends)
    installed = importlib.util.find_spec("npuserve")
    if installed is not None and installed.origin == os.path.join(root, "__init__.py"):
        return
    for name, path in (
        ("npuserve", root),
        ("npuserve.backends", backends),
        ("npuserve.backends.worker", worker),
    ):
        package = ModuleType(name)
        package.__path__ = [path]
        sys.modules[name] = package


class ForkServer:
    """Forks on request over a control socket."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._children: set[int] = set()
        self._pid = os.getpid()
        self._signals, wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the server decides when it is over

    def run(self) -> None:
        """Serve until the server is gone, and the workers with it."""
        import select

        self._tell(42, (0, self._pid))
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._signals, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == self._signals:
                    self._reap()
                elif not self._serve_one():
                    poll.unregister(self._control)
                    self._wind_up(poll)
                    return

    def _serve_one(self) -> bool:
        from npuserve.backends.worker import wire
        from npuserve.backends.worker.channel import fds_of

        try:
            data, ancillary, _, _ = self._control.recvmsg(4096, socket.CMSG_SPACE(64))
        except ConnectionResetError:  # the server went without reading what was sent to it
            return False
        if not data:
            return False
        kind, _, payload = wire.unpack(data)
        if kind == wire.FORK:
            self._fork(payload, fds_of(ancillary))
        elif kind == wire.KILL and payload in self._children:
            os.kill(payload, signal.SIGKILL)
        return True

    def _fork(self, token: int, fds: list[int]) -> None:
        pid = os.fork()
        if pid == 0:
            self._become_worker(fds)
        for fd in fds:
            os.close(fd)
        self._children.add(pid)
        self._tell(42, (token, pid))

    def _become_worker(self, fds: list[int]) -> None:
        """In the child: forget the fork server and run."""
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != self._pid:
            os._exit(1)
        _offer_to_oom_killer()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        self._control.close()
        numpy_random: Any = sys.modules.get("numpy.random")
        if numpy_random is not None:
            numpy_random.seed()  # or all instances would draw the same numbers
        from npuserve.backends.worker import child

        child.main(*fds)

    def _reap(self) -> None:
        os.read(self._signals, 4096)
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            self._children.discard(pid)
            self._tell(43, (pid, status))

    def _tell(self, kind: int, payload: Any) -> None:
        from npuserve.backends.worker import wire

        try:
            self._control.send(wire.pack(kind, None, payload))
        except (BrokenPipeError, ConnectionResetError):
            return  # the server is gone; the next read says so

    def _wind_up(self, poll: Any) -> None:
        """Give the workers, which see the end of the server too, time for their finalize."""
        import time

        deadline = time.monotonic() + _GRACE_S
        while self._children and time.monotonic() < deadline:
            if poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                self._reap()
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)


def _offer_to_oom_killer() -> None:
    """Make this process a likelier victim than the server; raising one's score is free to all."""
    try:
        with open(_OOM_SCORE_FILE) as file:
            score = int(file.read())
        with open(_OOM_SCORE_FILE, "w") as file:
            file.write(str(min(score + _OOM_SCORE, _OOM_SCORE_MAX)))
    except OSError as error:  # a sandbox without /proc: the kernel chooses by size alone
        sys.stderr.write(f"the out-of-memory score of a worker stays as it is: {error}\n")


def _main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    sys.argv = [""]  # as in Triton: a model that parses arguments finds none
    importlib.import_module("npuserve.backends.worker.child")
    gc.collect()
    gc.freeze()  # the workers' collectors leave these pages alone, so they stay shared
    ForkServer(control).run()


if __name__ == "__main__":
    _adopt_package()
    _main()
