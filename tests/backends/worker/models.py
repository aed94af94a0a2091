"""A server in this process that runs model.py files written in the tests."""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from npuserve.options import ServerOptions
from npuserve.request import InferenceRequest
from npuserve.response import InferenceResponse
from npuserve.server.core import InferenceServer
from npuserve.tensor import Tensor

CONFIG = """
backend: "python"
max_batch_size: 0
input [ { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] } ]
instance_group [ { kind: KIND_CPU } ]
"""
DECOUPLED = CONFIG + "model_transaction_policy { decoupled: true }\n"

# A decoupled model: one response for each value.
STREAM = """
class TritonPythonModel:
    def execute(self, requests):
        for r in requests:
            sender = r.get_response_sender()
            for value in tensor(r).as_numpy():
                sender.send(response(np.array([value], np.float32)))
            sender.send(flags=1)
"""

PREAMBLE = """
import json, os, sys, threading, time
import numpy as np
import triton_python_backend_utils as pb_utils

def tensor(request, name="IN"):
    return pb_utils.get_input_tensor_by_name(request, name)

def response(array, name="OUT", **options):
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, array)], **options)
"""


@dataclass
class Call:
    """A request on its way, and what came back."""

    request: InferenceRequest
    done: asyncio.Future[None]
    responses: list[InferenceResponse] = field(default_factory=list)

    async def answer(self) -> Call:
        """Wait for the final response."""
        async with asyncio.timeout(10):
            await self.done
        return self

    @property
    def error(self) -> str:
        """Text of the last response's error; "" for none."""
        error = self.responses[-1].error
        return "" if error is None else str(error)

    @property
    def values(self) -> list[Any]:
        """The only output of each response, as a list of its elements."""
        return [response.outputs[0].as_numpy().tolist() for response in self.responses]

    @property
    def value(self) -> Any:
        """The only output of the only response."""
        assert not self.error, self.error
        (value,) = self.values
        return value

    @property
    def text(self) -> str:
        """The only response's text output."""
        element: bytes = self.value[0]
        return element.decode()


class Models:
    """The models of a running server."""

    def __init__(self, server: InferenceServer) -> None:
        self.server = server

    def start(
        self,
        name: str = "m",
        inputs: Mapping[str, NDArray[Any] | Tensor] | None = None,
        **fields: Any,
    ) -> Call:
        """Send a request without waiting; IN = [1.0] when no inputs are given."""
        if inputs is None:
            inputs = {"IN": np.ones(1, np.float32)}

        def on_response(response: InferenceResponse | None, final: bool) -> None:
            if response is not None:
                call.responses.append(response)
            if final:
                call.done.set_result(None)

        tensors = {
            key: value if isinstance(value, Tensor) else Tensor.from_numpy(key, value)
            for key, value in inputs.items()
        }
        request = InferenceRequest(name, tensors, on_response, **fields)
        call = Call(request, asyncio.get_running_loop().create_future())
        self.server.infer(request)
        return call

    async def infer(
        self,
        name: str = "m",
        inputs: Mapping[str, NDArray[Any] | Tensor] | None = None,
        **fields: Any,
    ) -> Call:
        """Send a request and wait for its final response."""
        return await self.start(name, inputs, **fields).answer()

    def instance(self, name: str = "m", index: int = 0) -> Any:
        """The backend's instance object."""
        return self.server.model(name).pool.instances[index].backend_instance


def write_model(
    root: Path, name: str, code: str, config: str = CONFIG, files: Mapping[str, str] | None = None
) -> None:
    """A model directory; `code` follows `PREAMBLE`."""
    version = root / name / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(PREAMBLE + textwrap.dedent(code))
    (root / name / "config.pbtxt").write_text(config)
    for path, text in (files or {}).items():
        file = version / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))


def parameter(key: str, value: str) -> str:
    """A `parameters` entry of config.pbtxt."""
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'


@asynccontextmanager
async def served(root: Path, execution: str = "process", **options: Any) -> AsyncIterator[Models]:
    """Serve the models below `root`."""
    settings = ServerOptions(
        model_repository=(str(root),),
        backend_config={"python": {"execution": execution}},
        strict_readiness=False,
        exit_on_error=False,
        **options,
    )
    async with InferenceServer(settings) as server:
        yield Models(server)


@asynccontextmanager
async def served_model(
    tmp_path: Path, code: str, config: str = CONFIG, execution: str = "process", **options: Any
) -> AsyncIterator[Models]:
    """Serve one model `m`."""
    write_model(tmp_path, "m", code, config)
    async with served(tmp_path, execution, **options) as models:
        yield models
