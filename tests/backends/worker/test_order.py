"""What a thread of a model does in a row reaches the server in that order, in both executions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npuserve.request import InferenceRequest
from npuserve.response import InferenceResponse
from npuserve.tensor import Tensor
from tests.backends.worker.models import CONFIG, DECOUPLED, Models, served, write_model

# A program is a list of steps. Step i of program p is known by the number 1000 * p + i wherever it
# shows up in the server.
STEPS = """
class Steps:
    def __init__(self, request):
        self.request = request
        parameters = json.loads(request.parameters())
        self.program = parameters["program"].split()
        self.number = parameters["number"]
        self.started = []

    def run(self):
        for step in self.program:
            getattr(self, step)(self.number)
            self.number += 1
        for answers in self.started:
            list(answers)

    def send(self, number):
        self.request.get_response_sender().send(response(np.array([number], np.float32)))

    def final(self, number):
        self.request.get_response_sender().send(response(np.array([number], np.float32)), flags=1)

    def call(self, number):
        x = pb_utils.Tensor("IN", np.ones(1, np.float32))
        return pb_utils.InferenceRequest(request_id=str(number), model_name="inner",
            requested_output_names=["OUT"], inputs=[x])

    def exec(self, number):
        assert not self.call(number).exec().has_error()

    def start(self, number):
        self.started.append(self.call(number).exec(decoupled=True))

    def log(self, number):
        pb_utils.Logger.log_warn(str(number))

    def metric(self, number):
        gauge.set(number)

    def load(self, number):
        try:
            pb_utils.load_model(str(number))
        except pb_utils.TritonModelException:
            return
        assert False

    def unload(self, number):
        pb_utils.unload_model(str(number))

    def ready(self, number):
        assert not pb_utils.is_model_ready(str(number))

family = pb_utils.MetricFamily("steps", "steps", pb_utils.MetricFamily.GAUGE)
gauge = family.Metric({"model": pb_utils.get_model_dir()})
"""

PLAIN = (
    STEPS
    + """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            Steps(request).run()
"""
)

THREADS = (
    STEPS
    + """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=Steps(request).run).start()
"""
)

ASYNC = (
    STEPS
    + """
import asyncio

class TritonPythonModel:
    async def execute(self, requests):
        for request in requests:
            await asyncio.to_thread(Steps(request).run)
"""
)

INNER = """
class TritonPythonModel:
    def execute(self, requests):
        return [response(tensor(r).as_numpy()) for r in requests]
"""


class _Record(logging.Handler):
    """The numbers of all steps, in the order in which the server sees them.

    Args:
        count: how many there will be.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self.numbers: list[int] = []
        self.complete = asyncio.Event()
        self._count = count
        self._loop = asyncio.get_running_loop()

    def note(self, number: int) -> None:
        """A step was seen; in any thread."""
        self.numbers.append(number)
        if len(self.numbers) == self._count:
            self._loop.call_soon_threadsafe(self.complete.set)

    def emit(self, record: logging.LogRecord) -> None:
        """A line of the model's log."""
        self.note(int(record.getMessage()))

    def before(
        self, function: Callable[..., Any], number: Callable[..., Any]
    ) -> Callable[..., Any]:
        """The function, which notes a number that its arguments give."""

        def noted(*args: Any) -> Any:
            self.note(int(number(*args)))
            return function(*args)

        return noted


@contextmanager
def recorded(models: Models, count: int) -> Iterator[_Record]:
    """Everything that models ask of the server."""
    record, server = _Record(count), models.server
    with (
        patch.object(server, "infer", record.before(server.infer, lambda request: request.id)),
        patch.object(server, "load_model", record.before(server.load_model, lambda *a: a[0])),
        patch.object(server, "unload_model", record.before(server.unload_model, lambda *a: a[0])),
        patch.object(server, "model_ready", record.before(server.model_ready, lambda *a: a[0])),
        patch.object(
            server.custom_metrics,
            "set",
            record.before(server.custom_metrics.set, lambda _, value: value),
        ),
    ):
        loggers = [logging.getLogger(f"npuserve.model.{name}") for name in KINDS]
        for logger in loggers:
            logger.addHandler(record)
        try:
            yield record
        finally:
            for logger in loggers:
                logger.removeHandler(record)


async def run(models: Models, programs: list[tuple[str, list[str]]]) -> list[int]:
    """Run programs side by side, each on the model it names; gives the steps as they were seen."""
    futures = []
    infer = models.server.infer
    with recorded(models, sum(len(program) for _, program in programs)) as record:
        for index, (name, program) in enumerate(programs):
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            futures.append(done)

            def on_response(
                response: InferenceResponse | None, final: bool, done: Any = done
            ) -> None:
                assert response is not None
                if response.error is not None:
                    done.set_exception(response.error)
                    return
                record.note(int(response.outputs[0].as_numpy()[0]))
                if final:
                    done.set_result(None)

            x = Tensor.from_numpy("IN", np.ones(1, np.float32))
            parameters: Any = {"program": " ".join(program), "number": 1000 * index}
            infer(InferenceRequest(name, {"IN": x}, on_response, parameters=parameters))
        async with asyncio.timeout(10):
            await asyncio.gather(*futures)
            await record.complete.wait()  # steps behind a final response go on after it
    return record.numbers


KINDS = {
    "plain": (PLAIN, CONFIG),
    "decoupled": (PLAIN, DECOUPLED),
    "threads": (THREADS, DECOUPLED),
    "async": (ASYNC, CONFIG),
    "async_decoupled": (ASYNC, DECOUPLED),
}

others = st.sampled_from(["exec", "start", "log", "metric", "load", "unload", "ready"])


@st.composite
def programs_of(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A model and what it is to do."""
    name = draw(st.sampled_from(sorted(KINDS)))
    step = others if KINDS[name][1] is CONFIG else others | st.just("send")
    before, after = draw(st.lists(step, max_size=12)), draw(st.lists(others, max_size=3))
    return name, [*before, "final", *after]


@pytest.mark.parametrize("execution", ["process", "thread"])
async def test_the_server_sees_what_a_thread_does_in_its_order(
    tmp_path: Path, execution: str
) -> None:
    """Responses, calls, log lines, metrics and model control, whatever other threads do."""
    for name, (code, config) in KINDS.items():
        write_model(tmp_path, name, code, config)
    write_model(tmp_path, "inner", INNER)
    async with served(tmp_path, execution, model_control_mode="explicit", load_model=("*",)) as m:
        loop = asyncio.get_running_loop()

        @given(st.lists(programs_of(), min_size=1, max_size=4))
        def check(programs: list[tuple[str, list[str]]]) -> None:
            seen = asyncio.run_coroutine_threadsafe(run(m, programs), loop).result()
            for index, (_, program) in enumerate(programs):
                own = [number for number in seen if number // 1000 == index]
                assert own == [1000 * index + i for i in range(len(program))]

        await asyncio.to_thread(check)
