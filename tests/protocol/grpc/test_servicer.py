"""Control RPCs: health, metadata, repository, shared memory, settings."""

from __future__ import annotations

from multiprocessing.shared_memory import SharedMemory
from typing import Any

import grpc
import grpc.aio
import pytest

from npuserve._proto import grpc_service_pb2 as pb
from npuserve._proto import health_pb2
from tests.protocol.grpc.conftest import Rig, request

HEALTH = "/grpc.health.v1.Health/Check"


@pytest.fixture(params=["nghttp2", "grpcio"])
def transport(request: pytest.FixtureRequest) -> str:
    """Control calls do not depend on the transport; two of them are enough."""
    return str(request.param)


async def call(rig: Rig, name: str, /, **fields: Any) -> Any:
    """Call a control RPC by its name."""
    message = getattr(pb, f"{name}Request")(**fields)
    data = await rig.unary(name, message)
    return getattr(pb, f"{name}Response").FromString(data)


async def refused(rig: Rig, name: str, /, **fields: Any) -> tuple[grpc.StatusCode, str]:
    """Call a control RPC that fails; its status and text."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(rig, name, **fields)
    return caught.value.code(), str(caught.value.details())


async def test_health(rig: Rig) -> None:
    """Liveness and readiness are ordinary answers; the health service follows readiness."""
    assert (await call(rig, "ServerLive")).live
    for ready in (True, False):
        rig.core.is_ready = ready
        assert (await call(rig, "ServerReady")).ready is ready
        data = await rig.unary(HEALTH, health_pb2.HealthCheckRequest(service="any"))
        assert health_pb2.HealthCheckResponse.FromString(data).status == (1 if ready else 2)


async def test_model_ready(rig: Rig) -> None:
    """An unknown model is not ready; a version that is no number is an error."""
    assert (await call(rig, "ModelReady", name="echo")).ready
    assert not (await call(rig, "ModelReady", name="nope")).ready
    code, _ = await refused(rig, "ModelReady", name="echo", version="x")
    assert code is grpc.StatusCode.INVALID_ARGUMENT


async def test_metadata_and_config(rig: Rig) -> None:
    """Server and model describe themselves."""
    server = await call(rig, "ServerMetadata")
    assert (server.name, list(server.extensions)) == ("npuserve", ["statistics"])
    model = await call(rig, "ModelMetadata", name="echo")
    assert (model.name, list(model.versions)) == ("echo", ["1"])
    assert [(t.name, t.datatype, list(t.shape)) for t in model.inputs] == [
        ("INPUT0", "FP32", [-1, 4])
    ]
    assert (await call(rig, "ModelConfig", name="echo")).config.backend == "fake"
    code, text = await refused(rig, "ModelConfig", name="nope")
    assert (code, "nope" in text) == (grpc.StatusCode.NOT_FOUND, True)


async def test_statistics(rig: Rig) -> None:
    """Every counter of a model version is told; an empty name asks for all."""
    statistics = rig.core.table["echo"].statistics
    statistics.own.execution(4, 1, 2, 3)
    statistics.own.success.add(7)
    (stats,) = (await call(rig, "ModelStatistics", name="echo")).model_stats
    assert (stats.name, stats.version, stats.execution_count) == ("echo", "1", 1)
    assert (stats.inference_stats.success.count, stats.inference_stats.success.ns) == (1, 7)
    (batch,) = stats.batch_stats
    assert (batch.batch_size, batch.compute_infer.ns) == (4, 2)
    assert len((await call(rig, "ModelStatistics")).model_stats) == len(rig.core.table)


async def test_repository(rig: Rig) -> None:
    """Index, load with configuration and files, unload with dependents."""
    index = await call(rig, "RepositoryIndex")
    assert {model.name for model in index.models} == set(rig.core.table)
    await call(
        rig,
        "RepositoryModelLoad",
        model_name="m",
        parameters={
            "config": pb.ModelRepositoryParameter(string_param="{}"),
            "file:1/model.py": pb.ModelRepositoryParameter(bytes_param=b"x"),
        },
    )
    await call(
        rig,
        "RepositoryModelUnload",
        model_name="m",
        parameters={"unload_dependents": pb.ModelRepositoryParameter(bool_param=True)},
    )
    assert rig.core.loads == [("m", "{}", {"file:1/model.py": b"x"}), ("m", None, True)]


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"x": pb.ModelRepositoryParameter()}, "unrecognized load parameter 'x'."),
        (
            {"config": pb.ModelRepositoryParameter(int64_param=1)},
            "invalid value type for load parameter 'config', expected string_param.",
        ),
        (
            {"file:a": pb.ModelRepositoryParameter(string_param="a")},
            "invalid value type for load parameter 'file:a', expected bytes_param.",
        ),
    ],
)
async def test_bad_load_parameters(rig: Rig, parameters: Any, text: str) -> None:
    """Unknown and mistyped load parameters are refused in Triton's words."""
    answer = await refused(rig, "RepositoryModelLoad", model_name="m", parameters=parameters)
    assert answer == (grpc.StatusCode.INVALID_ARGUMENT, text)


