"""ModelStreamInfer: one stream, many requests. Transport-free.

Every request starts as soon as it is read. Responses of models that are not decoupled leave in
request order, those of decoupled models as they are produced. An error of one request is a
message like any other; only with the metadata `triton_grpc_error: true` does the first error of
an execution end the stream with its status.

Source of the rules: server src/grpc/stream_infer_handler.cc.
"""

from __future__ import annotations

import logging
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from npuserve._proto import grpc_service_pb2 as pb
from npuserve.errors import InternalError, NpuserveError
from npuserve.protocol.grpc import codec
from npuserve.protocol.grpc.parameters import EMPTY_FINAL_RESPONSE, FINAL_RESPONSE
from npuserve.protocol.grpc.transport import fail

if TYPE_CHECKING:
    from npuserve.protocol.grpc.codec import Parts
    from npuserve.protocol.grpc.infer import InferFrontEnd, ReplyPlan
    from npuserve.protocol.grpc.transport import Call
    from npuserve.request import InferenceRequest
    from npuserve.response import InferenceResponse
    from npuserve.server.model import Model
    from npuserve.tensor import Buffer

logger = logging.getLogger(__name__)

STRICT_ERRORS = "triton_grpc_error"

# Differs from Triton: by default its server keeps whatever a slow client does not read.
_MAX_UNSENT_BYTES = 64 << 20


class Exchange:
    """One request on the stream and what has become of it.

    Attributes:
        message: as received, for what error responses repeat of it; without raw contents.
        request: None until the core took it; then it can be cancelled.
        ordered: its response has a place in the order of requests.
        reply: the response of an ordered request, once there.
    """

    __slots__ = ("message", "ordered", "plan", "reply", "request")

    def __init__(self, message: pb.ModelInferRequest) -> None:
        self.message = message
        self.plan: ReplyPlan | None = None
        self.request: InferenceRequest | None = None
        self.ordered = True
        self.reply: Parts | None = None

    @property
    def wants_empty_final(self) -> bool:
        """Whether the client asked for a message even if the last response has no outputs."""
        parameters = self.message.parameters
        return EMPTY_FINAL_RESPONSE in parameters and parameters[EMPTY_FINAL_RESPONSE].bool_param


