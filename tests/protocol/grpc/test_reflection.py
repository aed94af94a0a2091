"""Server reflection, asked as grpcurl does."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection_pb2

from tests.protocol.grpc.conftest import Rig

VERSIONS = ("v1", "v1alpha")


async def ask(rig: Rig, *questions: Any, version: str = "v1") -> list[Any]:
    """Ask over one reflection stream."""
    method = rig.channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    return [answer async for answer in method(iter(questions))]


@pytest.mark.parametrize("version", VERSIONS)
async def test_services_are_listed(rig: Rig, version: str) -> None:
    """Both versions of reflection list Triton's service, health and themselves."""
    question = reflection_pb2.ServerReflectionRequest(list_services="*")
    (answer,) = await ask(rig, question, version=version)
    assert [service.name for service in answer.list_services_response.service] == [
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
        "inference.GRPCInferenceService",
    ]


async def test_descriptors_are_enough_to_call(rig: Rig) -> None:
    """The files reflection gives rebuild the service with all its messages."""
    question = reflection_pb2.ServerReflectionRequest(
        file_containing_symbol="inference.GRPCInferenceService"
    )
    (answer,) = await ask(rig, question)
    pool = descriptor_pool.DescriptorPool()
    files = [
        descriptor_pb2.FileDescriptorProto.FromString(data)
        for data in answer.file_descriptor_response.file_descriptor_proto
    ]
    for file in reversed(files):
        pool.Add(file)
    service = pool.FindServiceByName("inference.GRPCInferenceService")
    infer = service.methods_by_name["ModelInfer"]
    assert infer.input_type.full_name == "inference.ModelInferRequest"
    assert pool.FindMessageTypeByName("inference.ModelConfig").fields


async def test_what_is_not_there_is_not_found(rig: Rig) -> None:
    """Unknown names are answered on the stream, which goes on."""
    request = reflection_pb2.ServerReflectionRequest
    answers = await ask(
        rig,
        request(file_containing_symbol="no.Such"),
        request(file_by_filename="no.proto"),
        request(all_extension_numbers_of_type="no.Such"),
        request(all_extension_numbers_of_type="inference.ModelConfig"),
        request(),
    )
    codes = [answer.error_response.error_code for answer in answers]
    assert codes == [5, 5, 5, 0, grpc.StatusCode.UNIMPLEMENTED.value[0]]