@pytest.mark.parametrize(
    "name", ["RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload"]
)
async def test_repositories_cannot_be_named(rig: Rig, name: str) -> None:
    """Naming one of several repositories is unimplemented, as in Triton."""
    code, text = await refused(rig, name, repository_name="r")
    assert code is grpc.StatusCode.UNIMPLEMENTED
    assert text == "'repository_name' specification is not supported"


async def test_system_shared_memory(rig: Rig) -> None:
    """Register, status, tensors in and out of a region, unregister."""
    memory = SharedMemory(create=True, size=64)
    try:
        assert memory.buf is not None
        memory.buf[:8] = b"abcdefgh"
        fields = {"name": "r", "key": memory.name, "offset": 0, "byte_size": 64}
        await call(rig, "SystemSharedMemoryRegister", **fields)
        status = await call(rig, "SystemSharedMemoryStatus")
        assert (status.regions["r"].key, status.regions["r"].byte_size) == (memory.name, 64)

        message = request(data=b"unused!!")
        del message.raw_input_contents[:]
        output = message.outputs.add(name="OUTPUT0")
        for target, offset in ((message.inputs[0].parameters, 0), (output.parameters, 32)):
            target["shared_memory_region"].string_param = "r"
            target["shared_memory_offset"].int64_param = offset
            target["shared_memory_byte_size"].int64_param = 8
        answer = await rig.infer(message)
        assert list(answer.raw_output_contents) == [b""]
        assert bytes(memory.buf[32:40]) == b"abcdefgh"

        output.parameters["shared_memory_byte_size"].int64_param = 4
        with pytest.raises(grpc.aio.AioRpcError, match="should be at least 8 bytes"):
            await rig.infer(message)

        await call(rig, "SystemSharedMemoryUnregister", name="r")
        assert not (await call(rig, "SystemSharedMemoryStatus")).regions
        code, text = await refused(rig, "SystemSharedMemoryStatus", name="r")
        assert code is grpc.StatusCode.NOT_FOUND
        assert text == "Unable to find system shared memory region: 'r'"
    finally:
        memory.close()
        memory.unlink()


async def test_cuda_shared_memory_is_answered(rig: Rig) -> None:
    """CUDA regions cannot be registered, and there are none."""
    assert not (await call(rig, "CudaSharedMemoryStatus")).regions
    await call(rig, "CudaSharedMemoryUnregister", name="c")
    code, text = await refused(rig, "CudaSharedMemoryRegister", name="c")
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "GPUs not supported" in text


async def test_log_settings(rig: Rig) -> None:
    """Log settings are read and changed; their types are checked."""
    before = (await call(rig, "LogSettings")).settings
    assert before["log_info"].bool_param is True
    assert before["log_format"].string_param == "default"
    setting = pb.LogSettingsRequest.SettingValue(uint32_param=2)
    after = await call(rig, "LogSettings", settings={"log_verbose_level": setting})
    assert after.settings["log_verbose_level"].uint32_param == 2
    for value in (setting, pb.LogSettingsRequest.SettingValue()):
        answer = await refused(rig, "LogSettings", settings={"log_info": value, "x": value})
        assert answer == (grpc.StatusCode.INVALID_ARGUMENT, "expect boolean for 'log_info'")
    code, _ = await refused(
        rig, "LogSettings", settings={"log_file": pb.LogSettingsRequest.SettingValue()}
    )
    assert code is grpc.StatusCode.UNIMPLEMENTED


async def test_trace_settings(rig: Rig) -> None:
    """Trace settings are read and changed, for all models or one; no value clears."""
    value = pb.TraceSettingRequest.SettingValue
    first = (await call(rig, "TraceSetting")).settings
    assert list(first["trace_rate"].value) == ["1000"]
    settings = {"trace_rate": value(value=["7"])}
    changed = await call(rig, "TraceSetting", settings=settings, model_name="echo")
    assert list(changed.settings["trace_rate"].value) == ["7"]
    assert list((await call(rig, "TraceSetting")).settings["trace_rate"].value) == ["1000"]
    cleared = await call(rig, "TraceSetting", settings={"trace_rate": value()}, model_name="echo")
    assert list(cleared.settings["trace_rate"].value) == ["1000"]
    two = {"trace_rate": value(value=["1", "2"])}
    code, text = await refused(rig, "TraceSetting", settings=two)
    assert (code, text) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "expect only 1 value for 'trace_rate'",
    )
    code, text = await refused(rig, "TraceSetting", model_name="nope")
    assert (code, text) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "Request for unknown model : nope",
    )


async def test_garbage_is_refused(rig: Rig) -> None:
    """Bytes that are no message give INVALID_ARGUMENT, with the message's name."""
    method = rig.channel.unary_unary("/inference.GRPCInferenceService/ModelConfig")
    with pytest.raises(grpc.aio.AioRpcError, match="ModelConfigRequest") as caught:
        await method(b"\xff")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
