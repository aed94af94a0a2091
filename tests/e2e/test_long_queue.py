"""Thousands of requests in a queue at one moment, over real sockets."""

from __future__ import annotations

import asyncio
import gc
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
import tritonclient.grpc.aio
from tritonclient.grpc import InferInput

from npuserve.request import InferenceRequest
from npuserve.testing.serve import RunningServer, serve

COUNT = 3_000
TAKEN = 1  # by the instance

CONFIG = """
backend: "python"
input { name: "X" data_type: TYPE_INT32 dims: 1 }
output { name: "Y" data_type: TYPE_INT32 dims: 1 }
"""
MODEL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.held = True

    def execute(self, requests):
        if self.held:
            open({gate!r}, "rb", buffering=0).read(1)
            self.held = False
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("Y", request.inputs()[0].as_numpy() * 2)])
            for request in requests
        ]
"""


class Held:
    """A server whose only model answers nothing until it is released."""

    def __init__(self, server: RunningServer, pipe: int) -> None:
        self.server = server
        self._pipe = pipe

    def release(self) -> None:
        """Let the model go on."""
        os.write(self._pipe, b"x")

    def metric(self, name: str) -> float:
        """A metric of the model."""
        with urlopen(self.server.metrics_url) as response:
            text = response.read().decode()
        match = re.search(rf'^{name}{{model="held".*}} (\S+)$', text, re.MULTILINE)
        assert match is not None
        return float(match[1])

    async def until_queued(self, count: int) -> None:
        """Return once so many requests wait at the same time."""
        while await asyncio.to_thread(self.metric, "nv_inference_pending_request_count") != count:
            pass


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Held]:
    """The model waits for a byte in a pipe."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    version = tmp_path / "repository" / "held" / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(CONFIG)
    (version / "model.py").write_text(MODEL.format(gate=str(gate)))
    pipe = os.open(gate, os.O_RDWR)
    try:
        with serve(tmp_path / "repository") as server:
            try:
                yield Held(server, pipe)
            finally:
                os.write(pipe, b"x")  # or the model would not be unloaded
    finally:
        os.close(pipe)


def inputs(number: int) -> list[InferInput]:
    tensor = InferInput("X", [1], "INT32")
    tensor.set_data_from_numpy(np.array([number], np.int32))
    return [tensor]


async def test_all_of_a_long_queue_are_answered_and_nothing_stays(held: Held) -> None:
    """Each gets its own answer; afterwards no request is in the server any more."""
    async with tritonclient.grpc.aio.InferenceServerClient(held.server.grpc_url) as client:
        calls = [
            asyncio.ensure_future(client.infer("held", inputs(number))) for number in range(COUNT)
        ]
        await held.until_queued(COUNT - TAKEN)
        held.release()
        answers: list[Any] = await asyncio.gather(*calls)
    assert [answer.as_numpy("Y")[0] for answer in answers] == [2 * n for n in range(COUNT)]
    assert held.metric("nv_inference_pending_request_count") == 0
    assert held.metric("nv_inference_request_success") == COUNT
    gc.collect()
    # Not isinstance: it asks objects for their class, and some of torch's warn when asked.
    requests = [each for each in gc.get_objects() if type(each) is InferenceRequest]
    assert not [request for request in requests if request.model_name == "held"]


async def test_a_long_queue_whose_clients_leave_is_dropped(held: Held) -> None:
    """What waited is never executed."""
    async with tritonclient.grpc.aio.InferenceServerClient(held.server.grpc_url) as client:
        calls = [
            asyncio.ensure_future(client.infer("held", inputs(number))) for number in range(COUNT)
        ]
        await held.until_queued(COUNT - TAKEN)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await held.until_queued(0)
        held.release()
        await client.infer("held", inputs(1))
    assert held.metric("nv_inference_exec_count") == TAKEN + 1
