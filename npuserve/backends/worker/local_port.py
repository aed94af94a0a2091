"""`Port` of models in the server's own process, and the values that cross it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from npuserve.backends.worker import wire
from npuserve.backends.worker.pb_response import InferenceResponse
from npuserve.backends.worker.pb_tensor import Tensor as ModelTensor
from npuserve.backends.worker.pb_tensor import TritonModelException
from npuserve.backends.worker.port import Mailbox
from npuserve.backends.worker.services import INDEX_OF_STATUS, ModelServices, error_of
from npuserve.backends.worker.waiting import Waiting
from npuserve.errors import InternalError
from npuserve.response import InferenceResponse as ServerResponse
from npuserve.tensor import Tensor

if TYPE_CHECKING:
    from npuserve.backends import base
    from npuserve.backends.worker.pb_request import InferenceRequest
    from npuserve.buffer_pool import BufferPool


class LocalPort:
    """`Port` of a model in the server's own process; a key is (batch, request).

    All that a thread of the model has the server do takes one way to the loop, so it happens in
    that order there, as it does with a worker and its channel.

    Attributes:
        mailbox: that way; set before the model is initialised.
        model_loop: where the coroutines of the model run side by side, if its instance is a
            `LoopInstance`.
        waiting: who waits for answers.
    """

    mailbox: base.Mailbox
    forked = False
    in_server = True  # see `ChannelPort`

    def __init__(self, services: ModelServices, pool: BufferPool) -> None:
        self._services = services
        self._pool = pool
        self._arrived = threading.Condition()
        self._next_call = 0
        self.model_loop: asyncio.AbstractEventLoop | None = None
        self.waiting = Waiting()
        self._server_thread = 0
        self._go_on = threading.Event()
        self._go_on.set()

    def hold(self, held: bool) -> None:
        """See `LoopInstance.hold`: who responds waits meanwhile, but for the server's thread."""
        self._server_thread = threading.get_ident()
        if held:
            self._go_on.clear()
        else:
            self._go_on.set()

    def close_channel(self) -> None:
        """In a process that the model forked; there is none."""

    def close(self) -> None:
        """End everything the model has going on in the server."""
        self.mailbox.post(self._services.close)

    def respond(
        self, key: Any, response: InferenceResponse | None, names: Any, final: bool
    ) -> None:
        """See `Port.respond`."""
        batch, request = key
        answer = None if response is None else self.response(response, names)
        if self.model_loop is not None:  # such batches are touched on the server's loop only
            if self._server_thread != threading.get_ident():
                self._go_on.wait()
            self.mailbox.post(batch.send, request, answer, final)
        else:
            batch.send(request, answer, final)
            batch.flush()  # only what `execute` returns may wait for its end

    def response(self, response: InferenceResponse, names: Any) -> ServerResponse:
        """A model's response as the server's. Copies, since the model may reuse its arrays."""
        if response._error is not None:
            result = ServerResponse.from_error(error_of(response._error._to_wire()))
        else:
            try:
                result = ServerResponse(
                    [self._tensor(t) for t in response._outputs if t._name in names]
                )
            except Exception as failure:  # text that cannot be encoded
                error = InternalError(f"output of the model cannot be sent: {failure}")
                return ServerResponse.from_error(error)
        if response._parameters is not None:
            result.parameters = json.loads(response._parameters)
        return result

    def _tensor(self, tensor: ModelTensor) -> Tensor:
        data = tensor._to_wire()
        if type(data) is not bytes:
            size = data.nbytes
            if size >= wire.INLINE_BYTES:
                lease = self._pool.lease(size)
                np.copyto(np.frombuffer(lease, np.uint8), np.frombuffer(data, np.uint8))
                data = lease
            else:
                data = bytes(data) if isinstance(data, memoryview) else data.tobytes()
        return Tensor(tensor._name, wire.DATATYPES[tensor._code], tensor._shape, data)

    def is_cancelled(self, key: Any) -> bool:
        """See `Port.is_cancelled`."""
        cancelled: bool = key[1].cancelled
        return cancelled

    def infer(self, request: InferenceRequest, decoupled: bool) -> Mailbox:
        """See `Port.infer`."""
        with self._arrived:
            self._next_call += 1
            mailbox = Mailbox(self._next_call)

        def reply(response: ServerResponse | None, final: bool) -> None:
            self._put(mailbox, (None if response is None else _model_response(response), final))

        continued = None if request._trace is None else request._trace[1]
        fields = (
            request._request_id, request._correlation_id, request._flags, request._timeout,
            request._priority, request._parameters, request._output_names, continued,
        )  # fmt: skip
        inputs = [self._tensor(tensor) for tensor in request._inputs]
        target = (request._model_name, request._model_version)
        self.mailbox.post(
            self._services.infer, mailbox.handle, target, inputs, fields, decoupled, reply
        )
        return mailbox

    def _put(self, mailbox: Mailbox, item: Any) -> None:
        with self._arrived:
            mailbox.put(item)
            self._arrived.notify_all()

    def cancel_infer(self, mailbox: Mailbox) -> None:
        """See `Port.cancel_infer`."""
        self.mailbox.post(self._services.cancel_infer, mailbox.handle)

    def wait(self, mailbox: Mailbox) -> Any:
        """See `Port.wait`."""
        with self.waiting.blocks(mailbox), self._arrived:
            while not mailbox.items:
                self._arrived.wait()
            return mailbox.take()

    async def wait_async(self, mailbox: Mailbox) -> Any:
        """See `Port.wait_async`."""
        with self._arrived:
            if mailbox.items:
                return mailbox.take()
            arrived = mailbox.arrival(asyncio.get_running_loop())
        with self.waiting.awaits(arrived, mailbox):
            await arrived
        return mailbox.take()

    def call(self, method: str, *args: Any) -> Any:
        """See `Port.call`."""
        mailbox = Mailbox()
        self.mailbox.post(
            self._services.call, method, args, lambda ok, value: self._put(mailbox, (ok, value))
        )
        ok, value = self.wait(mailbox)
        if not ok:
            raise TritonModelException(value)
        return value

    def notify(self, method: str, *args: Any) -> None:
        """See `Port.notify`."""
        self.mailbox.post(self._services.call, method, args, _ignore)

    def log(self, level: str, text: str, file: str, line: int) -> None:
        """See `Port.log`."""
        self.write_line(self._services.log, level, text, file, line)

    def write_line(self, write: Callable[..., None], *args: Any) -> None:
        """Write to the log what a thread of the model says.

        At once where that keeps the order: native code may crash or hang after it.
        """
        if self.mailbox.idle:
            write(*args)
        else:
            self.mailbox.post(write, *args)


def _ignore(_ok: bool, _value: Any) -> None:
    """Nobody waits for the result of a notification."""


def _model_response(response: ServerResponse) -> InferenceResponse:
    """A BLS response as the model sees it."""
    if response.error is not None:
        error = (INDEX_OF_STATUS[response.error.code], str(response.error))
        return InferenceResponse._from_wire([], None, error)
    tensors = [model_tensor(tensor, copy=True) for tensor in response.outputs]
    parameters = json.dumps(response.parameters) if response.parameters else None
    return InferenceResponse._from_wire(tensors, parameters, None)


def model_tensor(tensor: Tensor, copy: bool) -> ModelTensor:
    """A server's tensor as the model sees it, over the same memory unless `copy`."""
    data: Any = tensor.data
    if copy and not isinstance(data, bytes):
        data = bytes(data)
    return ModelTensor._from_wire(tensor.name, wire.CODE_OF[tensor.datatype], tensor.shape, data)
