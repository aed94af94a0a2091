"""Models of a SageMaker multi-model endpoint: loaded from where SageMaker unpacked them.

SageMaker gives a model a name of its own and says in which folder it lies. A repository of
symbolic links from names to folders makes that an ordinary load.
"""

from __future__ import annotations

import asyncio
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.responses import Response

from npuserve.errors import InvalidArgumentError, NpuserveError
from npuserve.model_config import config_to_json
from npuserve.protocol.http.bodies import Body
from npuserve.protocol.http.cloud_forward import error_response
from npuserve.protocol.http.handlers import json_response
from npuserve.protocol.http.requests import read_body
from npuserve.temporary import make_folder

if TYPE_CHECKING:
    from starlette.requests import Request

    from npuserve.options import ServerOptions
    from npuserve.server.core import InferenceServer

# Before the folders that SageMaker names; tests put a folder of their own here.
ROOT = ""

_URL = re.compile(r"(/opt/ml/models/[0-9A-Za-z._-]+/model)(?:/([0-9A-Za-z._-]+))?/?")
_NAME = re.compile(r"[0-9A-Za-z._-]+")
_CONFIG = "config.pbtxt"
_MEMORY_ERROR = re.compile(r"out of memory|CUDA_OUT_OF_MEMORY|bad_alloc|MemoryError", re.IGNORECASE)


def is_memory_error(text: str) -> bool:
    """Whether an error text says that memory ran out, on the host or on a card."""
    return _MEMORY_ERROR.search(text) is not None


class LoadModelBody(Body):
    """What SageMaker asks to load."""

    model_name: str
    url: str


class SageMakerModels:
    """Handlers of /models; one load or unload at a time."""

    def __init__(self, server: InferenceServer, options: ServerOptions) -> None:
        self._server = server
        self._limit = options.http_max_input_size
        self._urls: dict[str, str] = {}
        self._links: Path | None = None
        self._lock = asyncio.Lock()

    def close(self) -> None:
        """Remove the links."""
        if self._links is not None:
            shutil.rmtree(self._links)
            self._links = None

    async def list(self, request: Request) -> Response:
        """All models."""
        return json_response({"models": [self._entry(name) for name in self._urls]})

    async def get(self, request: Request) -> Response:
        """One model."""
        name = _name_of(request)
        return json_response(self._entry(name)) if name in self._urls else _unknown(name)

    async def load(self, request: Request) -> Response:
        """Load a model, and for an ensemble what else lies in its repository."""
        body = await read_body(request, LoadModelBody, self._limit)
        match = _URL.fullmatch(body.url)
        if match is None or not _NAME.fullmatch(body.model_name):
            raise InvalidArgumentError(
                f"cannot load '{body.model_name}': url '{body.url}' is not of the form "
                "/opt/ml/models/<name>/model[/<folder>]"
            )
        async with self._lock:
            if body.model_name in self._urls:
                return error_response(409, f"model '{body.model_name}' is already loaded")
            try:
                config = await asyncio.to_thread(self._link, body.model_name, match[1], match[2])
                await self._server.load_model(body.model_name, config)
            except NpuserveError as error:
                await asyncio.to_thread(self._unlink, body.model_name)
                if is_memory_error(str(error)):
                    return error_response(507, str(error))
                raise
            self._urls[body.model_name] = body.url
        return Response()

    async def unload(self, request: Request) -> Response:
        """Unload a model with its dependents."""
        name = _name_of(request)
        async with self._lock:
            if self._urls.pop(name, None) is None:
                return _unknown(name)
            await self._server.unload_model(name, unload_dependents=True)
            await asyncio.to_thread(self._unlink, name)
        return Response()

    def _entry(self, name: str) -> dict[str, str]:
        return {"modelName": name, "modelUrl": self._urls[name]}

    def _link(self, name: str, repository: str, folder: str | None) -> str:
        """Put the model into the repository of links; its configuration under its new name.

        Raises:
            InvalidArgumentError: there is no model, or it is not clear which one is meant.
        """
        root = Path(ROOT + repository)
        configs = sorted(root.glob(f"*/{_CONFIG}"))
        candidates = [root / folder / _CONFIG] if folder else _main_models(configs)
        if len(candidates) != 1 or not candidates[0].is_file():
            raise InvalidArgumentError(
                f"expecting one model with a {_CONFIG} in '{repository}', found "
                f"{[path.parent.name for path in candidates]}; name its folder in the url"
            )
        links = self._repository()
        for path in configs:
            if path != candidates[0] and not (links / path.parent.name).exists():
                (links / path.parent.name).symlink_to(path.parent)
        (links / name).symlink_to(candidates[0].parent)
        config = self._server.parse_config(candidates[0].read_text(), str(candidates[0]))
        config.name = name
        return config_to_json(config)

    def _repository(self) -> Path:
        if self._links is None:
            self._links = make_folder("npuserve-sagemaker-")
            self._server.lifecycle.add_repository(str(self._links))
        return self._links

    def _unlink(self, name: str) -> None:
        if self._links is not None:
            (self._links / name).unlink(missing_ok=True)


def _main_models(configs: list[Path]) -> list[Path]:
    """The ensemble if there is one among several models, else all."""
    ensembles = [path for path in configs if "ensemble_scheduling" in path.read_text()]
    return ensembles or configs


def _name_of(request: Request) -> str:
    return request.url.path.split("/")[2]


def _unknown(name: str) -> Response:
    return error_response(404, f"unknown model '{name}'")
