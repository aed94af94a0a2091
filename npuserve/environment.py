"""Settings that hosted platforms hand over in the environment. Pure.

Sources: Vertex AI's and SageMaker's contracts for custom containers, and what Triton's own
containers make of them (server src/command_line_parser.cc, docker/sagemaker/serve).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_SINGLE_MODEL_REPOSITORY = "/opt/ml/model/"
_MULTI_MODEL_REPOSITORY = "/opt/ml/models/"

# SAGEMAKER_TRITON_<name> variables that are one flag each.
_SAGEMAKER_FLAGS = {
    "SAGEMAKER_BIND_TO_PORT": "sagemaker-port",
    "SAGEMAKER_SAFE_PORT_RANGE": "sagemaker-safe-port-range",
    "SAGEMAKER_TRITON_THREAD_COUNT": "sagemaker-thread-count",
    "SAGEMAKER_TRITON_ALLOW_GRPC": "allow-grpc",
    "SAGEMAKER_TRITON_GRPC_PORT": "grpc-port",
    "SAGEMAKER_TRITON_ALLOW_METRICS": "allow-metrics",
    "SAGEMAKER_TRITON_METRICS_PORT": "metrics-port",
    "SAGEMAKER_TRITON_LOG_VERBOSE": "log-verbose",
    "SAGEMAKER_TRITON_LOG_INFO": "log-info",
    "SAGEMAKER_TRITON_LOG_WARNING": "log-warning",
    "SAGEMAKER_TRITON_LOG_ERROR": "log-error",
    "SAGEMAKER_TRITON_MODEL_LOAD_GPU_LIMIT": "model-load-gpu-limit",
    "SAGEMAKER_TRITON_BUFFER_MANAGER_THREAD_COUNT": "buffer-manager-thread-count",
}

_SAGEMAKER_PYTHON_SETTINGS = {
    "SAGEMAKER_TRITON_SHM_DEFAULT_BYTE_SIZE": "shm-default-byte-size",
    "SAGEMAKER_TRITON_SHM_GROWTH_BYTE_SIZE": "shm-growth-byte-size",
}


def vertex_ai_defaults(environ: Mapping[str, str]) -> dict[str, Any]:
    """Fields of ServerOptions that Vertex AI's environment sets; flags go over them."""
    values: dict[str, Any] = {}
    if environ.get("AIP_MODE") == "PREDICTION":
        values |= {"allow_vertex_ai": True, "allow_http": False, "allow_grpc": False}
    port = environ.get("AIP_HTTP_PORT", "")
    if port.isdigit():
        values["vertex_ai_port"] = int(port)
    storage = environ.get("AIP_STORAGE_URI", "")
    if storage:
        values["model_repository"] = (storage,)
    return values


def sagemaker_flags(environ: Mapping[str, str]) -> list[str]:
    """Flags that the container command `serve` stands for."""
    multi_model = environ.get("SAGEMAKER_MULTI_MODEL") == "true"
    flags = ["--allow-sagemaker=true", "--allow-http=false"]
    if multi_model:
        flags += [
            f"--model-repository={_MULTI_MODEL_REPOSITORY}",
            "--model-control-mode=explicit",
            "--model-namespacing=true",
        ]
    else:
        flags.append(f"--model-repository={_SINGLE_MODEL_REPOSITORY}")
        default = environ.get("SAGEMAKER_TRITON_DEFAULT_MODEL_NAME", "")
        if default:
            flags += ["--model-control-mode=explicit", f"--load-model={default}"]
    for switch in ("GRPC", "METRICS"):
        if f"SAGEMAKER_TRITON_ALLOW_{switch}" not in environ:
            flags.append(f"--allow-{switch.lower()}=false")
    flags += [
        f"--{flag}={environ[name]}" for name, flag in _SAGEMAKER_FLAGS.items() if name in environ
    ]
    flags += [
        f"--backend-config=python,{key}={environ[name]}"
        for name, key in _SAGEMAKER_PYTHON_SETTINGS.items()
        if name in environ
    ]
    return flags
