"""Handlers of the control plane: model repository, shared memory, trace and log settings."""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from npuserve.errors import InvalidArgumentError, NotFoundError, UnavailableError, UnsupportedError
from npuserve.protocol.http.bodies import (
    IndexBody,
    LoadBody,
    LogBody,
    RegisterCudaBody,
    RegisterSystemBody,
    TraceBody,
    UnloadBody,
)
from npuserve.protocol.http.handlers import json_response
from npuserve.protocol.http.requests import read_body

if TYPE_CHECKING:
    from starlette.requests import Request

    from npuserve.log import LogSettings
    from npuserve.options import ServerOptions
    from npuserve.protocol.shared_memory import SharedMemoryRegistry
    from npuserve.server.core import InferenceServer
    from npuserve.server.metadata import ModelIndexEntry

_FILE_PREFIX = "file:"
_CUDA_HANDLE_BYTES = 64


class ControlHandlers:
    """Endpoints that change or list what the server has."""

    def __init__(
        self, server: InferenceServer, options: ServerOptions, shared_memory: SharedMemoryRegistry
    ) -> None:
        self._server = server
        self._shared_memory = shared_memory
        self._limit = options.http_max_input_size

    # -------------------------------------------------------- model repository

    async def index(self, request: Request) -> Response:
        """Models of the repositories and their states."""
        body = await read_body(request, IndexBody, self._limit, optional=True)
        entries = await self._server.repository_index(body.ready or False)
        return json_response([_index_entry(entry) for entry in entries])

    async def load(self, request: Request) -> Response:
        """Load or reload a model; returns when it is ready."""
        _refuse_repository(request)
        body = await read_body(request, LoadBody, self._limit, optional=True)
        config, files = _load_parameters(body.parameters or {})
        await self._server.load_model(request.path_params["model"], config, files)
        return Response()

    async def unload(self, request: Request) -> Response:
        """Unload a model; returns once it takes no more requests."""
        _refuse_repository(request)
        body = await read_body(request, UnloadBody, self._limit, optional=True)
        dependents = (body.parameters or {}).get("unload_dependents")
        # As Triton: a value of another type is ignored.
        await self._server.unload_model(request.path_params["model"], dependents is True)
        return Response()

    # ----------------------------------------------------------- shared memory

    async def system_status(self, request: Request) -> Response:
        """Registered system regions."""
        regions = self._shared_memory.system_status(request.path_params.get("region", ""))
        return json_response(
            [
                {
                    "name": region.name,
                    "key": region.key,
                    "offset": region.offset,
                    "byte_size": region.byte_size,
                }
                for region in regions
            ]
        )

    async def system_register(self, request: Request) -> Response:
        """Register a system region."""
        body = await read_body(request, RegisterSystemBody, self._limit)
        name = request.path_params.get("region", "")
        self._shared_memory.register_system(name, body.key, body.offset, body.byte_size)
        return Response()

    async def system_unregister(self, request: Request) -> Response:
        """Unregister one system region, or all."""
        self._shared_memory.unregister_system(request.path_params.get("region", ""))
        return Response()

    async def cuda_status(self, request: Request) -> Response:
        """Registered CUDA regions: none."""
        self._shared_memory.cuda_status(request.path_params.get("region", ""))
        return json_response([])

    async def cuda_register(self, request: Request) -> Response:
        """Refuse a CUDA region."""
        body = await read_body(request, RegisterCudaBody, self._limit)
        if len(_decode_base64(body.raw_handle.b64)) != _CUDA_HANDLE_BYTES:
            raise InvalidArgumentError(
                "'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t"
            )
        self._shared_memory.register_cuda(request.path_params.get("region", ""))
        return Response()

    async def cuda_unregister(self, request: Request) -> Response:
        """Unregister CUDA regions: there are none."""
        self._shared_memory.unregister_cuda(request.path_params.get("region", ""))
        return Response()

    # ---------------------------------------------------------------- settings

    async def trace_settings(self, request: Request) -> Response:
        """Trace settings of the server or of a model, after changing what a POST names."""
        name = request.path_params.get("model", "")
        if name:
            self._check_model(name)
        tracer: Any = self._server.tracer
        if request.method == "POST":
            body = await read_body(request, TraceBody, self._limit)
            changes = body.model_dump(include=body.model_fields_set)
            tracer.update({key: _as_list(value) for key, value in changes.items()}, name)
        return json_response(tracer.settings(name))

    def _check_model(self, name: str) -> None:
        try:
            self._server.model(name)
        except (NotFoundError, UnavailableError) as error:
            raise InvalidArgumentError(f"Request for unknown model : {name}") from error

    async def log_settings(self, request: Request) -> Response:
        """Log settings, after changing what a POST names."""
        settings: LogSettings = self._server.log_settings
        if request.method == "POST":
            body = await read_body(request, LogBody, self._limit)
            settings.update(body.model_dump(include=body.model_fields_set))
        return json_response(settings.get())


def _index_entry(entry: ModelIndexEntry) -> dict[str, str]:
    fields = {
        "name": entry.name,
        "version": entry.version,
        "state": entry.state,
        "reason": entry.reason,
    }
    return {key: value for key, value in fields.items() if value}


def _refuse_repository(request: Request) -> None:
    if "repository" in request.path_params:
        raise UnsupportedError("'repository_name' specification is not supported")


def _load_parameters(parameters: dict[str, Any]) -> tuple[str | None, dict[str, bytes] | None]:
    """The configuration and the files of a load request.

    Raises:
        InvalidArgumentError: an unknown parameter or one of the wrong type.
    """
    config: str | None = None
    files: dict[str, bytes] = {}
    for key, value in parameters.items():
        if type(value) is not str:
            # Differs from Triton: 400 instead of 500.
            raise InvalidArgumentError(
                f"load parameter '{key}': attempt to access JSON non-string as string"
            )
        if key == "config":
            config = value
        elif key.startswith(_FILE_PREFIX):
            files[key.removeprefix(_FILE_PREFIX)] = _decode_base64(value)
        else:
            raise InvalidArgumentError(f"unrecognized load parameter '{key}'.")
    return config, files or None


def _decode_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text)
    except (binascii.Error, ValueError) as error:
        raise InvalidArgumentError(f"invalid base64 data: {error}") from error


def _as_list(value: str | list[str] | None) -> list[str] | None:
    return [value] if isinstance(value, str) else value
