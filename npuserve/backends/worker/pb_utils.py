"""`triton_python_backend_utils` as a model imports it.

`bind` makes the module for one model instance: the shared classes, and those that talk to the
server bound to that instance's port. A worker process has one; with thread execution there is
one per instance, and isinstance checks hold across them.
"""

from __future__ import annotations

import enum
import json
import struct
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from npuserve.backends.worker import pb_request, pb_response, pb_tensor, wire
from npuserve.backends.worker.pb_config import ModelConfig
from npuserve.backends.worker.pb_metrics import Metric, MetricFamily, MetricKind
from npuserve.backends.worker.pb_tensor import Tensor, TritonModelException

if TYPE_CHECKING:
    from npuserve.backends.worker.host import ModelHost
    from npuserve.backends.worker.port import Port

MODULE_NAME = "triton_python_backend_utils"
# The C++ half of Triton's module; some models import names from it directly.
ALIASES = (MODULE_NAME, "c_python_backend_utils")


def get_input_tensor_by_name(
    inference_request: pb_request.InferenceRequest, name: str
) -> Tensor | None:
    """The input of that name, or None."""
    for tensor in inference_request._inputs:
        if tensor._name == name:
            return tensor
    return None


def get_output_tensor_by_name(
    inference_response: pb_response.InferenceResponse, name: str
) -> Tensor | None:
    """The output of that name, or None."""
    for tensor in inference_response._outputs:
        if tensor._name == name:
            return tensor
    return None


def get_input_config_by_name(model_config: dict[str, Any], name: str) -> Any:
    """The entry of `model_config["input"]` of that name, or None."""
    return _by_name(model_config.get("input", ()), name)


def get_output_config_by_name(model_config: dict[str, Any], name: str) -> Any:
    """The entry of `model_config["output"]` of that name, or None."""
    return _by_name(model_config.get("output", ()), name)


def _by_name(entries: Any, name: str) -> Any:
    for entry in entries:
        if entry["name"] == name:
            return entry
    return None


def using_decoupled_model_transaction_policy(model_config: dict[str, Any]) -> bool:
    """Whether the configuration makes the model decoupled."""
    policy = model_config.get("model_transaction_policy", {})
    return bool(policy.get("decoupled", False))


class Logger:
    """Writes to the server's log. One instance per bound module; used without constructing."""

    class LogLevel(enum.Enum):
        """Levels of `Logger.log`."""

        INFO = "INFO"
        WARNING = "WARNING"
        ERROR = "ERROR"
        VERBOSE = "VERBOSE"

    INFO = LogLevel.INFO
    WARNING = LogLevel.WARNING
    ERROR = LogLevel.ERROR
    VERBOSE = LogLevel.VERBOSE

    _port: Port

    @classmethod
    def log(cls, message: str, level: LogLevel = INFO) -> None:
        """Log at a level of this class."""
        if not isinstance(level, cls.LogLevel):
            raise TypeError(
                "log(): incompatible function arguments: level must be a Logger.LogLevel, "
                f"got {type(level).__name__}"
            )
        cls._write(level, message)

    @classmethod
    def log_info(cls, message: str) -> None:
        """Log at INFO."""
        cls._write(cls.INFO, message)

    @classmethod
    def log_warn(cls, message: str) -> None:
        """Log at WARNING."""
        cls._write(cls.WARNING, message)

    @classmethod
    def log_error(cls, message: str) -> None:
        """Log at ERROR."""
        cls._write(cls.ERROR, message)

    @classmethod
    def log_verbose(cls, message: str) -> None:
        """Log at VERBOSE: shown with --log-verbose."""
        cls._write(cls.VERBOSE, message)

    @classmethod
    def _write(cls, level: LogLevel, message: str) -> None:
        caller = sys._getframe(2)
        text = wire.text(message, "message")
        cls._port.log(level.value, text, caller.f_code.co_filename, caller.f_lineno)


