"""How a model's configuration becomes an onnxruntime session.

Parameters have the names that Triton's onnxruntime backend uses (its README, "Other Optimization
Options"); names beginning with `session.` or `ep.` go to onnxruntime as they are. The one place
that imports onnxruntime.
"""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npuserve.backends.model_signature import ModelSignature, ModelTensor
from npuserve.backends.registry import import_runtime
from npuserve.errors import (
    InternalError,
    InvalidArgumentError,
    InvalidConfigError,
    NpuserveError,
    UnavailableError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from npuserve.backends.base import BackendModelContext, Placement

_INSTALL = "pip install 'npuserve[onnxruntime]'"

_DATATYPE_BY_ONNX = {
    "bool": "BOOL", "uint8": "UINT8", "uint16": "UINT16", "uint32": "UINT32", "uint64": "UINT64",
    "int8": "INT8", "int16": "INT16", "int32": "INT32", "int64": "INT64", "float16": "FP16",
    "float": "FP32", "double": "FP64", "string": "BYTES", "bfloat16": "BF16",
}  # fmt: skip

# optimization { graph { level } } of Triton's onnxruntime backend; absent means all.
_GRAPH_LEVEL = {-1: "ORT_ENABLE_BASIC", 1: "ORT_ENABLE_EXTENDED", 2: "ORT_DISABLE_ALL"}

_CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")  # as a process in a container sees its own
_PROVIDER_BY_ACCELERATOR = {
    "cann": "CANNExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "openvino": "OpenVINOExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
}
# Providers for KIND_GPU, the first one that this onnxruntime has.
_DEVICE_PROVIDERS = ("CANNExecutionProvider", "CUDAExecutionProvider")
# Providers that take the number of a card.
_ON_CARDS = (*_DEVICE_PROVIDERS, "TensorrtExecutionProvider")
_CPU_PROVIDER = "CPUExecutionProvider"

_DEVICE_PARAMETERS = frozenset(
    {"arena_extend_strategy", "cudnn_conv_algo_search", "do_copy_in_default_stream",
     "gpu_mem_limit"}
)  # fmt: skip
_SESSION_PARAMETERS = frozenset(
    {"enable_mem_arena", "enable_mem_pattern", "execution_mode", "inter_op_thread_count",
     "intra_op_thread_count", "share_session_between_instances",
     "memory.enable_memory_arena_shrinkage"}
)  # fmt: skip

_LFS_POINTER = b"version https://git-lfs"
_ORT_ERROR = re.compile(r"\[ONNXRuntimeError\] : (\d+) : [A-Z_]+ : (.*)", re.DOTALL)
_ORT_INVALID_ARGUMENT = "2"


def runtime() -> Any:
    """The module onnxruntime.

    Raises:
        UnavailableError: it is not installed.
    """
    return import_runtime("onnxruntime", _INSTALL)


def model_path(context: BackendModelContext) -> Path:
    """The model's file, checked to be one.

    Raises:
        UnavailableError: it is missing, empty, or a Git LFS pointer.
    """
    name = context.config.default_model_filename or "model.onnx"
    path = context.version_dir / name
    if path.is_dir():  # with weights in files beside it
        path = path / "model.onnx"
    if not path.is_file():
        raise UnavailableError(f"unable to find '{path}' for model '{context.name}'")
    with path.open("rb") as file:
        head = file.read(len(_LFS_POINTER))
    if not head:
        raise UnavailableError(f"'{path}' of model '{context.name}' is empty, no ONNX model")
    if head == _LFS_POINTER:
        raise UnavailableError(
            f"'{path}' of model '{context.name}' is a Git LFS pointer, no ONNX model; "
            "fetch the real file with: git lfs pull"
        )
    return path


def read_signature(context: BackendModelContext) -> ModelSignature:
    """Inputs and outputs of the model's file, read without optimising the model.

    Raises:
        NpuserveError: the file cannot be read, or has tensors that no client can send.
    """
    ort = runtime()
    options = _quiet_options(ort)
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    _register_custom_ops(options, context)
    return signature_of(_open(ort, context, options, [_CPU_PROVIDER]), context.name)


def signature_of(session: Any, model: str) -> ModelSignature:
    """The signature of an open session.

    Raises:
        UnsupportedError: a tensor's type has no counterpart in the protocol.
    """

    def specs(arguments: Any) -> tuple[ModelTensor, ...]:
        return tuple(_tensor_spec(argument, model) for argument in arguments)

    return ModelSignature(specs(session.get_inputs()), specs(session.get_outputs()))


def open_session(context: BackendModelContext, placement: Placement) -> Any:
    """An InferenceSession for one placement (or for all CPU placements, which may share it).

    Raises:
        NpuserveError: the file or the options are refused by onnxruntime.
    """
    ort = runtime()
    options = _quiet_options(ort)
    _set_graph_level(ort, options, context)
    _set_threads(ort, options, context)
    parameters = context.parameters
    options.enable_cpu_mem_arena = _flag(context, "enable_mem_arena", True)
    options.enable_mem_pattern = _flag(context, "enable_mem_pattern", True)
    for key, value in parameters.items():
        if key.startswith(("session.", "ep.")):
            options.add_session_config_entry(key, value)
        elif key not in _SESSION_PARAMETERS | _DEVICE_PARAMETERS:
            context.log.warning("the onnxruntime backend does not know the parameter '%s'", key)
    _register_custom_ops(options, context)
    return _open(ort, context, options, _providers(ort, context, placement))


def run_options(context: BackendModelContext) -> Any:
    """RunOptions for every run of the model, or None."""
    shrink = context.parameters.get("memory.enable_memory_arena_shrinkage")
    if shrink is None:
        return None
    options = runtime().RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", shrink)
    return options


def shares_session(context: BackendModelContext, placement: Placement) -> bool:
    """Whether the instance uses the one session of the model version.

    # Differs from Triton: CPU instances share a session unless
    `share_session_between_instances` says no. A session may run in several threads at once;
    shared, the weights are in memory once and all instances together use as many threads as
    there are cores.
    """
    on_card = placement.kind == "GPU" and any(
        provider in _DEVICE_PROVIDERS for provider in runtime().get_available_providers()
    )
    return not on_card and _flag(context, "share_session_between_instances", True)


def as_npuserve_error(error: Exception) -> NpuserveError:
    """An exception of onnxruntime with the text Triton gives it."""
    match = _ORT_ERROR.match(str(error))
    if match is None:
        return InternalError(f"onnx runtime error: {error}")
    code, text = match.groups()
    message = f"onnx runtime error {code}: {text}"
    return (
        InvalidArgumentError(message) if code == _ORT_INVALID_ARGUMENT else InternalError(message)
    )


def _open(ort: Any, context: BackendModelContext, options: Any, providers: list[Any]) -> Any:
    path = model_path(context)
    try:
        return ort.InferenceSession(str(path), options, providers=providers)
    except Exception as error:  # onnxruntime's exceptions have no common base
        raise as_npuserve_error(error) from error


def _quiet_options(ort: Any) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 3  # errors; they also come as exceptions
    return options


def _set_graph_level(ort: Any, options: Any, context: BackendModelContext) -> None:
    optimization = context.config.optimization
    if not optimization.HasField("graph"):
        return
    level = optimization.graph.level
    name = _GRAPH_LEVEL.get(level, "ORT_ENABLE_ALL")
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, name)


