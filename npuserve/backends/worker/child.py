"""A worker process: one model instance behind a channel.

The main thread runs the model, and reads the channel when it waits for a batch; a model's thread
that waits for the answer of another model may be the reader meanwhile (`channel_port.py`). A
model with `async def execute` has an event loop in the main thread that reads instead.

Runs in every interpreter a worker may have: standard library and NumPy only.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from npuserve.backends.worker import wire
from npuserve.backends.worker.channel import Channel
from npuserve.backends.worker.channel_port import ChannelPort
from npuserve.backends.worker.encoding import response_to_wire, tensors_from_wire
from npuserve.backends.worker.forks import FORKS, leave
from npuserve.backends.worker.host import ModelFailedError, ModelHost, describe
from npuserve.backends.worker.loader import import_plainly
from npuserve.backends.worker.outbox import Outbox
from npuserve.backends.worker.stdio import PortLogHandler, flush, take_output
from npuserve.backends.worker.waiting import NOT_BEGUN, Executing, report

if TYPE_CHECKING:
    from npuserve.backends.worker.pb_request import InferenceRequest
    from npuserve.backends.worker.pb_response import InferenceResponse

_INTERNAL = wire.STATUS_NAMES.index("INTERNAL")
_CANCELLED = wire.STATUS_NAMES.index("CANCELLED")

_now_ns = time.monotonic_ns


class Worker(ChannelPort):
    """The port of a model in its own process, and the loop that feeds the model."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel
        self._outbox = Outbox(channel)
        self._batches: deque[Any] = deque()
        self._executing: dict[int, Executing] = {}  # or waiting for their turn
        self._cancelled: set[Any] = set()
        self._look_due = False  # the server wants to know what the batches wait for
        self._readiness_due = False  # the server wants to know whether the model is ready
        self._stopping = False  # STOP came, or the server is gone
        self._held = False  # readers of large responses are behind
        self._main_thread = threading.get_ident()

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
        host = ModelHost(init["spec"], self, import_plainly)
        FORKS.register(self, host)
        try:
            host.initialize()
        except ModelFailedError as error:
            if self.forked:
                leave()
            self._finalize(host)
            self._channel.send(wire.FAILED, (_INTERNAL, str(error)))
            return
        if self.forked:
            leave()
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

    def close_channel(self) -> None:
        """In a process that the model forked: the channel is the worker's."""
        self._channel.close_after_fork()

    def _auto_complete(self, spec: dict[str, Any]) -> None:
        host = ModelHost(spec, self, import_plainly)
        FORKS.register(self, host)
        answer: tuple[int, Any]
        try:
            answer = wire.READY, {"config": host.auto_complete()}
        except ModelFailedError as error:
            answer = wire.FAILED, (_INTERNAL, str(error))
        if self.forked:
            leave()
        self._channel.send(*answer)

    def _finalize(self, host: ModelHost) -> None:
        try:
            host.finalize()
        except ModelFailedError as error:
            self.log("ERROR", f"finalize failed: {error}", __file__, 0)

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
            if self.forked:
                leave()
            self._channel.send(wire.READINESS, answer)

    async def _answer_readiness_async(self, host: ModelHost) -> None:
        try:
            answer: Any = (await host.is_ready_async(), None)
        except ModelFailedError as error:
            answer = (False, (_INTERNAL, str(error)))
        if self.forked:
            leave()
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
        if self.forked:
            leave()
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
        if self.forked:
            leave()
        self._finish(host, batch_id, requests, outcomes, (input_ready, _now_ns(), error))

    def _requests(self, host: ModelHost, payload: Any) -> list[InferenceRequest]:
        batch_id, items = payload
        try:
            inputs = [tensors_from_wire(self._channel.link, tensors) for tensors, _ in items]
        except OSError as error:  # before there is any request that wants an answer
            for tensors, _ in items:
                self._channel.link.decline(tensors)
            raise ModelFailedError(f"input of the request cannot be read: {error}") from None
        make = host.request
        return [
            make((batch_id, index), tensors, fields)
            for index, (tensors, (_, fields)) in enumerate(zip(inputs, items))  # noqa: B905
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
        link = self._channel.link
        del self._executing[batch_id]
        with self._channel.lock:
            results = [
                outcome
                if outcome is None or type(outcome) is int
                else response_to_wire(link, outcome, host.kept_outputs(request))
                for request, outcome in zip(requests, outcomes)  # noqa: B905 - Python 3.8
            ]
            requests.clear()
            del outcomes
            self._outbox.flush()
            self._channel.send(wire.RESULT, (batch_id, input_ready, output_ready, results, error))
        if self._cancelled:
            self._cancelled = {key for key in self._cancelled if key[0] != batch_id}

    # -- reading ------------------------------------------------------------------------------

    def _dispatch(self, message: wire.Message | None) -> None:
        if message is None:
            self._peer_gone()
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
        elif kind == wire.LOOK:
            self._look_due = True
        elif kind == wire.IS_READY:
            self._readiness_due = True
            self._announce_batches()
        elif kind == wire.STOP:
            self._stopping = True
            self._announce_batches()
        else:
            super()._dispatch(message)

    def _after_reading(self, *, idle: bool = False) -> None:
        if self._look_due:
            self._report(idle=idle)

    def _report(self, *, idle: bool = False) -> None:
        """Say what the batches wait for, see `waiting.report`."""
        self._look_due = False
        loop, main = self._loop, self._main_thread
        found: Any = ({}, (), None)
        try:
            found = report(self.waiting, main, dict(self._executing), loop, idle=idle)
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

    def _peer_gone(self) -> None:
        self._stopping = True
        self._held = False
        super()._peer_gone()
        self._announce_batches()

    # -- Port ---------------------------------------------------------------------------------

    def respond(
        self, key: Any, response: InferenceResponse | None, names: Any, final: bool
    ) -> None:
        """See `Port.respond`."""
        with self._channel.lock:
            link = self._channel.link
            item = None if response is None else response_to_wire(link, response, names, copy=True)
            self._outbox.put(key, item, final)
            if not link.lent_count:
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
