"""gRPC server reflection (v1 and v1alpha), so that grpcurl and its like need no .proto files.

The descriptors are those of `_proto`'s private pool. Messages come from grpcio-reflection where
that is installed; without it the service is not offered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from google.protobuf.message import DecodeError

from npuserve._proto import grpc_service_pb2, health_pb2
from npuserve.errors import NotFoundError, UnsupportedError
from npuserve.protocol.grpc.transport import Call, Method, StreamReceiver
from npuserve.protocol.status import grpc_status

if TYPE_CHECKING:
    from npuserve.tensor import Buffer

try:
    from grpc_reflection.v1alpha import reflection_pb2
except ImportError:
    reflection_pb2 = None

_SERVICES = (
    *grpc_service_pb2.DESCRIPTOR.services_by_name.values(),
    *health_pb2.DESCRIPTOR.services_by_name.values(),
)
# Messages of both versions are the same on the wire.
_NAMES = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")


def methods() -> list[Method]:
    """The reflection RPCs; empty without grpcio-reflection."""
    if reflection_pb2 is None:
        return []
    return [Method(f"/{name}/ServerReflectionInfo", stream=_ReflectionStream) for name in _NAMES]


class _ReflectionStream(StreamReceiver):
    """One reflection call: every question gets one answer."""

    def __init__(self, call: Call) -> None:
        self._call = call

    def receive(self, message: Buffer) -> None:
        """Answer one question."""
        try:
            request = reflection_pb2.ServerReflectionRequest.FromString(message)
        except DecodeError as error:
            self._call.finish(grpc_status(UnsupportedError.code), str(error))
            return
        self._call.send([_answer(request).SerializeToString()])

    def half_closed(self) -> None:
        """No more questions."""
        self._call.finish()


def _answer(request: Any) -> Any:
    response = reflection_pb2.ServerReflectionResponse(
        valid_host=request.host, original_request=request
    )
    pool = grpc_service_pb2.DESCRIPTOR.pool
    kind = request.WhichOneof("message_request")
    try:
        if kind == "list_services":
            for name in sorted([*(service.full_name for service in _SERVICES), *_NAMES]):
                response.list_services_response.service.add(name=name)
        elif kind == "file_by_filename":
            _add_file(response, pool.FindFileByName(request.file_by_filename))
        elif kind == "file_containing_symbol":
            _add_file(response, pool.FindFileContainingSymbol(request.file_containing_symbol))
        elif kind == "file_containing_extension":
            _set_error(response, NotFoundError("proto3 messages have no extensions"))
        elif kind == "all_extension_numbers_of_type":
            name = request.all_extension_numbers_of_type
            pool.FindMessageTypeByName(name)
            response.all_extension_numbers_response.base_type_name = name
        else:
            _set_error(response, UnsupportedError("unknown kind of reflection request"))
    except KeyError as error:
        _set_error(response, NotFoundError(str(error.args[0])))
    return response


def _add_file(response: Any, file: Any) -> None:
    """The file and all it imports, which saves the client further questions."""
    seen: set[str] = set()
    waiting = [file]
    while waiting:
        each = waiting.pop()
        if each.name in seen:
            continue
        seen.add(each.name)
        response.file_descriptor_response.file_descriptor_proto.append(each.serialized_pb)
        waiting.extend(each.dependencies)


def _set_error(response: Any, error: NotFoundError | UnsupportedError) -> None:
    response.error_response.error_code = grpc_status(error.code)
    response.error_response.error_message = str(error)
