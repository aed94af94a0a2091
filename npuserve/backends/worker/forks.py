"""Processes that a model forks (os.fork, multiprocessing with fork), and their calls to the server.

A forked process has nothing but the thread that forked. All that its parent's other threads were
in the middle of stays so for ever, and the channel to the server is the parent's alone. So its
port, which the model's objects refer to, becomes another one, a `ForkedPort`: a plain client of
the process that has the server. That one owns a door, a pair of sockets: the forked process
inherits one end, makes a channel of its own when it first calls, and sends the other end of it
through the door, where a `Relay` waits, begun by the first fork. Nobody else can come in, and
whichever of the two ends, the other one sees its end of the channel close.

A program that the model starts (subprocess, multiprocessing with spawn) is no fork and costs
nothing here. Runs in every interpreter a worker may have: standard library and NumPy only.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import sys
import threading
from typing import TYPE_CHECKING, Any, NoReturn

from npuserve.backends.worker import wire
from npuserve.backends.worker.channel import Channel, rights
from npuserve.backends.worker.channel_port import ChannelPort
from npuserve.backends.worker.pb_tensor import TritonModelException
from npuserve.backends.worker.relay import Relay
from npuserve.backends.worker.stdio import flush

if TYPE_CHECKING:
    from npuserve.backends.worker.host import ModelHost
    from npuserve.backends.worker.pb_request import InferenceRequest
    from npuserve.backends.worker.pb_response import InferenceResponse
    from npuserve.backends.worker.port import Mailbox

# The model's handles of metrics are numbers that its process chooses.
_REFUSED_CALLS = {
    "metric_family_new": "make a metric family",
    "metric_new": "make a metric",
}


_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class ForkedPort(ChannelPort):
    """`Port` in a process that the model forked."""

    forked = True
    peer = "the process that has the model"

    # What it was before the fork. Never looked at, and kept from being finalised here.
    _former: Any

    @classmethod
    def replace(cls, port: Any, door: socket.socket | None, number: int) -> None:
        """Make this of a copied port, for all that refer to it."""
        former = vars(port)
        port.__class__ = cls
        port.__dict__ = {}
        port.__init__(door, number)
        port._former = former

    def __init__(self, door: socket.socket | None, number: int) -> None:
        super().__init__()
        self._door = door
        self._number = number
        self._connected = False
        self._connecting = threading.Lock()

    def close_channel(self) -> None:
        """In a process that this one forked: the channel is its parent's."""
        if self._connected:
            self._channel.close_after_fork()

    def write_line(self, write: Any, *args: Any) -> None:
        """See `LocalPort.write_line`."""
        write(*args)

    def _connect(self) -> None:
        with self._connecting:
            if self._connected:
                return
            try:
                if self._door is None:
                    raise OSError("there was no socket to be had")
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                with theirs:
                    knock = wire.pack(wire.CONNECT, None, self._number)
                    self._door.sendmsg([knock], rights([theirs.fileno()]))
            except OSError as error:
                raise TritonModelException(
                    f"a process forked by the model cannot reach {self.peer}: {error}"
                ) from None
            self._channel = Channel(ours)
            self._connected = True

    def infer(self, request: InferenceRequest, decoupled: bool) -> Mailbox:
        """See `Port.infer`."""
        if request._trace is not None and type(request._trace[0]) is not int:
            request._trace = None  # an object of the server's process, in thread execution
        return super().infer(request, decoupled)

    def _open_call(self) -> Mailbox:
        self._connect()
        return super()._open_call()

    def _send(self, kind: int, payload: Any) -> None:
        self._connect()
        super()._send(kind, payload)

    def wait(self, mailbox: Mailbox) -> Any:
        """See `Port.wait`."""
        self._check(mailbox)
        if not mailbox.items and len(sys._current_frames()) == 1:
            self._send(wire.WAITING, (mailbox.handle, mailbox.taken))
        return super().wait(mailbox)

    async def wait_async(self, mailbox: Mailbox) -> Any:
        """See `Port.wait_async`."""
        self._check(mailbox)
        return await super().wait_async(mailbox)

    def _check(self, mailbox: Mailbox) -> None:
        if not mailbox.items and self._calls.get(mailbox.handle) is not mailbox:
            raise _refusal("wait for what was called before the fork")

    def call(self, method: str, *args: Any) -> Any:
        """See `Port.call`."""
        if method in _REFUSED_CALLS:
            raise _refusal(_REFUSED_CALLS[method])
        return super().call(method, *args)

    def notify(self, method: str, *args: Any) -> None:
        """See `Port.notify`."""
        if not method.endswith("_delete"):  # of a copy
            # Waits, so that it is done when the process that has the model sees this one end.
            self.call(method, *args)

    def respond(
        self, key: Any, response: InferenceResponse | None, names: Any, final: bool
    ) -> None:
        """See `Port.respond`."""
        # Differs from Triton: there such a response arrives, and the server crashes when the
        # process that has the request answers it, too.
        raise _refusal("send responses of the model's requests")

    def is_cancelled(self, key: Any) -> bool:
        """See `Port.is_cancelled`."""
        # Differs from Triton: there this hangs.
        raise _refusal("ask whether a request of the model was cancelled")


