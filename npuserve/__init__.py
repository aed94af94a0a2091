"""npuserve: an asyncio inference server that speaks Triton's protocols on CPUs and Ascend NPUs.

The public names; everything else is internal, except `npuserve.backends.base` (for authors of
backends) and `npuserve.testing`. They are imported on first use: a worker process of the python
backend imports this package too and must not pay for the front ends.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from npuserve.embedded import Server
    from npuserve.errors import (
        AlreadyExistsError,
        InternalError,
        InvalidArgumentError,
        NotFoundError,
        NpuserveError,
        RequestCancelledError,
        StatusCode,
        UnavailableError,
        UnknownError,
        UnsupportedError,
        WorkerDiedError,
    )
    from npuserve.options import ServerOptions
    from npuserve.request import InferenceRequest
    from npuserve.response import InferenceResponse
    from npuserve.tensor import DataType, Tensor

__version__ = "0.1.0"

__all__ = [
    "AlreadyExistsError",
    "DataType",
    "InferenceRequest",
    "InferenceResponse",
    "InternalError",
    "InvalidArgumentError",
    "NotFoundError",
    "NpuserveError",
    "RequestCancelledError",
    "Server",
    "ServerOptions",
    "StatusCode",
    "Tensor",
    "UnavailableError",
    "UnknownError",
    "UnsupportedError",
    "WorkerDiedError",
    "__version__",
]

_HOME = {
    "DataType": "npuserve.tensor",
    "InferenceRequest": "npuserve.request",
    "InferenceResponse": "npuserve.response",
    "Server": "npuserve.embedded",
    "ServerOptions": "npuserve.options",
    "Tensor": "npuserve.tensor",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME.get(name, "npuserve.errors")), name)


def __dir__() -> list[str]:
    return __all__
