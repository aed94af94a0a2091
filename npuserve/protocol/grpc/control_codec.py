"""Control-plane values → protobuf messages: metadata, statistics, index, settings. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from npuserve._proto import grpc_service_pb2 as pb
from npuserve.errors import InvalidArgumentError, UnsupportedError

if TYPE_CHECKING:
    from npuserve.protocol.shared_memory import Region
    from npuserve.server.metadata import ModelIndexEntry, ModelMetadata, TensorMetadata
    from npuserve.server.model import Model
    from npuserve.server.statistics import Duration, ModelStatistics

_FILE_PREFIX = "file:"


def model_metadata_response(metadata: ModelMetadata) -> pb.ModelMetadataResponse:
    """Answer of ModelMetadata."""
    return pb.ModelMetadataResponse(
        name=metadata.name,
        versions=metadata.versions,
        platform=metadata.platform,
        inputs=map(_tensor_metadata, metadata.inputs),
        outputs=map(_tensor_metadata, metadata.outputs),
    )


def _tensor_metadata(tensor: TensorMetadata) -> pb.ModelMetadataResponse.TensorMetadata:
    return pb.ModelMetadataResponse.TensorMetadata(
        name=tensor.name, datatype=tensor.datatype, shape=tensor.shape
    )


def statistics_response(models: Iterable[Model]) -> pb.ModelStatisticsResponse:
    """Answer of ModelStatistics."""
    return pb.ModelStatisticsResponse(
        model_stats=[_statistics(model.name, model.version, model.statistics) for model in models]
    )


def _statistics(name: str, version: int, statistics: ModelStatistics) -> pb.ModelStatistics:
    return pb.ModelStatistics(
        name=name,
        version=str(version),
        last_inference=statistics.last_inference_ms,
        inference_count=statistics.inference_count,
        execution_count=statistics.execution_count,
        inference_stats=pb.InferStatistics(
            success=_duration(statistics.success),
            fail=_duration(statistics.fail),
            queue=_duration(statistics.queue),
            compute_input=_duration(statistics.compute_input),
            compute_infer=_duration(statistics.compute_infer),
            compute_output=_duration(statistics.compute_output),
            cache_hit=_duration(statistics.cache_hit),
            cache_miss=_duration(statistics.cache_miss),
        ),
        batch_stats=[
            pb.InferBatchStatistics(
                batch_size=batch_size,
                compute_input=_duration(batch.compute_input),
                compute_infer=_duration(batch.compute_infer),
                compute_output=_duration(batch.compute_output),
            )
            for batch_size, batch in sorted(statistics.batch.items())
        ],
        memory_usage=[
            pb.MemoryUsage(type=usage.type, id=usage.id, byte_size=usage.byte_size)
            for usage in statistics.memory_usage
        ],
        response_stats={
            str(index): pb.InferResponseStatistics(
                compute_infer=_duration(response.compute_infer),
                compute_output=_duration(response.compute_output),
                success=_duration(response.success),
                fail=_duration(response.fail),
                empty_response=_duration(response.empty_response),
                cancel=_duration(response.cancel),
            )
            for index, response in statistics.responses.items()
        },
    )


def _duration(duration: Duration) -> pb.StatisticDuration:
    return pb.StatisticDuration(count=duration.count, ns=duration.ns)


def index_response(entries: Iterable[ModelIndexEntry]) -> pb.RepositoryIndexResponse:
    """Answer of RepositoryIndex."""
    return pb.RepositoryIndexResponse(
        models=[
            pb.RepositoryIndexResponse.ModelIndex(
                name=entry.name, version=entry.version, state=entry.state, reason=entry.reason
            )
            for entry in entries
        ]
    )


def load_parameters(
    request: pb.RepositoryModelLoadRequest,
) -> tuple[str | None, dict[str, bytes] | None]:
    """The configuration and the files a load request brings.

    Raises:
        InvalidArgumentError: unknown parameter or one of the wrong type; Triton's texts.
        UnsupportedError: a repository is named.
    """
    check_repository_name(request.repository_name)
    config: str | None = None
    files: dict[str, bytes] = {}
    for key, value in request.parameters.items():
        kind = value.WhichOneof("parameter_choice")
        if key == "config":
            if kind != "string_param":
                raise _wrong_load_type(key, "string_param")
            config = value.string_param
        elif key.startswith(_FILE_PREFIX):
            if kind != "bytes_param":
                raise _wrong_load_type(key, "bytes_param")
            files[key] = value.bytes_param
        else:
            raise InvalidArgumentError(f"unrecognized load parameter '{key}'.")
    return config, files or None


def _wrong_load_type(key: str, expected: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"invalid value type for load parameter '{key}', expected {expected}."
    )


def unload_dependents(request: pb.RepositoryModelUnloadRequest) -> bool:
    """Whether members of an ensemble go with it.

    Raises:
        InvalidArgumentError: the parameter is no boolean.
        UnsupportedError: a repository is named.
    """
    check_repository_name(request.repository_name)
    if "unload_dependents" not in request.parameters:
        return False
    parameter = request.parameters["unload_dependents"]
    if parameter.WhichOneof("parameter_choice") != "bool_param":
        raise InvalidArgumentError(
            "invalid value type for 'unload_dependents' parameter, expected bool_param."
        )
    return parameter.bool_param


def check_repository_name(name: str) -> None:
    """Refuse requests about one of several repositories, as Triton does."""
    if name:
        raise UnsupportedError("'repository_name' specification is not supported")


def system_regions_response(
    regions: Iterable[Region],
) -> pb.SystemSharedMemoryStatusResponse:
    """Answer of SystemSharedMemoryStatus."""
    response = pb.SystemSharedMemoryStatusResponse()
    for region in regions:
        entry = response.regions[region.name]
        entry.name, entry.key = region.name, region.key
        entry.offset, entry.byte_size = region.offset, region.byte_size
    return response


def trace_changes(request: pb.TraceSettingRequest) -> dict[str, str | list[str] | None]:
    """The settings to change; one without a value goes back to its default."""
    return {key: list(setting.value) or None for key, setting in request.settings.items()}


def trace_response(settings: Mapping[str, Sequence[str] | str]) -> pb.TraceSettingResponse:
    """Answer of TraceSetting; a scalar is a list of one."""
    response = pb.TraceSettingResponse()
    for key, value in settings.items():
        response.settings[key].value.extend([value] if isinstance(value, str) else value)
    return response


def log_changes(request: pb.LogSettingsRequest) -> dict[str, bool | int | str | tuple[()]]:
    """The settings to change; the empty value that no setting takes is ()."""
    changes: dict[str, bool | int | str | tuple[()]] = {}
    for key, value in request.settings.items():
        kind = value.WhichOneof("parameter_choice")
        changes[key] = getattr(value, kind) if kind is not None else ()
    return changes


def log_response(settings: Mapping[str, bool | int | str]) -> pb.LogSettingsResponse:
    """Answer of LogSettings."""
    response = pb.LogSettingsResponse()
    for key, value in settings.items():
        target = response.settings[key]
        if isinstance(value, bool):
            target.bool_param = value
        elif isinstance(value, int):
            target.uint32_param = value
        else:
            target.string_param = value
    return response
