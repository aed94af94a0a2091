"""`Port` over a channel: the calls a model makes, and who reads their answers.

There is no thread that reads the channel: whoever waits for something reads until it has come and
hands out what else arrives. Coroutines that wait have their event loop read.

Runs in every interpreter a worker may have: standard library and NumPy only.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from npuserve.backends.worker import wire
from npuserve.backends.worker.encoding import request_to_wire, response_from_wire
from npuserve.backends.worker.pb_tensor import TritonModelException
from npuserve.backends.worker.port import Mailbox
from npuserve.backends.worker.stdio import flush
from npuserve.backends.worker.waiting import Waiting

if TYPE_CHECKING:
    from npuserve.backends.worker.channel import Channel
    from npuserve.backends.worker.pb_request import InferenceRequest


class ServerGoneError(TritonModelException):
    """The peer ended while the model waited for an answer of it."""


class ChannelPort:
    """What a worker and a process that it forked have in common."""

    forked = False
    in_server = False  # whether this process is the server
    peer = "the server"  # in errors

    _channel: Channel

    def __init__(self) -> None:
        self.waiting = Waiting()
        self._calls: dict[int, Mailbox] = {}
        self._call_ids = itertools.count(1)
        self._gone = False  # the peer is
        # Held by the thread that reads the channel; the others wait for their turn, or until
        # the reader has brought what they want.
        self._reading = threading.Lock()
        self._turn = threading.Condition()
        self._waiters = 0
        self._loop: asyncio.AbstractEventLoop | None = None  # one that always reads
        # Tasks that wait for answers on a loop that the model itself runs, by loop.
        self._awaiting: Counter[asyncio.AbstractEventLoop] = Counter()

    # -- reading ------------------------------------------------------------------------------

    def _read_until(self, ready: Callable[[], bool]) -> None:
        """Return once `ready()`, reading the channel unless another thread does."""
        while not ready():
            if self._reading.acquire(blocking=False):
                try:
                    if not ready():  # the former reader may have brought it
                        self._dispatch(self._channel.receive())
                finally:
                    self._pass_on()
                self._after_reading()
            else:
                with self._turn:
                    self._waiters += 1
                    # The reader lets go before it looks at _waiters, and this thread raises it
                    # before it looks at the reader: one of the two sees the other.
                    while self._reading.locked() and not ready():
                        self._turn.wait()
                    self._waiters -= 1

    def _pass_on(self) -> None:
        """Let another thread read, or see what was read for it."""
        self._reading.release()
        if self._waiters:
            with self._turn:
                self._turn.notify_all()

    def _read_available(self, *, idle: bool = False) -> None:
        """Take in what has arrived, without waiting.

        Args:
            idle: see `waiting.report`.
        """
        if not self._reading.acquire(blocking=False):
            return
        try:
            while not self._gone:
                self._dispatch(self._channel.receive(socket.MSG_DONTWAIT))
        except BlockingIOError:
            pass  # nothing more
        finally:
            self._pass_on()
        self._after_reading(idle=idle)

    def _after_reading(self, *, idle: bool = False) -> None:
        """Something was read, and another thread may read."""

    def _dispatch(self, message: wire.Message | None) -> None:
        if message is None:
            self._peer_gone()
            return
        kind, _, payload = message
        if kind == wire.ANSWER:
            call_id, ok, value = payload
            self._calls.pop(call_id).put((ok, value))
        elif kind == wire.INFER_RESPONSE:
            call_id, item, final = payload
            mailbox = self._calls.pop(call_id, None) if final else self._calls.get(call_id)
            if mailbox is not None:
                link = self._channel.link
                mailbox.put((None if item is None else response_from_wire(link, item), final))
        elif kind == wire.REFUSED:
            call_id, text = payload
            self._calls.pop(call_id).put(TritonModelException(text))

    def _peer_gone(self) -> None:
        self._gone = True
        calls, self._calls = self._calls, {}
        for mailbox in calls.values():
            mailbox.put(self._gone_error())

    def _gone_error(self) -> ServerGoneError:
        return ServerGoneError(f"{self.peer} ended")

    # -- calls --------------------------------------------------------------------------------

    def _send(self, kind: int, payload: Any) -> None:
        """Send a message of the model's threads."""
        self._channel.send(kind, payload)

    def infer(self, request: InferenceRequest, decoupled: bool) -> Mailbox:
        """See `Port.infer`."""
        mailbox = self._open_call()
        target = (mailbox.handle, request._model_name, request._model_version)
        with self._channel.lock:
            item = request_to_wire(self._channel.link, request)
            self._send(wire.INFER, (*target, item, decoupled))
        return mailbox

    def cancel_infer(self, mailbox: Mailbox) -> None:
        """See `Port.cancel_infer`."""
        if self._calls.get(mailbox.handle) is mailbox:
            self._send(wire.INFER_CANCEL, mailbox.handle)

    def _open_call(self) -> Mailbox:
        mailbox = Mailbox(next(self._call_ids))
        self._calls[mailbox.handle] = mailbox
        if self._gone:
            mailbox.put(self._gone_error())
        return mailbox

    def wait(self, mailbox: Mailbox) -> Any:
        """See `Port.wait`."""
        items = mailbox.items
        if not items:
            with self.waiting.blocks(mailbox):
                self._read_until(lambda: bool(items))
        return _opened(mailbox.take())

    async def wait_async(self, mailbox: Mailbox) -> Any:
        """See `Port.wait_async`."""
        if not mailbox.items:
            loop = asyncio.get_running_loop()
            arrived = mailbox.arrival(loop)
            # It may have come before the mailbox had the future, read by another thread.
            if not mailbox.items:
                with self.waiting.awaits(arrived, mailbox), self._read_by(loop):
                    await arrived
        return _opened(mailbox.take())

    @contextlib.contextmanager
    def _read_by(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """Have a loop that the model runs read the channel while one of its tasks waits."""
        if loop is self._loop:
            yield
            return
        self._awaiting[loop] += 1
        if self._awaiting[loop] == 1:
            loop.add_reader(self._channel.socket, partial(self._read_available, idle=True))
        try:
            yield
        finally:
            self._awaiting[loop] -= 1
            if not self._awaiting[loop]:
                del self._awaiting[loop]
                if not loop.is_closed():  # a task that outlived it
                    loop.remove_reader(self._channel.socket)

    def call(self, method: str, *args: Any) -> Any:
        """See `Port.call`."""
        mailbox = self._open_call()
        self._send(wire.CALL, (mailbox.handle, method, args))
        ok, value = self.wait(mailbox)
        if not ok:
            raise TritonModelException(value)
        return value

    def notify(self, method: str, *args: Any) -> None:
        """See `Port.notify`."""
        self._send(wire.CALL, (0, method, args))

    def log(self, level: str, text: str, file: str, line: int) -> None:
        """See `Port.log`."""
        flush()  # keeps the order with what was printed before
        self._send(wire.LOG, (level, text, file, line))


def _opened(item: Any) -> Any:
    if isinstance(item, TritonModelException):
        raise item
    return item
