"""The JSON bodies of the HTTP API as pydantic models.

Request bodies of the control plane are validated with these; replies are built as plain values
and only described here, for the OpenAPI page. As with Triton, unknown members are ignored and a
body may come with any content type.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, RootModel

Datatype = Literal[
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16",
    "FP32", "FP64", "BYTES", "BF16",
]  # fmt: skip
Scalar = bool | int | float | str


class Body(BaseModel):
    """Base of all: strict types, unknown members ignored."""

    # The protocol has members called model_…, which pydantic would keep for itself.
    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())


class ErrorReply(Body):
    """Every error."""

    error: str


# ------------------------------------------------------------------ metadata


class ServerMetadataReply(Body):
    """The server and the extensions it has."""

    name: str
    version: str
    extensions: list[str]


class TensorMetadataReply(Body):
    """One input or output; a dimension of -1 is variable."""

    name: str
    datatype: Datatype
    shape: list[int]


class ModelMetadataReply(Body):
    """A model: its ready versions, inputs and outputs."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadataReply]
    outputs: list[TensorMetadataReply]


class ModelConfigReply(RootModel[dict[str, JsonValue]]):
    """The complete configuration, with the field names of config.pbtxt."""


class StatisticsReply(Body):
    """Statistics of the ready models, one entry per version."""

    model_stats: list[dict[str, JsonValue]]


# ----------------------------------------------------------------- inference


class InferInput(Body):
    """An input tensor; its data are here, behind the JSON or in shared memory."""

    name: str
    datatype: Datatype
    shape: list[int] = Field(json_schema_extra={"items": {"type": "integer", "minimum": 0}})
    data: list[Any] | None = Field(None, description="Elements in row-major order, may be nested.")
    parameters: dict[str, JsonValue] | None = Field(
        None,
        description="binary_data_size, or shared_memory_region with shared_memory_byte_size and "
        "shared_memory_offset.",
    )


class InferRequestedOutput(Body):
    """An output to return, and how."""

    name: str
    parameters: dict[str, JsonValue] | None = Field(
        None,
        description="binary_data, classification, or shared_memory_region with "
        "shared_memory_byte_size and shared_memory_offset.",
    )


class InferBody(Body):
    """An inference request. With Inference-Header-Content-Length, binary data follow it."""

    id: str | None = None
    parameters: dict[str, Scalar] | None = Field(
        None,
        description="sequence_id, sequence_start, sequence_end, priority, timeout (µs), "
        "binary_data_output, or parameters of the model.",
    )
    inputs: list[InferInput]
    outputs: list[InferRequestedOutput] | None = None


class InferOutput(Body):
    """An output tensor; without `data` its bytes follow the JSON or are in shared memory."""

    name: str
    datatype: Datatype
    shape: list[int]
    data: list[Any] | None = None
    parameters: dict[str, Scalar] | None = None


class InferReply(Body):
    """The outputs of an inference."""

    id: str | None = None
    model_name: str
    model_version: str
    parameters: dict[str, Scalar] | None = None
    outputs: list[InferOutput]


class GenerateBody(RootModel[dict[str, JsonValue]]):
    """Inputs of the model by name (a value or a flat list); other members are parameters."""


class GenerateReply(RootModel[dict[str, JsonValue]]):
    """Outputs of the model by name, with model_name and model_version."""


# ---------------------------------------------------------- model repository


class IndexBody(Body):
    """What to list."""

    ready: bool | None = Field(None, description="Only models that are ready.")


class IndexEntryReply(Body):
    """A model version of the repositories; a model that was never loaded has only a name."""

    name: str
    version: str | None = None
    state: Literal["UNKNOWN", "READY", "UNAVAILABLE", "LOADING", "UNLOADING"] | None = None
    reason: str | None = None


class IndexReply(RootModel[list[IndexEntryReply]]):
    """All models, by name."""


class LoadBody(Body):
    """How to load a model."""

    parameters: dict[str, JsonValue] | None = Field(
        None,
        description="config: the configuration as JSON text, in place of config.pbtxt. "
        "file:<path>: a file of the model as base64, with config.",
    )


class UnloadBody(Body):
    """How to unload a model."""

    parameters: dict[str, JsonValue] | None = Field(
        None, description="unload_dependents: also unload the members."
    )


# ------------------------------------------------------------- shared memory


class RegisterSystemBody(Body):
    """A POSIX shared-memory object of this machine."""

    key: str
    offset: int = Field(0, ge=0)
    byte_size: int = Field(ge=0)


class CudaHandle(Body):
    """A cudaIpcMemHandle_t."""

    b64: str


class RegisterCudaBody(Body):
    """A CUDA memory handle; always refused, there is no CUDA device."""

    raw_handle: CudaHandle
    device_id: int = Field(ge=0)
    byte_size: int = Field(ge=0)


class SystemRegionReply(Body):
    """A registered region."""

    name: str
    key: str
    offset: int
    byte_size: int


class SystemRegionsReply(RootModel[list[SystemRegionReply]]):
    """Registered system regions."""


class CudaRegionReply(Body):
    """A registered CUDA region."""

    name: str
    device_id: int
    byte_size: int


class CudaRegionsReply(RootModel[list[CudaRegionReply]]):
    """Registered CUDA regions: always none."""


# ------------------------------------------------------------------ settings


class TraceBody(Body):
    """Trace settings to change; null clears one."""

    trace_file: JsonValue = Field(None, description="Cannot be changed.")
    trace_level: list[str] | None = None
    trace_rate: str | None = None
    trace_count: str | None = None
    log_frequency: str | None = None


class TraceReply(RootModel[dict[str, str | list[str]]]):
    """All trace settings."""


class LogBody(Body):
    """Log settings to change; null leaves one as it is."""

    log_file: JsonValue = Field(None, description="Cannot be changed.")
    log_info: bool | None = None
    log_warning: bool | None = None
    log_error: bool | None = None
    log_verbose_level: int | None = Field(None, ge=0)
    log_format: str | None = None


class LogReply(Body):
    """All log settings."""

    log_file: str
    log_info: bool
    log_warning: bool
    log_error: bool
    log_verbose_level: int
    log_format: str