def _set_threads(ort: Any, options: Any, context: BackendModelContext) -> None:
    if context.backend_options.get("enable-global-threadpool") in ("1", "true"):
        options_given = context.backend_options
        intra = _whole(context, "intra_op_thread_count", options_given.get("intra_op_thread_count"))
        inter = _whole(context, "inter_op_thread_count", options_given.get("inter_op_thread_count"))
        ort.set_global_thread_pool_sizes(intra, inter)
        options.use_per_session_threads = False
        return
    options.intra_op_num_threads = _number(context, "intra_op_thread_count", _fair_threads(context))
    options.inter_op_num_threads = _number(context, "inter_op_thread_count", 0)
    if _flag(context, "execution_mode", False):
        options.execution_mode = ort.ExecutionMode.ORT_PARALLEL
    # Idle pool threads that spin take the cores from the event loop and from other models.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")


def _fair_threads(context: BackendModelContext) -> int:
    """Threads of a session so that all instances at work use every core once.

    A session's pool has one thread less than this number: the instance's own thread works too.
    """
    cores = usable_cores()
    instances = len(context.placements)
    if shares_session(context, context.placements[0]):
        return max(1, cores - instances + 1)
    return max(1, cores // instances)


def usable_cores(limit_file: Path = _CPU_LIMIT) -> int:
    """Cores this process may use: those it may run on, below the limit of its container.

    Source: Linux, Documentation/admin-guide/cgroup-v2.rst, cpu.max: "$MAX $PERIOD", or "max".
    """
    # Differs from Triton: it leaves the number to onnxruntime, which knows no limit; the threads
    # would then use up the quota of a period at once and stand still for the rest of it.
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = limit_file.read_text().split()
        return min(cores, max(1, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no version 2 of control groups, or no limit
        return cores


def _providers(ort: Any, context: BackendModelContext, placement: Placement) -> list[Any]:
    available = ort.get_available_providers()
    accelerators = context.config.optimization.execution_accelerators
    on_device = placement.kind == "GPU"
    chosen: list[Any] = []
    for accelerator in (
        accelerators.gpu_execution_accelerator
        if on_device
        else accelerators.cpu_execution_accelerator
    ):
        provider = _PROVIDER_BY_ACCELERATOR.get(accelerator.name)
        if provider is None:
            raise InvalidConfigError(
                f"unknown Execution Accelerator '{accelerator.name}' is requested, known are: "
                f"{', '.join(_PROVIDER_BY_ACCELERATOR)}",
                "optimization.execution_accelerators",
            )
        if provider in available:
            own = {"device_id": str(placement.device_id)} if provider in _ON_CARDS else {}
            chosen.append((provider, own | dict(accelerator.parameters)))
        else:
            context.log.warning("this onnxruntime has no %s: left out", provider)
    if on_device:
        chosen += _device_provider(context, placement, available, chosen)
    return [*chosen, _CPU_PROVIDER]


def _device_provider(
    context: BackendModelContext, placement: Placement, available: list[str], chosen: list[Any]
) -> list[Any]:
    taken = {provider for provider, _ in chosen}
    for provider in _DEVICE_PROVIDERS:
        if provider in available and provider not in taken:
            options: dict[str, Any] = {
                key: value for key, value in context.parameters.items() if key in _DEVICE_PARAMETERS
            }
            return [(provider, {"device_id": placement.device_id, **options})]
    if not taken:
        context.log.warning(
            "instance %s is placed on card %d, but this onnxruntime has none of %s: it runs on "
            'the CPU (install onnxruntime-cann, or use backend: "ge")',
            placement.name,
            placement.device_id,
            ", ".join(_DEVICE_PROVIDERS),
        )
    return []


def _register_custom_ops(options: Any, context: BackendModelContext) -> None:
    for filename in context.config.model_operations.op_library_filename:
        path = Path(filename)
        try:
            options.register_custom_ops_library(
                str(path if path.is_absolute() else context.model_dir / path)
            )
        except Exception as error:  # onnxruntime's exceptions have no common base
            raise as_npuserve_error(error) from error


def _tensor_spec(argument: Any, model: str) -> ModelTensor:
    onnx_type = re.fullmatch(r"tensor\((\w+)\)", argument.type)
    datatype = _DATATYPE_BY_ONNX.get(onnx_type[1]) if onnx_type else None
    if datatype is None:
        raise UnsupportedError(
            f"model '{model}', tensor '{argument.name}': no datatype of the protocol stands for "
            f"{argument.type}"
        )
    shape = (dim if isinstance(dim, int) and dim >= 0 else -1 for dim in argument.shape)
    return ModelTensor(argument.name, datatype, tuple(shape))


def _number(context: BackendModelContext, name: str, default: int) -> int:
    return _whole(context, name, _parameter(context, name), default)


def _whole(context: BackendModelContext, name: str, text: str | None, default: int = 0) -> int:
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise InvalidConfigError.of_parameter(
            name, f"model '{context.name}': parameter {name} must be a whole number, got '{text}'"
        ) from None


def _flag(context: BackendModelContext, name: str, default: bool) -> bool:
    text = _parameter(context, name)
    return default if text is None else text.lower() in ("1", "true", "on")


def _parameter(context: BackendModelContext, name: str) -> str | None:
    parameters: Mapping[str, str] = context.parameters
    return parameters.get(name, context.backend_options.get(name))
