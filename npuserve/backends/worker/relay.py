"""Does in the server what processes forked by models ask for, as if the models had asked.

A thread with an event loop, begun by the first fork. Each forked process that calls has a
`_Guest`. Runs in every interpreter a worker may have: standard library and NumPy only.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any

from npuserve.backends.worker import wire
from npuserve.backends.worker.channel import ANCILLARY_BYTES, fds_of
from npuserve.backends.worker.connection import Connection
from npuserve.backends.worker.encoding import response_to_wire, tensors_from_wire
from npuserve.backends.worker.pb_request import InferenceRequest
from npuserve.backends.worker.pb_tensor import TritonModelException
from npuserve.buffer_pool import BufferPool

if TYPE_CHECKING:
    from npuserve.backends.worker.host import ModelHost
    from npuserve.backends.worker.port import Mailbox

_IDLE_BYTES = 32 << 20  # memory for large responses that is kept for the next ones

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class Relay:
    """Waits at the door.

    Args:
        door: its inner end.
        lock: see `Forks`.
        ports: of the models in this process, with their hosts, by number.
    """

    def __init__(
        self, door: socket.socket, lock: threading.Lock, ports: Mapping[int, tuple[Any, ModelHost]]
    ) -> None:
        self._door = door
        self.lock = lock
        self._ports = ports
        self._loop: asyncio.AbstractEventLoop | None = None
        self._guests: set[_Guest] = set()
        self._pool = BufferPool(_IDLE_BYTES)

    def start(self) -> None:
        """Begin to wait, if it does not yet; not while the process forks."""
        if self._loop is not None:
            return
        loop = self._loop = asyncio.SelectorEventLoop()
        loop.add_reader(self._door, self._knocked)
        try:
            threading.Thread(target=loop.run_forever, name="forks", daemon=True).start()
        except RuntimeError:  # no thread can be had: whoever knocks is told
            self._door.close()

    def close_after_fork(self) -> None:
        """In a forked process: the door is the parent's, and so are the channels of others."""
        self._door.close()
        for guest in self._guests:
            guest.connection.close_after_fork()

    def drop(self, number: int) -> None:
        """Send the guests of a port away; from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._drop, number)

    def _drop(self, number: int) -> None:
        for guest in [guest for guest in self._guests if guest.number == number]:
            guest.leave()

    def _knocked(self) -> None:
        with self.lock:
            try:
                data, ancillary, _, _ = self._door.recvmsg(64, ANCILLARY_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            _, _, number = wire.unpack(data)
            for fd in fds_of(ancillary):  # none, if this process has no descriptors left
                sock = socket.socket(fileno=fd)
                if number in self._ports:
                    self._guests.add(_Guest(self, number, *self._ports[number], sock))
                else:
                    sock.close()

    def connection(self, guest: _Guest, sock: socket.socket) -> Connection:
        """The channel of a guest."""
        assert self._loop is not None
        return Connection(self._loop, self._pool, guest.message, guest.leave, sock)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine beside the others."""
        assert self._loop is not None
        return self._loop.create_task(coroutine)

    def in_thread(self, function: Callable[..., Any], *args: Any) -> Awaitable[Any]:
        """Run a function that waits."""
        assert self._loop is not None
        return self._loop.run_in_executor(None, function, *args)

    def left(self, guest: _Guest) -> None:
        """A guest is gone. Under the lock."""
        self._guests.discard(guest)


class _Guest:
    """A forked process that has called."""

    def __init__(
        self, relay: Relay, number: int, port: Any, host: ModelHost, sock: socket.socket
    ) -> None:
        self.number = number
        self._relay = relay
        self._port = port
        self._host = host
        self._calls: dict[int, Mailbox] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        self._pid: int = _CREDENTIALS.unpack(credentials)[0]
        self.connection = relay.connection(self, sock)

    def leave(self) -> None:
        """It ended, or shall call no more: nothing that it asked for goes on."""
        with self._relay.lock:
            self.connection.close()
            self._relay.left(self)
        self._goes_on()
        for mailbox in self._calls.values():
            self._port.cancel_infer(mailbox)
        for task in self._tasks:
            task.cancel()

    def message(self, kind: int, payload: Any) -> None:
        """Something it asks for."""
        self._goes_on()
        if kind == wire.INFER:
            self._infer(*payload)
        elif kind == wire.INFER_CANCEL:
            if payload in self._calls:
                self._port.cancel_infer(self._calls[payload])
        elif kind == wire.WAITING:
            call_id, taken = payload
            mailbox = self._calls.get(call_id)
            if mailbox is not None and mailbox.taken == taken:  # nothing is on its way to it
                self._port.waiting.processes[self._pid] = mailbox.handle, taken
        elif kind == wire.LOG:
            self._port.log(*payload)
        elif kind == wire.CALL:
            call_id, method, args = payload
            if call_id:
                self._spawn(self._call(call_id, method, args))
            else:
                self._port.notify(method, *args)

    def _goes_on(self) -> None:
        self._port.waiting.processes.pop(self._pid, None)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._relay.spawn(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _infer(self, call_id: int, name: str, version: int, item: Any, decoupled: bool) -> None:
        tensors, fields = item
        link = self.connection.link
        try:
            if not self._host.serving:
                raise TritonModelException("BLS is only supported during the 'execute' function.")
            inputs = tensors_from_wire(link, tensors)
            request = InferenceRequest._from_wire(None, inputs, fields)
            request._model_name, request._model_version = name, version
            mailbox = self._calls[call_id] = self._port.infer(request, decoupled)
        except (TritonModelException, OSError) as error:  # no shared memory can be had
            link.decline(tensors)
            self.connection.send(wire.REFUSED, (call_id, str(error)))
        else:
            self._spawn(self._answer(call_id, mailbox))

    async def _answer(self, call_id: int, mailbox: Mailbox) -> None:
        final = False
        try:
            while not final:
                response, final = await self._port.wait_async(mailbox)
                self._goes_on()
                self._send_response(call_id, response, final)
        except (TritonModelException, OSError) as error:  # the server ended, or no memory is left
            self._port.cancel_infer(mailbox)
            self.connection.send(wire.REFUSED, (call_id, str(error)))
        finally:
            del self._calls[call_id]

    def _send_response(self, call_id: int, response: Any, final: bool) -> None:
        item = None
        if response is not None:
            names = [tensor._name for tensor in response._outputs]
            item = response_to_wire(self.connection.link, response, names)
        self.connection.send(wire.INFER_RESPONSE, (call_id, item, final))

    async def _call(self, call_id: int, method: str, args: Any) -> None:
        try:
            value = await self._relay.in_thread(self._port.call, method, *args)
        except TritonModelException as error:
            answer = call_id, False, str(error)
        else:
            answer = call_id, True, value
        self.connection.send(wire.ANSWER, answer)