_SHARED: dict[str, Any] = {
    "np": np,
    "json": json,
    "struct": struct,
    "Tensor": Tensor,
    "TritonModelException": TritonModelException,
    "ModelConfig": ModelConfig,
    "Metric": Metric,
    "MetricKind": MetricKind,
    "get_input_tensor_by_name": get_input_tensor_by_name,
    "get_output_tensor_by_name": get_output_tensor_by_name,
    "get_input_config_by_name": get_input_config_by_name,
    "get_output_config_by_name": get_output_config_by_name,
    "using_decoupled_model_transaction_policy": using_decoupled_model_transaction_policy,
    **{
        name: getattr(pb_tensor, name)
        for name in (
            "TRITON_STRING_TO_NUMPY", "triton_string_to_numpy", "triton_to_numpy_type",
            "numpy_to_triton_type", "serialize_byte_tensor", "deserialize_bytes_tensor",
        )
    },
    **{
        name: getattr(pb_request, name)
        for name in (
            "InferenceRequest", "InferenceTrace", "PreferredMemory", "ResponseIterator",
            "TRITONSERVER_MEMORY_CPU", "TRITONSERVER_MEMORY_GPU",
            "TRITONSERVER_REQUEST_FLAG_SEQUENCE_START", "TRITONSERVER_REQUEST_FLAG_SEQUENCE_END",
            "TRITONSERVER_REQUEST_RELEASE_ALL", "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE",
        )
    },
    **{
        name: getattr(pb_response, name)
        for name in (
            "InferenceResponse", "InferenceResponseSender", "TritonError",
            "TRITONSERVER_RESPONSE_COMPLETE_FINAL",
        )
    },
}  # fmt: skip


def bind(host: ModelHost, port: Port) -> ModuleType:
    """The module `triton_python_backend_utils` of one model instance."""
    module = ModuleType(MODULE_NAME, "Helpers of the Python backend for one model instance.")
    request_class = type(
        "InferenceRequest",
        (pb_request.InferenceRequest,),
        {"__slots__": (), "_port": port, "_host": host, "__module__": MODULE_NAME},
    )
    vars(module).update(
        _SHARED,
        InferenceRequest=request_class,
        MetricFamily=type("MetricFamily", (MetricFamily,), {"_port": port}),
        Logger=type("Logger", (Logger,), {"_port": port}),
        **_server_functions(host, port),
    )
    return module


def _content(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError(f"the content of files must be bytes, got {type(value).__name__}")
    return value


def _server_functions(host: ModelHost, port: Port) -> dict[str, Any]:
    def get_model_dir() -> str:
        """The directory that holds this version of the model."""
        return host.version_dir

    def load_model(
        model_name: str, config: str = "", files: dict[str, bytes] | None = None
    ) -> None:
        """Load or reload a model; needs model control mode explicit.

        Args:
            config: model configuration as JSON text, which replaces config.pbtxt.
            files: override files, `{"file:<relative path>": content}`.

        Raises:
            TritonModelException: it failed.
        """
        if files is not None and not isinstance(files, dict):
            raise TritonModelException(
                f"failed to load model '{model_name}', files should be a dictionary of file paths "
                "and file contents"
            )
        name, config = wire.text(model_name, "model_name"), wire.text(config, "config")
        if files is not None:
            files = {wire.text(path, "a path of files"): _content(files[path]) for path in files}
        port.call("load_model", name, config, files)

    def unload_model(model_name: str, unload_dependents: bool = False) -> None:
        """Unload a model. Raises TritonModelException if the server refuses."""
        port.call("unload_model", wire.text(model_name, "model_name"), bool(unload_dependents))

    def is_model_ready(model_name: str, model_version: str = "") -> bool:
        """Whether a model can serve; unknown models cannot."""
        name = wire.text(model_name, "model_name")
        version = wire.text(model_version, "model_version")
        ready: bool = port.call("is_model_ready", name, version)
        return ready

    return {
        "get_model_dir": get_model_dir,
        "load_model": load_model,
        "unload_model": unload_model,
        "is_model_ready": is_model_ready,
    }
