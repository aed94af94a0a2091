"""A worker process: one model instance behind a channel.

The main thread runs the model. There is no thread that reads the channel: whoever waits for
something (the main thread for a batch, a model's thread for the answer of another model) reads
until it has come and hands out what else arrives. A model with `async def execute` has an event
loop in the main thread that reads instead.

Runs in every interpreter a worker may have: standard library and NumPy only.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from npuserve.backends.worker import wire
from npuserve.backends.worker.channel import Channel
from npuserve.backends.worker.host import ModelFailedError, ModelHost, describe
from npuserve.backends.worker.loader import import_plainly
from npuserve.backends.worker.outbox import Outbox
from npuserve.backends.worker.pb_response import InferenceResponse
from npuserve.backends.worker.pb_tensor import Tensor, TritonModelException
from npuserve.backends.worker.port import Mailbox
from npuserve.backends.worker.stdio import PortLogHandler, flush, take_output
from npuserve.backends.worker.waiting import NOT_BEGUN, Executing, Waiting, report

if TYPE_CHECKING:
    from npuserve.backends.worker.pb_request import InferenceRequest

_INTERNAL = wire.STATUS_NAMES.index("INTERNAL")
_CANCELLED = wire.STATUS_NAMES.index("CANCELLED")

_now_ns = time.monotonic_ns


class ServerGoneError(TritonModelException):
    """The server ended while the model waited for an answer of it."""


class Worker:
    """The port of a model in its own process, and the loop that feeds the model."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._outbox = Outbox(channel)
        self._host: ModelHost | None = None
        self._batches: deque[Any] = deque()
        self._executing: dict[int, Executing] = {}  # or waiting for their turn
        self._calls: dict[int, Mailbox] = {}
        self._call_ids = itertools.count(1)
        self._cancelled: set[Any] = set()
        self._waiting = Waiting()
        self._look_due = False  # the server wants to know what the batches wait for
        self._readiness_due = False  # the server wants to know whether the model is ready
        self._stopping = False  # STOP came, or the server is gone
        self._held = False  # readers of large responses are behind
        self._gone = False
        self._forked = False  # this is not the worker, but a process that the model forked
        # Held by the thread that reads the channel; the others wait for their turn, or until
        # the reader has brought what they want.
        self._reading = threading.Lock()
        self._turn = threading.Condition()
        self._waiters = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        # Tasks that wait for answers on a loop that the model itself runs, by loop.
        self._awaiting: Counter[asyncio.AbstractEventLoop] = Counter()
        self._main_thread = threading.get_ident()
        os.register_at_fork(after_in_child=self._after_fork)

    # -- life ---------------------------------------------------------------------------------

    def run(self) -> None:
        """Be what the INIT message says, until the end."""
        message = self._channel.receive()
        if message is None:
            return
        init = message[2]
        os.environ.update(init["env"])
        if init["mode"] == "auto_complete":
            self._auto_complete(init["spec"])
            return
        host = self._host = ModelHost(init["spec"], self, import_plainly)
        try:
            host.initialize()
        except ModelFailedError as error:
            self._leave_if_forked()
            self._finalize(host)
            self._channel.send(wire.FAILED, (_INTERNAL, str(error)))
            return
        self._leave_if_forked()
        self._channel.send(
            wire.READY, {"async": host.is_async, "has_readiness": host.has_readiness}
        )
        if host.is_async:
            loop = asyncio.new_event_loop()
            asyncio.set_event_loop(loop)
            # Never closed: closing waits for threads, and the process ends anyway.
            loop.run_until_complete(self._serve_async(host))
        else:
            if host.has_readiness:
                threading.Thread(
                    target=self._answer_readiness, args=(host,), name="is_ready", daemon=True
                ).start()
            self._serve(host)
        self._finalize(host)
        self._outbox.flush()
        self._channel.send(wire.STOPPED, None)

    def _auto_complete(self, spec: dict[str, Any]) -> None:
        try:
            config = ModelHost(spec, self, import_plainly).auto_complete()
        except ModelFailedError as error:
            self._channel.send(wire.FAILED, (_INTERNAL, str(error)))
        else:
            self._channel.send(wire.READY, {"config": config})

    def _finalize(self, host: ModelHost) -> None:
        try:
            host.finalize()
        except ModelFailedError as error:
            self.log("ERROR", f"finalize failed: {error}", __file__, 0)

    def _after_fork(self) -> None:
        self._forked = True
        self._channel.close_after_fork()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _leave_if_forked(self) -> None:
        """A process forked by the model came out of the model's method: it must not serve."""
        if self._forked:
            flush()
            os._exit(0)

    # -- readiness ----------------------------------------------------------------------------

    def _answer_readiness(self, host: ModelHost) -> None:
        """Body of a thread: the main one may be executing for long when the server asks."""
        while True:
            self._read_until(lambda: self._readiness_due or self._stopping)
            if self._stopping:
                return
            self._readiness_due = False
            try:
                answer: Any = (host.is_ready(), None)
            except ModelFailedError as error:
                answer = (False, (_INTERNAL, str(error)))
            self._channel.send(wire.READINESS, answer)

    async def _answer_readiness_async(self, host: ModelHost) -> None:
        try:
            answer: Any = (await host.is_ready_async(), None)
        except ModelFailedError as error:
            answer = (False, (_INTERNAL, str(error)))
        self._channel.send(wire.READINESS, answer)

    # -- batches ------------------------------------------------------------------------------

    def _serve(self, host: ModelHost) -> None:
        batches = self._batches
        while True:
            if not batches:
                self._read_until(lambda: bool(batches) or self._stopping)
            if not batches:
                return
            self._run(host, batches.popleft())

    def _run(self, host: ModelHost, payload: Any) -> None:
        batch_id = payload[0]
        requests: list[InferenceRequest] = []
        input_ready = 0
        error = None
        outcomes: Any = ()
        try:
            requests = self._requests(host, payload)
            self._executing[batch_id] = Executing(requests)
            input_ready = _now_ns()
            outcomes = host.execute(requests)
        except ModelFailedError as failure:
            error = (_INTERNAL, str(failure))
        if self._forked:
            self._leave_if_forked()
        self._finish(host, batch_id, requests, outcomes, (input_ready, _now_ns(), error))

    async def _serve_async(self, host: ModelHost) -> None:
        loop = self._loop = asyncio.get_running_loop()
        stopped = loop.create_future()
        running: set[asyncio.Task[None]] = set()

        def start(coroutine: Coroutine[Any, Any, None]) -> None:
            task = loop.create_task(coroutine)
            running.add(task)
            task.add_done_callback(running.discard)

        def start_batches() -> None:
            while self._batches:
                start(self._run_async(host, self._batches.popleft()))
            if self._readiness_due:
                self._readiness_due = False
                start(self._answer_readiness_async(host))
            if self._stopping and not stopped.done():
                stopped.set_result(None)

        def readable() -> None:
            self._read_available(idle=True)
            start_batches()

        main_thread = threading.get_ident()

        def arrived() -> None:
            # Another thread may be the one that reads a batch.
            own = threading.get_ident() == main_thread
            (loop.call_soon if own else loop.call_soon_threadsafe)(start_batches)

        self._batches_arrived = arrived
        loop.add_reader(self._channel.socket, readable)
        start_batches()
        await stopped
        loop.remove_reader(self._channel.socket)
        self._loop = None
        if running and not self._gone:
            await asyncio.wait(running)

    _batches_arrived: Callable[[], object] | None = None

    async def _run_async(self, host: ModelHost, payload: Any) -> None:
        batch_id = payload[0]
        requests: list[InferenceRequest] = []
        input_ready = 0
        error = None
        outcomes: Any = ()
        try:
            requests = self._requests(host, payload)
            self._executing[batch_id] = Executing(requests, asyncio.current_task())
            input_ready = _now_ns()
            if self._cancelled and all(
                (batch_id, index) in self._cancelled for index in range(len(requests))
            ):
                host.abandon(requests)  # while the model kept its event loop busy
                error = (_CANCELLED, "the request was cancelled before its execution")
            else:
                outcomes = await host.execute_async(requests)
        except ModelFailedError as failure:
            error = (_INTERNAL, str(failure))
        if self._forked:
            self._leave_if_forked()
        self._finish(host, batch_id, requests, outcomes, (input_ready, _now_ns(), error))

    def _requests(self, host: ModelHost, payload: Any) -> list[InferenceRequest]:
        batch_id, items = payload
        try:
            inputs = [self._tensors(tensors) for tensors, _ in items]
        except OSError as error:  # before there is any request that wants an answer
            for tensors, _ in items:
                self._channel.link.decline(tensors)
            raise ModelFailedError(f"input of the request cannot be read: {error}") from None
        make = host.request
        return [
            make((batch_id, index), tensors, fields)
            for index, (tensors, (_, fields)) in enumerate(zip(inputs, items))  # noqa: B905
        ]

    def _tensors(self, tensors: Any) -> list[Tensor]:
        make, borrow = Tensor._from_wire, self._channel.link.borrow
        return [
            make(name, code, shape, data if type(data) is bytes else borrow(data))
            for name, code, shape, data in tensors
        ]

    def _finish(
        self,
        host: ModelHost,
        batch_id: int,
        requests: list[InferenceRequest],
        outcomes: Any,
        marks: Any,
    ) -> None:
        """Send the result of a batch. Empties the lists: input memory goes back with it."""
        input_ready, output_ready, error = marks
        del self._executing[batch_id]
        with self._channel.lock:
            results = [
                outcome
                if outcome is None or type(outcome) is int
                else self._response(outcome, host.kept_outputs(request))
                for request, outcome in zip(requests, outcomes)  # noqa: B905 - Python 3.8
            ]
            requests.clear()
            del outcomes
            self._outbox.flush()
            self._channel.send(wire.RESULT, (batch_id, input_ready, output_ready, results, error))
        if self._cancelled:
            self._cancelled = {key for key in self._cancelled if key[0] != batch_id}

    def _response(self, response: InferenceResponse, names: Any, *, copy: bool = False) -> Any:
        """A response as it travels. Under the channel's lock.

        Args:
            copy: it does not leave at once, and the model may use its arrays again.
        """
        error = response._error
        if error is not None:
            return (), response._parameters, error._to_wire()
        first_token = self._channel.link.next_token
        try:
            tensors = [
                self._tensor(tensor, copy) for tensor in response._outputs if tensor._name in names
            ]
        except Exception as failure:  # text that cannot be encoded, memory that cannot be had
            self._channel.link.take_back(first_token)
            return (), None, (_INTERNAL, f"output of the model cannot be sent: {failure}")
        return tensors, response._parameters, None

    def _tensor(self, tensor: Tensor, copy: bool = False) -> Any:
        data = tensor._to_wire()
        size = data.nbytes if type(data) is not bytes else len(data)
        if size >= wire.INLINE_BYTES:
            data = self._channel.link.lend(data)
        elif copy:
            data = bytes(data)
        return tensor._name, tensor._code, tensor._shape, data

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
                if self._look_due:
                    self._report()
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
        if self._look_due:
            self._report(idle=idle)

    def _dispatch(self, message: wire.Message | None) -> None:
        if message is None:
            self._server_gone()
            return
        kind, _, payload = message
        if kind == wire.EXECUTE:
            self._batches.append(payload)
            self._executing[payload[0]] = NOT_BEGUN
            if self._batches_arrived is not None:
                self._batches_arrived()
        elif kind == wire.CANCEL:
            self._cancelled.add(payload)
        elif kind == wire.HOLD:
            self._held = payload
        elif kind == wire.ANSWER:
            call_id, ok, value = payload
            self._calls.pop(call_id).put((ok, value))
        elif kind == wire.INFER_RESPONSE:
            self._infer_response(payload)
        elif kind == wire.LOOK:
            self._look_due = True
        elif kind == wire.IS_READY:
            self._readiness_due = True
            self._announce_batches()
        elif kind == wire.STOP:
            self._stopping = True
            self._announce_batches()

    def _report(self, *, idle: bool = False) -> None:
        """Say what the batches wait for, see `waiting.report`."""
        self._look_due = False
        loop, main = self._loop, self._main_thread
        found: Any = ({}, (), None)
        try:
            found = report(self._waiting, main, dict(self._executing), loop, idle=idle)
        except Exception as error:  # objects of the model may be of any kind
            text = f"cannot tell what the model waits for: {describe(error)}"
            self.log("ERROR", text, __file__, 0)
        if loop is not None and not (found[0] or idle or threading.get_ident() == main):
            # The loop could be idle but for being woken up for the same message.
            loop.call_soon_threadsafe(partial(self._report, idle=True))
            return
        self._send(wire.WAITS, found)

    def _announce_batches(self) -> None:
        if self._batches_arrived is not None:
            self._batches_arrived()

    def _server_gone(self) -> None:
        self._gone = self._stopping = True
        self._held = False
        calls, self._calls = self._calls, {}
        for mailbox in calls.values():
            mailbox.put(None)
        self._announce_batches()

    def _infer_response(self, payload: Any) -> None:
        call_id, response, final = payload
        mailbox = self._calls.pop(call_id, None) if final else self._calls.get(call_id)
        if mailbox is None:
            return
        if response is not None:
            tensors, parameters, error = response
            try:
                outputs = self._tensors(tensors)
            except OSError as failure:
                self._channel.link.decline(tensors)
                outputs, error = [], (_INTERNAL, f"response cannot be read: {failure}")
            response = InferenceResponse._from_wire(outputs, parameters, error)
        mailbox.put((response, final))

    # -- Port ---------------------------------------------------------------------------------

    def respond(
        self, key: Any, response: InferenceResponse | None, names: Any, final: bool
    ) -> None:
        """See `Port.respond`."""
        if self._forked:
            return
        with self._channel.lock:
            item = None if response is None else self._response(response, names, copy=True)
            self._outbox.put(key, item, final)
            if not self._channel.link.lent_count:
                return  # for small ones a full channel is limit enough
            self._outbox.flush()
        self._read_available()
        if self._held:
            self._read_until(lambda: not self._held)

    def _send(self, kind: int, payload: Any) -> None:
        """Send a message of the model's threads; their responses may wait in the outbox."""
        with self._channel.lock:
            self._outbox.flush()
            self._channel.send(kind, payload)

    def is_cancelled(self, key: Any) -> bool:
        """See `Port.is_cancelled`."""
        if key not in self._cancelled:
            self._read_available()
        return key in self._cancelled

    def infer(self, request: InferenceRequest, decoupled: bool) -> Mailbox:
        """See `Port.infer`."""
        mailbox = self._open_call()
        fields = (
            request._request_id, request._correlation_id, request._flags, request._timeout,
            request._priority, request._parameters, request._output_names, request._trace,
        )  # fmt: skip
        with self._channel.lock:
            tensors = [self._tensor(tensor) for tensor in request._inputs]
            self._send(
                wire.INFER,
                (
                    mailbox.handle, request._model_name, request._model_version,
                    (tensors, fields), decoupled,
                ),
            )  # fmt: skip
        return mailbox

    def cancel_infer(self, mailbox: Mailbox) -> None:
        """See `Port.cancel_infer`."""
        if mailbox.handle in self._calls:
            self._send(wire.INFER_CANCEL, mailbox.handle)

    def _open_call(self) -> Mailbox:
        if self._forked:
            raise TritonModelException("a process forked by the model cannot call the server")
        mailbox = Mailbox(next(self._call_ids))
        self._calls[mailbox.handle] = mailbox
        if self._gone:
            mailbox.put(None)
        return mailbox

    def wait(self, mailbox: Mailbox) -> Any:
        """See `Port.wait`."""
        items = mailbox.items
        if not items:
            with self._waiting.blocks(mailbox):
                self._read_until(lambda: bool(items))
        return _opened(mailbox.take())

    async def wait_async(self, mailbox: Mailbox) -> Any:
        """See `Port.wait_async`."""
        if not mailbox.items:
            loop = asyncio.get_running_loop()
            arrived = mailbox.arrival(loop)
            # It may have come before the mailbox had the future, read by another thread.
            if not mailbox.items:
                with self._waiting.awaits(arrived, mailbox), self._read_by(loop):
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
        if not self._forked:
            self._send(wire.CALL, (0, method, args))

    def log(self, level: str, text: str, file: str, line: int) -> None:
        """See `Port.log`."""
        if not self._forked:
            flush()  # keeps the order with what was printed before
            self._send(wire.LOG, (level, text, file, line))


def _opened(item: Any) -> Any:
    if item is None:
        raise ServerGoneError("the server ended")
    return item


def _ignore_signal(_number: int, _frame: object) -> None:
    """See `main`."""


def main(channel_fd: int, output_fd: int) -> NoReturn:
    """Life of a freshly forked worker. Never returns: threads the model left do not hold it."""
    code = 1
    try:
        take_output(output_fd)
        for number in (signal.SIGINT, signal.SIGTERM):
            # Whoever signals the whole group (a terminal, systemd) means the server, which then
            # ends its workers in order. A handler, unlike SIG_IGN, is not inherited by programs
            # that the model starts.
            signal.signal(number, _ignore_signal)
        worker = Worker(Channel(socket.socket(fileno=channel_fd)))
        # Python's default shows warnings only on a bare stderr, without the model's name.
        logging.lastResort = PortLogHandler(worker)
        worker.run()
        atexit._run_exitfuncs()
        code = 0
    except BaseException as error:
        sys.stderr.write(f"worker process failed: {describe(error)}\n")
    finally:
        flush()
        os._exit(code)
