"""A sequence batcher over real instance wrappers, with a backend that the test drives."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from google.protobuf import text_format

from npuserve.backends.base import ExecutionBatch, LoopInstance, Placement
from npuserve.errors import NpuserveError, WorkerDiedError
from npuserve.model_config import ModelConfig
from npuserve.request import SEQUENCE_END, SEQUENCE_START, InferenceRequest
from npuserve.response import InferenceResponse
from npuserve.server.instance_pool import InstancePool
from npuserve.server.schedulers.base import SchedulerContext
from npuserve.server.schedulers.sequence_batcher import SequenceBatcher
from npuserve.server.statistics import ModelStatistics
from npuserve.tensor import Tensor
from npuserve.testing.clock import FakeClock

BOTH = SEQUENCE_START | SEQUENCE_END

CONTROLS = """
control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] } }
control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY int32_false_true: [0, 1] } }
control_input { name: "CORRID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } }
"""

STATE = 'state { input_name: "SI" output_name: "SO" data_type: TYPE_INT32 dims: [ 1 ] }'


class Driven(LoopInstance):
    """An instance that keeps its batches until the test ends them."""

    def __init__(self) -> None:
        self.batches: list[ExecutionBatch] = []

    def start(self, batch: ExecutionBatch) -> None:
        self.batches.append(batch)

    def die(self) -> None:
        """The worker dies with what it has in hand."""
        self.available = False
        assert self.on_available_change is not None
        self.on_available_change()
        batches, self.batches = self.batches, []
        for batch in batches:
            batch.done(WorkerDiedError("the worker died"))

    def restart(self) -> None:
        self.available = True
        assert self.on_available_change is not None
        self.on_available_change()


class Client:
    """One request as its client sees it."""

    def __init__(self, request: InferenceRequest) -> None:
        self.request = request
        self.responses: list[InferenceResponse] = []
        self.final: int = 0

    def on_response(self, response: InferenceResponse | None, final: bool) -> None:
        assert not self.final, "nothing comes after the final response"
        if response is not None:
            self.responses.append(response)
        self.final += final

    @property
    def error(self) -> NpuserveError:
        assert self.final == 1
        assert self.responses[-1].error is not None
        return self.responses[-1].error

    @property
    def ok(self) -> bool:
        return bool(self.final) and self.responses[-1].error is None


class Model:
    """A model with a sequence batcher."""

    def __init__(
        self,
        batching: str = "direct { }",
        *,
        max_batch_size: int = 4,
        instances: int = 1,
        dims: str = "1",
        more: str = "",
        controls: str = CONTROLS,
    ) -> None:
        self.config = text_format.Parse(
            f"""name: "m" max_batch_size: {max_batch_size} {more}
            input {{ name: "IN" data_type: TYPE_INT32 dims: [ {dims} ] }}
            output {{ name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }}
            sequence_batching {{ {controls} {batching} }}""",
            ModelConfig(),
        )
        decoupled = self.config.model_transaction_policy.decoupled
        self.clock = FakeClock()
        self.statistics = ModelStatistics()
        self.pool = InstancePool("m", 1, cast("Any", None), self.statistics, decoupled)
        self.instances = [Driven() for _ in range(instances)]
        for index, instance in enumerate(self.instances):
            wrapper = self.pool.add(Placement(f"m_0_{index}", "CPU", 0, 0, index), instance)
            instance.on_available_change = lambda w=wrapper: self.pool.availability_changed(w)
        self.batcher = SequenceBatcher(
            SchedulerContext(
                name="m",
                version=1,
                config=self.config,
                model_dir=Path(),
                instances=self.pool,
                statistics=self.statistics,
                clock=self.clock,
                lookup=cast("Any", None),
            )
        )
        self.released: list[InferenceRequest] = []

    def send(
        self,
        correlation_id: int | str,
        flags: int = 0,
        value: int = 0,
        *,
        timeout_us: int = 0,
        shape: tuple[int, ...] = (1,),
    ) -> Client:
        lead = (1,) if self.config.max_batch_size else ()
        array = np.full((*lead, *shape), value, np.int32)
        request = InferenceRequest(
            "m",
            {"IN": Tensor.from_numpy("IN", array)},
            lambda response, final: client.on_response(response, final),
            correlation_id=correlation_id,
            flags=flags,
            timeout_us=timeout_us,
        )
        client = Client(request)
        request.batch_size = len(lead)
        request.start_ns = request.queue_ns = self.clock.now_ns()
        request.on_release = self.released.append
        self.statistics.pending += 1
        try:
            self.batcher.enqueue(request)
        except NpuserveError:
            self.statistics.pending -= 1
            raise
        return client

    def running(self, instance: int = 0) -> list[InferenceRequest]:
        """Requests of the batch that the instance executes, fillers included."""
        self.clock.run()
        batches = self.instances[instance].batches
        return list(batches[0].requests) if batches else []

    def finish(self, instance: int = 0, **states: np.ndarray[Any, Any]) -> None:
        """The instance answers its oldest batch with OUT = IN."""
        batch = self.instances[instance].batches.pop(0)
        for request in batch.requests:
            outputs = [Tensor("OUT", "INT32", (1, 1), request.inputs["IN"].data)]
            outputs += [Tensor.from_numpy(name, value) for name, value in states.items()]
            batch.send(request, InferenceResponse(outputs))
        batch.done()
        self.clock.run()

    def run_all(self) -> None:
        while any(self.running(index) for index in range(len(self.instances))):
            for index in range(len(self.instances)):
                if self.running(index):
                    self.finish(index)


def number(request: InferenceRequest, name: str) -> int:
    return int(request.inputs[name].as_numpy().reshape(-1)[0])


def ids(requests: Sequence[InferenceRequest]) -> list[int | str | None]:
    return [None if each.filler else each.correlation_id for each in requests]


def oldest(extra: str = "", **kwargs: Any) -> Model:
    return Model(f"oldest {{ max_candidate_sequences: 8 {extra} }}", **kwargs)
