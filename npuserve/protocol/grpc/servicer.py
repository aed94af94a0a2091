"""The table of RPCs: one short handler each. Step 2 of the walk; knows no transport.

A control handler takes the request message and returns the response message, or a coroutine
that will; inference is in `infer.py` and `stream.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from google.protobuf.message import DecodeError, Message

from npuserve._proto import grpc_service_pb2 as pb
from npuserve._proto import health_pb2
from npuserve.errors import InternalError, InvalidArgumentError, NpuserveError, UnavailableError
from npuserve.protocol.grpc import control_codec, reflection
from npuserve.protocol.grpc.infer import InferFrontEnd, guarded
from npuserve.protocol.grpc.stream import InferStream
from npuserve.protocol.grpc.transport import Call, Method, StreamReceiver, fail
from npuserve.tensor import Buffer

if TYPE_CHECKING:
    from npuserve.protocol.shared_memory import SharedMemoryRegistry
    from npuserve.server.core import InferenceServer

logger = logging.getLogger(__name__)

SERVICE = "inference.GRPCInferenceService"
HEALTH_SERVICE = "grpc.health.v1.Health"
RESTRICTED_PREFIX = "triton-grpc-protocol-"

Handler = Callable[[Any], Message | Awaitable[Message]]
UnaryHandler = Callable[[Buffer, Call], None]


class Servicer:
    """Every RPC of Triton's gRPC services over one InferenceServer.

    Args:
        restricted: group of RPCs → (key, value) its callers must send as metadata.
        max_unsent: see `InferStream`.
    """

    def __init__(
        self,
        server: InferenceServer,
        shared_memory: SharedMemoryRegistry,
        front_end: InferFrontEnd,
        *,
        restricted: dict[str, tuple[str, str]],
        max_unsent: int,
    ) -> None:
        self._server = server
        self._shared_memory = shared_memory
        self._front_end = front_end
        self._restricted = restricted
        self._max_unsent = max_unsent

    def methods(self) -> list[Method]:
        """The whole service on one screen: name, request, restricted group, handler."""
        control = [
            self._control(name, request, group, handler)
            for name, request, group, handler in (
                ("ServerLive", pb.ServerLiveRequest, "health", self.server_live),
                ("ServerReady", pb.ServerReadyRequest, "health", self.server_ready),
                ("ModelReady", pb.ModelReadyRequest, "health", self.model_ready),
                ("ServerMetadata", pb.ServerMetadataRequest, "metadata", self.server_metadata),
                ("ModelMetadata", pb.ModelMetadataRequest, "metadata", self.model_metadata),
                ("ModelConfig", pb.ModelConfigRequest, "model-config", self.model_config),
                ("ModelStatistics", pb.ModelStatisticsRequest, "statistics", self.statistics),
                ("RepositoryIndex", pb.RepositoryIndexRequest, "model-repository", self.index),
                ("RepositoryModelLoad", pb.RepositoryModelLoadRequest, "model-repository",
                 self.load),
                ("RepositoryModelUnload", pb.RepositoryModelUnloadRequest, "model-repository",
                 self.unload),
                ("SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest,
                 "shared-memory", self.system_status),
                ("SystemSharedMemoryRegister", pb.SystemSharedMemoryRegisterRequest,
                 "shared-memory", self.system_register),
                ("SystemSharedMemoryUnregister", pb.SystemSharedMemoryUnregisterRequest,
                 "shared-memory", self.system_unregister),
                ("CudaSharedMemoryStatus", pb.CudaSharedMemoryStatusRequest, "shared-memory",
                 self.cuda_status),
                ("CudaSharedMemoryRegister", pb.CudaSharedMemoryRegisterRequest,
                 "shared-memory", self.cuda_register),
                ("CudaSharedMemoryUnregister", pb.CudaSharedMemoryUnregisterRequest,
                 "shared-memory", self.cuda_unregister),
                ("TraceSetting", pb.TraceSettingRequest, "trace", self.trace_setting),
                ("LogSettings", pb.LogSettingsRequest, "logging", self.log_settings),
            )
        ]  # fmt: skip
        infer = self._restrict("inference", guarded(self._front_end.unary))
        health = self._unary(health_pb2.HealthCheckRequest, self.health_check)
        return [
            Method(f"/{SERVICE}/ModelInfer", unary=infer, compress=True),
            Method(f"/{SERVICE}/ModelStreamInfer", stream=self.open_stream, compress=True),
            *control,
            Method(f"/{HEALTH_SERVICE}/Check", unary=self._restrict("health", health)),
            *reflection.methods(),
        ]

    # ---------------------------------------------------------------- inference

    def open_stream(self, call: Call) -> StreamReceiver:
        """ModelStreamInfer."""
        try:
            self._check_access("inference", call)
        except NpuserveError as error:
            fail(call, error)
            return _DeafReceiver()
        return InferStream(self._front_end, call, self._max_unsent)

    # ---------------------------------------------------------------- health and metadata

    def server_live(self, request: pb.ServerLiveRequest) -> pb.ServerLiveResponse:
        """ServerLive."""
        return pb.ServerLiveResponse(live=self._server.live())

    def server_ready(self, request: pb.ServerReadyRequest) -> pb.ServerReadyResponse:
        """ServerReady."""
        return pb.ServerReadyResponse(ready=self._server.ready())

    async def model_ready(self, request: pb.ModelReadyRequest) -> pb.ModelReadyResponse:
        """ModelReady; an unknown model is not ready, a bad version an error."""
        ready = await self._server.model_ready(request.name, request.version)
        return pb.ModelReadyResponse(ready=ready)

    def health_check(self, request: Any) -> Message:
        """grpc.health.v1 Check: follows readiness for any service name, as Triton."""
        serving = self._server.ready() and not self._front_end.stopping
        return health_pb2.HealthCheckResponse(status="SERVING" if serving else "NOT_SERVING")

    def server_metadata(self, request: pb.ServerMetadataRequest) -> pb.ServerMetadataResponse:
        """ServerMetadata."""
        metadata = self._server.server_metadata()
        return pb.ServerMetadataResponse(
            name=metadata.name, version=metadata.version, extensions=metadata.extensions
        )

    def model_metadata(self, request: pb.ModelMetadataRequest) -> pb.ModelMetadataResponse:
        """ModelMetadata."""
        return control_codec.model_metadata_response(
            self._server.model_metadata(request.name, request.version)
        )

    def model_config(self, request: pb.ModelConfigRequest) -> pb.ModelConfigResponse:
        """ModelConfig."""
        config = self._server.model_config(request.name, request.version)
        return pb.ModelConfigResponse(config=config)

    def statistics(self, request: pb.ModelStatisticsRequest) -> pb.ModelStatisticsResponse:
        """ModelStatistics; an empty name asks for all models."""
        return control_codec.statistics_response(
            self._server.model_statistics(request.name, request.version)
        )

    # ---------------------------------------------------------------- model repository

    async def index(self, request: pb.RepositoryIndexRequest) -> pb.RepositoryIndexResponse:
        """RepositoryIndex."""
        control_codec.check_repository_name(request.repository_name)
        entries = await self._server.repository_index(request.ready)
        return control_codec.index_response(entries)

    async def load(self, request: pb.RepositoryModelLoadRequest) -> pb.RepositoryModelLoadResponse:
        """RepositoryModelLoad."""
        config, files = control_codec.load_parameters(request)
        await self._server.load_model(request.model_name, config, files)
        return pb.RepositoryModelLoadResponse()

    async def unload(
        self, request: pb.RepositoryModelUnloadRequest
    ) -> pb.RepositoryModelUnloadResponse:
        """RepositoryModelUnload."""
        dependents = control_codec.unload_dependents(request)
        await self._server.unload_model(request.model_name, dependents)
        return pb.RepositoryModelUnloadResponse()

    # ---------------------------------------------------------------- shared memory

    def system_status(
        self, request: pb.SystemSharedMemoryStatusRequest
    ) -> pb.SystemSharedMemoryStatusResponse:
        """SystemSharedMemoryStatus; an empty name asks for all regions."""
        return control_codec.system_regions_response(
            self._shared_memory.system_status(request.name)
        )

    def system_register(
        self, request: pb.SystemSharedMemoryRegisterRequest
    ) -> pb.SystemSharedMemoryRegisterResponse:
        """SystemSharedMemoryRegister."""
        self._shared_memory.register_system(
            request.name, request.key, request.offset, request.byte_size
        )
        return pb.SystemSharedMemoryRegisterResponse()

    def system_unregister(
        self, request: pb.SystemSharedMemoryUnregisterRequest
    ) -> pb.SystemSharedMemoryUnregisterResponse:
        """SystemSharedMemoryUnregister; an empty name means all regions."""
        self._shared_memory.unregister_system(request.name)
        return pb.SystemSharedMemoryUnregisterResponse()

    def cuda_status(
        self, request: pb.CudaSharedMemoryStatusRequest
    ) -> pb.CudaSharedMemoryStatusResponse:
        """CudaSharedMemoryStatus: there are no regions."""
        self._shared_memory.cuda_status(request.name)
        return pb.CudaSharedMemoryStatusResponse()

    def cuda_register(
        self, request: pb.CudaSharedMemoryRegisterRequest
    ) -> pb.CudaSharedMemoryRegisterResponse:
        """CudaSharedMemoryRegister: refused."""
        self._shared_memory.register_cuda(request.name)
        return pb.CudaSharedMemoryRegisterResponse()

    def cuda_unregister(
        self, request: pb.CudaSharedMemoryUnregisterRequest
    ) -> pb.CudaSharedMemoryUnregisterResponse:
        """CudaSharedMemoryUnregister."""
        self._shared_memory.unregister_cuda(request.name)
        return pb.CudaSharedMemoryUnregisterResponse()

    # ---------------------------------------------------------------- settings

    def trace_setting(self, request: pb.TraceSettingRequest) -> pb.TraceSettingResponse:
        """TraceSetting: reads, and changes what `settings` names."""
        name = request.model_name
        if name:
            try:
                self._server.model(name)
            except NpuserveError as error:
                raise InvalidArgumentError(f"Request for unknown model : {name}") from error
        tracer = self._server.tracer
        if request.settings:
            tracer.update(control_codec.trace_changes(request), name)
        return control_codec.trace_response(tracer.settings(name))

    def log_settings(self, request: pb.LogSettingsRequest) -> pb.LogSettingsResponse:
        """LogSettings: reads, and changes what `settings` names."""
        settings = self._server.log_settings
        settings.update(control_codec.log_changes(request))
        return control_codec.log_response(settings.get())

    # ---------------------------------------------------------------- plumbing

    def _control(self, name: str, request: type[Message], group: str, handler: Handler) -> Method:
        unary = self._restrict(group, self._unary(request, handler))
        return Method(f"/{SERVICE}/{name}", unary=unary)

    def _restrict(self, group: str, unary: UnaryHandler) -> UnaryHandler:
        """The handler as it is, or behind the check of a restricted group."""
        if group not in self._restricted:
            return unary

        def checked(data: Buffer, call: Call) -> None:
            self._check_access(group, call)
            unary(data, call)

        return guarded(checked)

    def _check_access(self, group: str, call: Call) -> None:
        if group not in self._restricted:
            return
        key, value = self._restricted[group]
        header = RESTRICTED_PREFIX + key
        if call.metadata.get(header.lower()) != value:
            raise UnavailableError(f"This protocol is restricted, expecting header '{header}'")

    def _unary(self, request_class: type[Message], handler: Handler) -> UnaryHandler:
        """Decode, run, encode; a coroutine becomes a task that the server owns."""

        def run(data: Buffer, call: Call) -> None:
            try:
                request = request_class.FromString(data)  # type: ignore[arg-type]
            except DecodeError as error:
                # Differs from Triton: it is the client's fault, not INTERNAL.
                name = request_class.DESCRIPTOR.name
                raise InvalidArgumentError(f"failed to parse {name}: {error}") from error
            result = handler(request)
            if isinstance(result, Message):
                call.send([result.SerializeToString()])
                call.finish()
            else:
                self._server.spawn(_answer(result, call), name=request_class.DESCRIPTOR.name)

        return guarded(run)


class _DeafReceiver:
    """The end of a stream that was refused."""

    def receive(self, message: Buffer) -> None:
        """Drop it."""

    def half_closed(self) -> None:
        """Nothing to do."""


async def _answer(result: Awaitable[Message], call: Call) -> None:
    """Wait for a control operation and answer. It goes on if the client does not wait."""
    try:
        message = await result
    except NpuserveError as error:
        fail(call, error)
    except Exception as error:
        logger.exception("a gRPC handler failed")
        fail(call, InternalError(f"{type(error).__name__}: {error}"))
    else:
        call.send([message.SerializeToString()])
        call.finish()
