"""ServerOptions: every setting of the server, declared once.

A setting is a field: name (the flag has dashes instead of `_`), type, default and help are
here and nowhere else; `cli.py` derives flags and usage text. Names and defaults are
tritonserver's (source: server src/command_line_parser.cc); npuserve's own settings stand in
`NpuserveOptions`. Each part below is a section of the usage text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, model_validator

from npuserve import flag_values
from npuserve.errors import InvalidArgumentError
from npuserve.flag_values import RateLimitResource, TraceOptions

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["SECTIONS", "Flag", "RateLimitResource", "ServerOptions", "TraceOptions"]


@dataclass(frozen=True)
class Flag:
    """What the command line needs to know beyond the type of a field.

    Attributes:
        parse: makes the value from the text, or from all texts of a flag that `collects`;
            None derives it from the type.
        form: placeholder in the usage text; "" derives it from the type.
        collects: the flag may be given several times (fields that are tuples always collect).
        takes_value: False for a switch that means True.
        no_effect: why the flag is accepted and changes nothing here; "" for one that works.
        aliases: other names of the flag.
    """

    parse: Callable[[Any], Any] | None = None
    form: str = ""
    collects: bool = False
    takes_value: bool = True
    no_effect: str = ""
    aliases: tuple[str, ...] = ()


_NO_CUDA = Flag(no_effect="it belongs to CUDA devices")
_ONE_LOOP = Flag(no_effect="one event loop does this work, without threads to count")


class _Section(BaseModel):
    """A group of settings; `title` heads it in the usage text."""

    # Fields such as model_repository share pydantic's prefix and none of its names.
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    title: ClassVar[str]


class GlobalOptions(_Section):
    """The server as a whole."""

    title = "Server"

    id: str = Field(default="triton", description="Name of the server in its metadata and traces.")
    exit_timeout_secs: int = Field(
        default=30, ge=0, description="Seconds to wait for requests in flight when stopping."
    )


class LoggingOptions(_Section):
    """What is logged, how and where to."""

    title = "Logging"

    log_verbose: Annotated[int, Flag(parse=flag_values.parse_verbosity)] = Field(
        default=0, description="Level of verbose messages; 0 means none."
    )
    log_info: bool = Field(default=True, description="Log messages of level info.")
    log_warning: bool = Field(default=True, description="Log warnings.")
    log_error: bool = Field(default=True, description="Log errors.")
    log_format: Literal["default", "ISO8601"] = Field(
        default="default",
        description="Form of a line: LMMDD hh:mm:ss.ssssss or YYYY-MM-DDThh:mm:ssZ L.",
    )
    log_file: str = Field(default="", description="File to log to instead of the console.")


class RepositoryOptions(_Section):
    """Which models are served and how they are loaded."""

    title = "Model Repository"

    model_repository: Annotated[tuple[str, ...], Flag(aliases=("model-store",))] = Field(
        default=(),
        description="Folder or cloud URL (s3, gs, as) with models; may be given repeatedly.",
    )
    exit_on_error: bool = Field(default=True, description="Stop when a model fails at start-up.")
    disable_auto_complete_config: Annotated[bool, Flag(takes_value=False)] = Field(
        default=False, description="Do not complete configurations from the models' files."
    )
    strict_readiness: bool = Field(
        default=True,
        description="Ready only while all models are; else as soon as the server answers.",
    )
    model_control_mode: Literal["none", "poll", "explicit"] = Field(
        default="none",
        description="none: load all at start-up; poll: follow changes of the repository; "
        "explicit: load what --load-model and the model control API ask for.",
    )
    repository_poll_secs: int = Field(default=15, ge=0, description="Seconds between two polls.")
    load_model: tuple[str, ...] = Field(
        default=(), description="Model to load at start-up in mode explicit; * means all of them."
    )
    model_config_name: str = Field(
        default="", description="Read configs/<name>.pbtxt of a model where it exists."
    )
    model_load_thread_count: int = Field(
        default=4, ge=1, description="Models loaded at the same time."
    )
    model_load_retry_count: int = Field(
        default=0, ge=0, description="Further attempts to load a model."
    )
    model_namespacing: bool = Field(
        default=False, description="Allow models of one name in several repositories."
    )


class BackendOptions(_Section):
    """Backends, repository agents and devices."""

    title = "Backend"

    backend_directory: str = Field(
        default="/opt/tritonserver/backends", description="Folder of Python-based backends."
    )
    backend_config: Annotated[
        dict[str, dict[str, str]],
        Flag(flag_values.parse_backend_config, "<backend>,<key>=<value>", collects=True),
    ] = Field(default={}, description="Setting of a backend; without <backend>, of all backends.")
    repoagent_directory: Annotated[str, Flag(no_effect="there are no repository agents")] = Field(
        default="/opt/tritonserver/repoagents", description="Folder of repository agents."
    )
    host_policy: Annotated[
        dict[str, dict[str, str]],
        Flag(flag_values.parse_host_policy, "<policy>,<key>=<value>", collects=True),
    ] = Field(
        default={}, description="CPU cores (cpu-cores, numa-node) of instances with this policy."
    )
    model_load_gpu_limit: Annotated[
        dict[int, float],
        Flag(flag_values.parse_device_fractions, "<card>:<fraction>", collects=True),
    ] = Field(
        default={}, description="Refuse to load models above this fraction of a card's memory."
    )
    enable_peer_access: Annotated[bool, _NO_CUDA] = Field(
        default=True, description="Peer access between GPUs."
    )
    min_supported_compute_capability: Annotated[float, _NO_CUDA] = Field(
        default=6.0, description="Oldest CUDA compute capability."
    )


class HttpOptions(_Section):
    """The HTTP service."""

    title = "HTTP"

    allow_http: bool = Field(default=True, description="Serve HTTP.")
    http_address: str = Field(default="0.0.0.0", description="Address to listen at.")
    http_port: int = Field(default=8000, ge=0, le=65535, description="Port; 0 takes a free one.")
    reuse_http_port: bool = Field(default=False, description="Share the port with other servers.")
    http_header_forward_pattern: str = Field(
        default="", description="Headers whose name matches somewhere become request parameters."
    )
    http_thread_count: Annotated[int, _ONE_LOOP] = Field(default=8, description="Threads for HTTP.")
    http_max_input_size: int = Field(
        default=64 << 20,
        description="Bytes of JSON, raw input or decompressed body a request may have.",
    )
    http_restricted_api: Annotated[
        dict[str, tuple[str, str]],
        Flag(flag_values.parse_restricted_apis, "<api>,<api>:<header>=<value>", collects=True),
    ] = Field(default={}, description="Groups of endpoints that need this header.")
    allow_client_shm: bool = Field(
        # Differs from Triton: its newest releases say false. Clients that use shared memory
        # are to work unchanged, as they do with 2.51.
        default=True,
        description="Let clients register shared memory, over HTTP and gRPC.",
    )


class GrpcOptions(_Section):
    """The gRPC service."""

    title = "GRPC"

    allow_grpc: bool = Field(default=True, description="Serve gRPC.")
    grpc_address: str = Field(default="0.0.0.0", description="Address to listen at.")
    grpc_port: int = Field(default=8001, ge=0, le=65535, description="Port; 0 takes a free one.")
    reuse_grpc_port: bool = Field(default=False, description="Share the port with other servers.")
    grpc_header_forward_pattern: str = Field(
        default="", description="Metadata whose key matches somewhere becomes request parameters."
    )
    grpc_infer_thread_count: Annotated[int, _ONE_LOOP] = Field(
        default=2, description="Threads for inference requests."
    )
    grpc_infer_allocation_pool_size: Annotated[int, Flag(no_effect="messages are not pooled")] = (
        Field(default=8, description="Request messages kept for reuse.")
    )
    grpc_max_response_pool_size: int = Field(
        default=2**31 - 1,
        gt=0,
        description="Responses of a stream that may wait for a slow reader.",
    )
    grpc_use_ssl: bool = Field(default=False, description="Use TLS.")
    grpc_use_ssl_mutual: bool = Field(
        default=False, description="Use TLS and ask clients for theirs."
    )
    grpc_server_cert: str = Field(default="", description="PEM file with the server's certificate.")
    grpc_server_key: str = Field(default="", description="PEM file with the server's key.")
    grpc_root_cert: str = Field(
        default="", description="PEM file with the clients' root certificate."
    )
    grpc_infer_response_compression_level: Literal["none", "low", "medium", "high"] = Field(
        default="none", description="Compression of inference responses."
    )
    grpc_keepalive_time: int = Field(
        default=7_200_000, description="Milliseconds between two pings."
    )
    grpc_keepalive_timeout: int = Field(default=20_000, description="Milliseconds a ping may take.")
    grpc_keepalive_permit_without_calls: bool = Field(
        default=False, description="Ping connections without calls too."
    )
    grpc_http2_max_pings_without_data: int = Field(
        default=2, description="Pings in a row without a data frame."
    )
    grpc_http2_min_recv_ping_interval_without_data: int = Field(
        default=300_000, description="Milliseconds a client has to wait between two pings."
    )
    grpc_http2_max_ping_strikes: int = Field(
        default=2, description="Bad pings after which a connection is closed."
    )
    grpc_max_connection_age: int | None = Field(
        default=None, description="Milliseconds after which a connection is closed gracefully."
    )
    grpc_max_connection_age_grace: int | None = Field(
        default=None, description="Milliseconds calls have to end after that."
    )
    grpc_restricted_protocol: Annotated[
        dict[str, tuple[str, str]],
        Flag(flag_values.parse_restricted_protocols, "<rpc>,<rpc>:<key>=<value>", collects=True),
    ] = Field(
        default={}, description="Groups of calls that need metadata triton-grpc-protocol-<key>."
    )


class MetricsOptions(_Section):
    """The Prometheus endpoint."""

    title = "Metrics"

    allow_metrics: bool = Field(default=True, description="Serve metrics.")
    allow_gpu_metrics: bool = Field(default=True, description="Include the cards.")
    allow_cpu_metrics: bool = Field(default=True, description="Include processor and memory.")
    metrics_address: str = Field(
        default="", description="Address to listen at; --http-address if empty."
    )
    metrics_port: int = Field(default=8002, ge=0, le=65535, description="Port; 0 takes a free one.")
    metrics_interval_ms: float = Field(
        default=2000, gt=0, description="Milliseconds between two readings of cards and processor."
    )
    metrics_config: Annotated[
        dict[str, str], Flag(flag_values.parse_metrics_config, "<key>=<value>", collects=True)
    ] = Field(
        default={},
        description="counter_latencies, summary_latencies, histogram_latencies (booleans), "
        "summary_quantiles.",
    )


class TracingOptions(_Section):
    """Traces of requests."""

    title = "Tracing"

    trace_config: Annotated[
        TraceOptions,
        Flag(flag_values.parse_trace_config, "[<mode>,]<key>=<value>", collects=True),
    ] = Field(
        default=TraceOptions(),
        description="mode (triton, opentelemetry), level (OFF, TIMESTAMPS, TENSORS), rate, count; "
        "triton,file; triton,log-frequency; opentelemetry,url and other settings of the exporter.",
    )


class SchedulingOptions(_Section):
    """Response cache, rate limiter and memory pools."""

    title = "Cache, rate limiter and memory"

    cache_config: Annotated[
        dict[str, dict[str, str]],
        Flag(flag_values.parse_cache_config, "<cache>,<key>=<value>", collects=True),
    ] = Field(
        default={}, description="Response cache: local,size=<bytes> or redis,host=... and others."
    )
    cache_directory: Annotated[str, Flag(no_effect="caches are part of the server")] = Field(
        default="/opt/tritonserver/caches", description="Folder of caches."
    )
    rate_limit: Literal["off", "execution_count"] = Field(
        default="off", description="execution_count lets rate_limiter settings of models decide."
    )
    rate_limit_resource: Annotated[
        tuple[RateLimitResource, ...],
        Flag(flag_values.parse_rate_limit_resources, "<name>:<count>[:<device>]", collects=True),
    ] = Field(default=(), description="Amount of a resource, of one device or of each.")
    pinned_memory_pool_byte_size: Annotated[
        int,
        Flag(flag_values.parse_int64, no_effect="page-locked buffers belong to the instances"),
    ] = Field(default=256 << 20, description="Page-locked memory; shown in the metrics.")
    cuda_memory_pool_byte_size: Annotated[
        dict[int, int],
        Flag(
            flag_values.parse_device_bytes,
            "<card>:<bytes>",
            collects=True,
            no_effect=_NO_CUDA.no_effect,
        ),
    ] = Field(default={}, description="CUDA memory pool.")
    cuda_virtual_address_size: Annotated[
        dict[int, int],
        Flag(
            flag_values.parse_device_bytes,
            "<card>:<bytes>",
            collects=True,
            no_effect=_NO_CUDA.no_effect,
        ),
    ] = Field(default={}, description="CUDA virtual addresses.")
    buffer_manager_thread_count: Annotated[
        int, Flag(no_effect="copies are made by the thread that needs them")
    ] = Field(default=0, description="Threads that copy buffers.")


class SageMakerOptions(_Section):
    """The endpoint Amazon SageMaker calls."""

    title = "SageMaker"

    allow_sagemaker: bool = Field(default=False, description="Serve SageMaker's endpoint.")
    sagemaker_port: int = Field(default=8080, ge=0, le=65535, description="Port.")
    sagemaker_safe_port_range: Annotated[
        tuple[int, int] | None, Flag(flag_values.parse_port_range, "<integer>-<integer>")
    ] = Field(default=None, description="Ports the services may use.")
    sagemaker_thread_count: Annotated[int, _ONE_LOOP] = Field(default=8, description="Threads.")


class VertexAiOptions(_Section):
    """The endpoint Google Vertex AI calls."""

    title = "Vertex AI"

    allow_vertex_ai: bool = Field(
        default=False, description="Serve Vertex AI's endpoint; on where AIP_MODE is PREDICTION."
    )
    vertex_ai_port: int = Field(
        default=8080, ge=0, le=65535, description="Port; AIP_HTTP_PORT where that is set."
    )
    vertex_ai_thread_count: Annotated[int, _ONE_LOOP] = Field(default=8, description="Threads.")
    vertex_ai_default_model: str = Field(default="", description="Model the predict route runs.")


class NpuserveOptions(_Section):
    """Settings that tritonserver does not have."""

    title = "npuserve"

    grpc_server: Literal["auto", "grpcio", "native", "nghttp2"] = Field(
        default="auto",
        description="Library under the gRPC service; auto takes the fastest that fits.",
    )
    grpc_max_message_bytes: int = Field(
        default=2**31 - 1, gt=0, le=2**31 - 1, description="Size of a gRPC message, both ways."
    )
    http_ssl_certfile: str = Field(
        default="", description="PEM file; with it HTTP is served over TLS."
    )
    http_ssl_keyfile: str = Field(
        default="", description="PEM file with the key of the certificate."
    )
    http_ssl_ca_certs: str = Field(
        default="", description="PEM file; HTTP clients must show one of it."
    )
    http_max_body_size: Annotated[int, Flag(flag_values.parse_int64)] = Field(
        default=2**34, gt=0, description="Bytes of a whole HTTP body, binary tensors included."
    )
    http_limit_connections: int = Field(
        default=0, ge=0, description="HTTP connections served at the same time; 0 means no limit."
    )
    http_keep_alive_secs: int = Field(
        default=75, ge=0, description="Seconds an HTTP connection may stay idle."
    )
    share_core: bool = Field(
        default=True,
        description="Run the loop and instances in threads on one core while executions are "
        "shorter than waking another core.",
    )
    npu_simulator: int = Field(
        default=0, ge=0, description="Simulate this many NPU cards, on a machine without any."
    )


SECTIONS: tuple[type[_Section], ...] = (
    GlobalOptions,
    LoggingOptions,
    RepositoryOptions,
    BackendOptions,
    HttpOptions,
    GrpcOptions,
    MetricsOptions,
    TracingOptions,
    SchedulingOptions,
    SageMakerOptions,
    VertexAiOptions,
    NpuserveOptions,
)


class _Endpoint(NamedTuple):
    """A service that listens, as the start-up checks see it."""

    name: str
    address: str
    port: int


class ServerOptions(
    NpuserveOptions,
    VertexAiOptions,
    SageMakerOptions,
    SchedulingOptions,
    TracingOptions,
    MetricsOptions,
    GrpcOptions,
    HttpOptions,
    BackendOptions,
    RepositoryOptions,
    LoggingOptions,
    GlobalOptions,
):
    """All settings, validated and frozen.

    Raises:
        InvalidArgumentError: settings that contradict each other.
        pydantic.ValidationError: a value of the wrong type or out of range.
    """

    title = "All"

    @model_validator(mode="before")
    @classmethod
    def _listen_for_metrics_like_http(cls, values: Any) -> Any:
        if isinstance(values, dict) and not values.get("metrics_address"):
            address = values.get("http_address", cls.model_fields["http_address"].default)
            return values | {"metrics_address": address}
        return values

    @model_validator(mode="after")
    def _check_combinations(self) -> ServerOptions:
        if self.load_model and self.model_control_mode != "explicit":
            raise InvalidArgumentError(
                "Error: Use of '--load-model' requires setting '--model-control-mode=explicit' "
                "as well."
            )
        if self.http_max_input_size <= 0:
            raise InvalidArgumentError("Error: --http-max-input-size must be greater than 0.")
        for flag in ("http_header_forward_pattern", "grpc_header_forward_pattern"):
            _check_pattern(flag, getattr(self, flag))
        self._check_ports()
        return self

    def check_startup(self) -> None:
        """What tritonserver finds wrong only when it creates the server.

        Raises:
            InvalidArgumentError: no repository, or the wildcard beside other models.
        """
        if not self.model_repository:
            raise InvalidArgumentError("--model-repository must be specified")
        if "*" in self.load_model and len(set(self.load_model)) > 1:
            raise InvalidArgumentError(
                "Wildcard model name '*' must be the ONLY startup model if specified at all."
            )

    def backend_options(self, backend: str) -> dict[str, str]:
        """`--backend-config` settings of one backend, the global ones below them."""
        return self.backend_config.get("", {}) | self.backend_config.get(backend, {})

    def _check_ports(self) -> None:
        endpoints = self._endpoints()
        for index, one in enumerate(endpoints):
            self._check_safe_range(one)
            for other in endpoints[index + 1 :]:
                if one.port and (one.address, one.port) == (other.address, other.port):
                    raise InvalidArgumentError(
                        f"The server cannot listen to {one.name} requests and {other.name} "
                        f"requests at the same address and port {one.address}:{one.port}"
                    )

    def _check_safe_range(self, endpoint: _Endpoint) -> None:
        if self.sagemaker_safe_port_range is None:
            return
        low, high = self.sagemaker_safe_port_range
        if not low <= endpoint.port <= high:
            raise InvalidArgumentError(
                f"The server cannot listen to {endpoint.name} requests at port {endpoint.port}, "
                f"allowed port range is [{low}, {high}]"
            )

    def _endpoints(self) -> list[_Endpoint]:
        candidates = (
            (self.allow_http, _Endpoint("HTTP", self.http_address, self.http_port)),
            (self.allow_grpc, _Endpoint("GRPC", self.grpc_address, self.grpc_port)),
            (self.allow_metrics, _Endpoint("metrics", self.metrics_address, self.metrics_port)),
            (self.allow_sagemaker, _Endpoint("SageMaker", "0.0.0.0", self.sagemaker_port)),
            (self.allow_vertex_ai, _Endpoint("Vertex AI", "0.0.0.0", self.vertex_ai_port)),
        )
        return [endpoint for allowed, endpoint in candidates if allowed]


def _check_pattern(flag: str, pattern: str) -> None:
    try:
        flag_values.header_pattern(pattern)
    except ValueError as error:
        raise InvalidArgumentError(
            f"--{flag.replace('_', '-')} is no regular expression: {error}. Got {pattern}"
        ) from error
