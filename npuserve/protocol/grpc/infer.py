"""What unary inference and inference streams share, and the unary one. Steps 3 and 10 of the walk.

Between a transport's `Call` and `InferenceServer.infer`: decode, look the model up, forward
headers, hang the way back onto the request; and encode what comes back. Knows no transport.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from npuserve.errors import (
    InternalError,
    NpuserveError,
    UnavailableError,
    UnsupportedError,
)
from npuserve.protocol.classification import classify
from npuserve.protocol.grpc import codec
from npuserve.protocol.grpc.templates import RequestTemplate, RequestTemplates, ResponseHeads
from npuserve.protocol.grpc.transport import SHUTTING_DOWN, fail
from npuserve.request import InferenceRequest
from npuserve.server.trace import TraceContext

if TYPE_CHECKING:
    import asyncio

    from npuserve._proto import grpc_service_pb2 as pb
    from npuserve.protocol.grpc.codec import OutputOption, Parts
    from npuserve.protocol.grpc.transport import Call
    from npuserve.protocol.shared_memory import RegionSlice, SharedMemoryRegistry
    from npuserve.request import ResponseCallback
    from npuserve.response import InferenceResponse
    from npuserve.server.core import InferenceServer
    from npuserve.server.model import Model
    from npuserve.tensor import Buffer

logger = logging.getLogger(__name__)


class ReplyPlan(NamedTuple):
    """How the responses of one request are written.

    Attributes:
        id: the client's request id.
        model: serves the request.
        options: requested outputs that do not simply go into the response; usually None.
        slices: shared memory for the outputs that have it, until `release`.
    """

    id: str
    model: Model
    options: dict[str, OutputOption] | None
    slices: dict[str, RegionSlice]

    def release(self) -> None:
        """The final response was written or the request refused: let go of shared memory."""
        for each in self.slices.values():
            each.release()


# Makes a request of a message, by a reader of shared memory.
Decode = Callable[["codec.RegionReader"], InferenceRequest]

_NO_SLICES: dict[str, RegionSlice] = {}


class InferFrontEnd:
    """Turns messages into requests of the core and responses into messages.

    Args:
        header_pattern: metadata whose key it finds becomes a parameter; None forwards nothing.
    """

    def __init__(
        self,
        server: InferenceServer,
        shared_memory: SharedMemoryRegistry,
        header_pattern: re.Pattern[str] | None,
    ) -> None:
        self.server = server
        self.stopping = False
        self._shared_memory = shared_memory
        self._header_pattern = header_pattern
        self._templates = RequestTemplates()
        self._heads = ResponseHeads()

    def stop(self) -> None:
        """Refuse what comes on open streams from now on; transports take no more calls."""
        self.stopping = True

    def unary(self, data: Buffer, call: Call) -> None:
        """ModelInfer: one request, one response.

        Raises:
            NpuserveError: refused; the call is still open.
        """
        template = self._templates.match(data)
        if template is not None:
            self._unary_again(template, data, call)
            return
        message, raw = codec.parse_infer_request(data)
        model, version = self.find_model(message)
        _check_unary(model)
        plan = self.plan_reply(message, model)
        answer = partial(self._answer_unary, call, plan)
        decode = partial(codec.to_inference_request, message, raw, answer, version)
        if codec.takes_long(message, raw, len(data)):
            start = partial(self._start_unary, plan, call)
            refuse = partial(fail, call)
            call.on_cancel = self.decode_in_thread(decode, plan, call, start, refuse)
            return
        request = self.make_request(decode, plan, call)
        self._templates.learn(data, message, raw, version)
        self._start_unary(plan, call, request)

    def _start_unary(self, plan: ReplyPlan, call: Call, request: InferenceRequest) -> None:
        call.on_cancel = request.cancel
        self.submit(request, plan, call)

    def _unary_again(self, template: RequestTemplate, data: Buffer, call: Call) -> None:
        """A request like an earlier one but for its tensor bytes."""
        model = self.server.model(template.model_name, template.version)
        _check_unary(model)
        plan = ReplyPlan("", model, None, _NO_SLICES)
        request = InferenceRequest(
            template.model_name,
            template.tensors(data),
            partial(self._answer_unary, call, plan),
            model_version=template.version,
            requested_outputs=template.requested_outputs,
        )
        request.checked = template.checked
        if self._header_pattern is not None:
            self._forward_headers(request, call.metadata)
        call.on_cancel = request.cancel
        self.submit(request, plan, call)
        template.checked = request.checked

    def check_open(self) -> None:
        """Refuse what comes on an open stream once the server is going down."""
        if self.stopping:
            raise UnavailableError(SHUTTING_DOWN)

    def find_model(self, message: pb.ModelInferRequest) -> tuple[Model, int]:
        """The model version a message asks for, and the version as asked."""
        version = self.server.parse_version(message.model_version)
        return self.server.model(message.model_name, version), version

    def plan_reply(self, message: pb.ModelInferRequest, model: Model) -> ReplyPlan:
        """Read what the client wants done with the outputs; shared memory is held from here.

        Raises:
            NpuserveError: bad output parameters, unknown region.
        """
        options = codec.output_options(message)
        if options is None:
            return ReplyPlan(message.id, model, None, _NO_SLICES)
        slices: dict[str, RegionSlice] = {}
        try:
            for name, option in options.items():
                memory = option.shared_memory
                if memory is not None:
                    slices[name] = self._shared_memory.acquire(
                        memory.region, memory.offset, memory.byte_size
                    )
        except NpuserveError:
            for each in slices.values():
                each.release()
            raise
        return ReplyPlan(message.id, model, options, slices)

    def make_request(self, decode: Decode, plan: ReplyPlan, call: Call) -> InferenceRequest:
        """The request a message stands for. On an error the plan's memory is let go."""
        try:
            request = decode(self._shared_memory.read)
        except NpuserveError:
            plan.release()
            raise
        if self._header_pattern is not None:
            self._forward_headers(request, call.metadata)
        return request

    def decode_in_thread(
        self,
        decode: Decode,
        plan: ReplyPlan,
        call: Call,
        start: Callable[[InferenceRequest], None],
        refuse: Callable[[NpuserveError], None],
    ) -> Callable[[], None]:
        """As `make_request`, for a message that would hold up the event loop.

        Args:
            start: called on the loop with the request; what it raises goes to `refuse`.

        Returns:
            To be called if nobody wants the request any more.
        """

        def run() -> InferenceRequest:
            request = decode(self._shared_memory.reader(self.server.loop))
            for tensor in request.inputs.values():
                if tensor.datatype == "BYTES":
                    tensor.scan_strings()  # the core will not have to
            return request

        def done(work: asyncio.Future[InferenceRequest]) -> None:
            if work.cancelled():
                plan.release()
                return
            try:
                start(self.make_request(lambda _: work.result(), plan, call))
            except NpuserveError as error:
                refuse(error)
            except Exception as error:
                logger.exception("a gRPC handler failed")
                refuse(InternalError(f"{type(error).__name__}: {error}"))

        future = self.server.loop.run_in_executor(None, run)
        future.add_done_callback(done)

        def give_up() -> None:
            future.cancel()

        return give_up

    def submit(self, request: InferenceRequest, plan: ReplyPlan, call: Call) -> None:
        """Hand the request to the core."""
        try:
            if self.server.tracer.active:
                self._submit_traced(request, call.metadata)
            else:
                self.server.infer(request)
        except NpuserveError:
            plan.release()
            raise

    def _submit_traced(self, request: InferenceRequest, metadata: Mapping[str, str]) -> None:
        read_ns = time.monotonic_ns()
        if "traceparent" in metadata:
            request.trace = TraceContext(metadata["traceparent"], metadata.get("tracestate", ""))
        request.on_response = partial(_mark_sending, request, request.on_response)
        self.server.infer(request)
        if request.trace is not None:
            # The message was there when the transport called: reading took no time of its own.
            request.trace.mark("GRPC_WAITREAD_START", read_ns)
            request.trace.mark("GRPC_WAITREAD_END", read_ns)

    def _forward_headers(self, request: InferenceRequest, metadata: Mapping[str, str]) -> None:
        assert self._header_pattern is not None
        for key, value in metadata.items():
            if not self._header_pattern.search(key):
                continue
            if request.parameters is None:
                request.parameters = {}
            request.parameters[key] = value

    def encode(
        self, response: InferenceResponse, plan: ReplyPlan, final: bool | None = None
    ) -> Parts:
        """The bytes of a ModelInferResponse.

        Raises:
            NpuserveError: classification or shared memory failed, or the response has something
                that protobuf cannot carry.
        """
        try:
            if plan.options is None and not response.parameters:
                return self._heads.encode(response, plan.id, final)
            return self._encode_in_full(response, plan, final)
        except (ValueError, TypeError) as error:  # of protobuf, for what a model made
            raise InternalError(f"the response cannot be sent: {error}") from error

    def _encode_in_full(
        self, response: InferenceResponse, plan: ReplyPlan, final: bool | None
    ) -> Parts:
        options = plan.options
        message = codec.infer_response_message(response, plan.id, final)
        raw: list[Buffer] = []
        for tensor in response.outputs:
            option = options.get(tensor.name) if options is not None else None
            if option is not None and option.classification:
                tensor = classify(
                    tensor,
                    option.classification,
                    plan.model.labels(tensor.name),
                    batched=plan.model.max_batch_size > 0,
                )
            codec.add_output(message, raw, tensor)
            if option is not None and option.shared_memory is not None:
                plan.slices[tensor.name].write(tensor.name, tensor.data)
                raw[-1] = b""  # clients count raw contents by output, so the slot stays
        return codec.serialize_infer_response(message, raw)

    def _answer_unary(
        self, call: Call, plan: ReplyPlan, response: InferenceResponse | None, final: bool
    ) -> None:
        error: NpuserveError | None
        if response is None:
            error = InternalError(f"model '{plan.model.name}' sent no response")
        else:
            error = response.error
        if error is None:
            assert response is not None
            try:
                call.send(self.encode(response, plan))
            except NpuserveError as failure:
                error = failure
        plan.release()
        call.on_cancel = None
        if error is None:
            call.finish()
        else:
            fail(call, error)


def _check_unary(model: Model) -> None:
    if model.decoupled:
        raise UnsupportedError(
            "ModelInfer RPC doesn't support models with decoupled transaction policy"
        )


def _mark_sending(
    request: InferenceRequest,
    respond: ResponseCallback,
    response: InferenceResponse | None,
    final: bool,
) -> None:
    """Stands in front of the way back while requests are traced."""
    trace = request.trace
    if trace is not None:
        trace.mark("GRPC_SEND_START")
    respond(response, final)
    if trace is not None:
        trace.mark("GRPC_SEND_END")


def guarded(handle: Callable[[Buffer, Call], None]) -> Callable[[Buffer, Call], None]:
    """A unary handler whose exceptions end the call: ours as they are, anything else INTERNAL."""

    def run(data: Buffer, call: Call) -> None:
        try:
            handle(data, call)
        except NpuserveError as error:
            fail(call, error)
        except Exception as error:
            logger.exception("a gRPC handler failed")
            fail(call, InternalError(f"{type(error).__name__}: {error}"))

    return run