class InferStream:
    """The server's end of one ModelStreamInfer call; implements `StreamReceiver`.

    Args:
        max_unsent: messages a slow reader may leave unread before requests are no longer read.
    """

    def __init__(self, front_end: InferFrontEnd, call: Call, max_unsent: int) -> None:
        self._front_end = front_end
        self._call = call
        self._max_unsent = max_unsent
        self._strict = call.metadata.get(STRICT_ERRORS, "").lower() == "true"
        self._open: set[Exchange] = set()  # requests without their final response
        self._order: deque[Exchange] = deque()  # ordered ones not yet sent
        self._half_closed = False
        self._ended = False
        self._paused = False  # the client reads too slowly
        self._decoding = False  # a thread is at a large request
        call.on_cancel = self.cancel
        call.on_sent = self._sent

    def receive(self, message: Buffer) -> None:
        """See `StreamReceiver.receive`."""
        if self._ended:
            return
        exchange = Exchange(pb.ModelInferRequest())
        try:
            self._start(exchange, message)
        except NpuserveError as error:
            self._refuse(exchange, error)
        except Exception as error:
            logger.exception("a request on a gRPC stream failed")
            self._refuse(exchange, InternalError(f"{type(error).__name__}: {error}"))

    def half_closed(self) -> None:
        """See `StreamReceiver.half_closed`."""
        self._half_closed = True
        self._end_if_done()

    def cancel(self) -> None:
        """The client is gone: nobody waits for the open requests."""
        self._ended = True
        self._cancel_open()

    def _start(self, exchange: Exchange, data: Buffer) -> None:
        front_end = self._front_end
        exchange.message, raw = codec.parse_infer_request(data)
        front_end.check_open()
        model, version = front_end.find_model(exchange.message)
        plan = exchange.plan = front_end.plan_reply(exchange.message, model)
        decode = partial(
            codec.to_inference_request,
            exchange.message,
            raw,
            partial(self._respond, exchange),
            version,
        )
        if codec.takes_long(exchange.message, raw, len(data)):
            # Requests reach the core in the order of the stream: the next one waits.
            self._decoding = True
            self._call.pause_reading()
            self._enter(exchange, model)
            start, refuse = partial(self._decoded, exchange), partial(self._undecoded, exchange)
            front_end.decode_in_thread(decode, plan, self._call, start, refuse)
            return
        request = front_end.make_request(decode, plan, self._call)
        # Entered before the core sees the request: it may answer at once.
        self._enter(exchange, model)
        self._submit(exchange, request)

    def _submit(self, exchange: Exchange, request: InferenceRequest) -> None:
        assert exchange.plan is not None
        exchange.message.ClearField("raw_input_contents")
        exchange.request = request
        if self._paused:
            request.hold(True)
        self._front_end.submit(request, exchange.plan, self._call)

    def _decoded(self, exchange: Exchange, request: InferenceRequest) -> None:
        """A thread has made the request of a large message."""
        if self._ended:
            assert exchange.plan is not None
            exchange.plan.release()
            return
        self._submit(exchange, request)
        self._go_on_reading()

    def _undecoded(self, exchange: Exchange, error: NpuserveError) -> None:
        if not self._ended:
            self._refuse(exchange, error)
            self._go_on_reading()

    def _go_on_reading(self) -> None:
        self._decoding = False
        if not self._paused:
            self._call.resume_reading()

    def _enter(self, exchange: Exchange, model: Model | None) -> None:
        self._open.add(exchange)
        exchange.ordered = model is None or not model.decoupled
        if exchange.ordered:
            self._order.append(exchange)

    def _refuse(self, exchange: Exchange, error: NpuserveError) -> None:
        """Answer a request the core did not take. Such errors never end the stream."""
        if exchange not in self._open:
            self._enter(exchange, None)
        reply = codec.stream_error(str(error), pb.ModelInferResponse(id=exchange.message.id))
        self._reply(exchange, reply, final=True)

    def _respond(self, exchange: Exchange, response: InferenceResponse | None, final: bool) -> None:
        if not self._ended:
            self._answer(exchange, response, final)
        if final and exchange.plan is not None:
            exchange.plan.release()

    def _answer(self, exchange: Exchange, response: InferenceResponse | None, final: bool) -> None:
        if response is None:
            self._close_without_response(exchange)
            return
        try:
            if response.error is not None:
                raise response.error
            reply = self._encode(exchange, response, final)
        except NpuserveError as error:
            if self._strict:
                self._fail(error)
                return
            reply = self._error_reply(exchange, error, final)
        self._reply(exchange, reply, final)

    def _encode(self, exchange: Exchange, response: InferenceResponse, final: bool) -> Parts:
        assert exchange.plan is not None
        return codec.wrap_in_stream_response(self._front_end.encode(response, exchange.plan, final))

    def _close_without_response(self, exchange: Exchange) -> None:
        """The model ended the request by the final flag alone."""
        if exchange.ordered:
            error = InternalError(f"model '{exchange.message.model_name}' sent no response")
            self._reply(exchange, self._error_reply(exchange, error, True), final=True)
        elif exchange.wants_empty_final:
            message = self._bare_response(exchange, final=True)
            parts: Parts = [message.SerializeToString()]
            self._reply(exchange, codec.wrap_in_stream_response(parts), final=True)
        else:
            self._reply(exchange, None, final=True)

    def _error_reply(self, exchange: Exchange, error: NpuserveError, final: bool) -> Parts:
        return codec.stream_error(str(error), self._bare_response(exchange, final))

    @staticmethod
    def _bare_response(exchange: Exchange, final: bool) -> pb.ModelInferResponse:
        """A response without outputs: names as the client wrote them."""
        message = pb.ModelInferResponse(
            model_name=exchange.message.model_name,
            model_version=exchange.message.model_version,
            id=exchange.message.id,
        )
        message.parameters[FINAL_RESPONSE].bool_param = final
        return message

    def _reply(self, exchange: Exchange, reply: Parts | None, final: bool) -> None:
        """Send what may be sent now."""
        if final:
            self._open.discard(exchange)
        if not exchange.ordered:
            if reply is not None:
                self._send(reply)
        else:
            exchange.reply = reply
            order = self._order
            while order and (ready := order[0].reply) is not None:
                order.popleft()
                self._send(ready)
        self._end_if_done()

    def _send(self, reply: Parts) -> None:
        self._call.send(reply)
        if not self._paused and self._is_behind():
            self._pause(True)
            self._call.pause_reading()

    def _sent(self) -> None:
        if self._paused and not self._is_behind():
            self._pause(False)
            if not self._decoding:
                self._call.resume_reading()

    def _is_behind(self) -> bool:
        """Whether the client leaves too much unread."""
        call = self._call
        return call.unsent >= self._max_unsent or call.unsent_bytes > _MAX_UNSENT_BYTES

    def _pause(self, paused: bool) -> None:
        """Slow down both who asks on this stream and who answers."""
        self._paused = paused
        for exchange in list(self._open):
            if exchange.request is not None:
                exchange.request.hold(paused)

    def _end_if_done(self) -> None:
        if self._half_closed and not self._open and not self._order and not self._ended:
            self._ended = True
            self._call.finish()

    def _fail(self, error: NpuserveError) -> None:
        self._ended = True
        fail(self._call, error)
        self._cancel_open()

    def _cancel_open(self) -> None:
        for exchange in list(self._open):
            if exchange.request is not None:
                exchange.request.cancel()
        self._open.clear()
        self._order.clear()