def _refusal(what: str) -> TritonModelException:
    return TritonModelException(
        f"a process forked by the model cannot {what}: do it in the process that runs execute"
    )


class Forks:
    """What a process does before and after it forks; one per process."""

    def __init__(self) -> None:
        self._ports: dict[int, tuple[Any, ModelHost]] = {}
        self._numbers = itertools.count(1)
        # Held while a descriptor changes hands, so that no fork takes one along unnoticed.
        self._lock = threading.Lock()
        self._door: socket.socket | None = None  # where forked processes knock
        self._relay: Relay | None = None
        self._hooked = False
        self._mask: set[Any] = set()

    def register(self, port: Any, host: ModelHost) -> None:
        """The port and the host of a model in this process, which may fork from now on."""
        with self._lock:
            self._ports[next(self._numbers)] = port, host
        if not self._hooked:
            self._hooked = True
            os.register_at_fork(
                before=self._before, after_in_parent=self._in_parent, after_in_child=self._in_child
            )

    def forget(self, port: Any) -> None:
        """The model is gone: the processes it forked cannot call any more."""
        with self._lock:
            for number in [n for n, (known, _) in self._ports.items() if known is port]:
                del self._ports[number]
                if self._relay is not None:
                    self._relay.drop(number)

    def _before(self) -> None:
        self._lock.acquire()
        # They come to the forked process when it is ready for them: see `_in_child`.
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        if self._door is not None or not self._ports:
            return
        try:
            inside, self._door = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError:  # no descriptors are left: whoever calls is told
            return
        self._relay = Relay(inside, self._lock, self._ports)

    def _in_parent(self) -> None:
        if self._relay is not None:
            self._relay.start()
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        self._lock.release()

    def _in_child(self) -> None:
        self._lock = threading.Lock()
        relay, self._relay = self._relay, None
        if relay is not None:
            relay.close_after_fork()
        first = any(not port.forked for port, _ in self._ports.values())
        if any(port.in_server for port, _ in self._ports.values()):
            _let_go_of_connections()
        for number, (port, host) in self._ports.items():
            port.close_channel()
            host.serving = True  # whether it is by now, the relay knows
            ForkedPort.replace(port, self._door, number)
        if first:  # what a server or a worker does at signals does not concern it
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)


FORKS = Forks()


def _let_go_of_connections() -> None:
    """In a copy of the server: its ports and connections are closed when the server closes them.

    Those are the sockets that listen, and those with the port of one that does.
    """
    ports: dict[int, int] = {}
    listening = set()
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # no socket
            sock = socket.socket(fileno=fd)
            if sock.family in (socket.AF_INET, socket.AF_INET6):
                ports[fd] = sock.getsockname()[1]
                if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    listening.add(ports[fd])
            sock.detach()
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd, port in ports.items():
        if port in listening:
            os.dup2(nothing, fd, inheritable=False)  # objects that nobody uses still have it
    os.close(nothing)


def leave() -> NoReturn:
    """End a forked process that came out of the model's method: it must not serve."""
    flush()
    os._exit(0)
