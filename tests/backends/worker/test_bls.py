"""Models that call other models, load them, and keep metrics, in a process and in a thread."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from npuserve.options import TraceOptions
from tests.backends.worker.models import (
    CONFIG,
    DECOUPLED,
    STREAM,
    Models,
    parameter,
    served,
    served_model,
    write_model,
)

pytestmark = pytest.mark.parametrize("execution", ["process", "thread"])

DOUBLE = """
class TritonPythonModel:
    def execute(self, requests):
        if requests[0].request_id() == "fail":
            raise ValueError("no")
        return [response(tensor(r).as_numpy() * 2) for r in requests]
"""


CALLER = """
def make(request, target, **options):
    x = pb_utils.Tensor("IN", tensor(request).as_numpy())
    return pb_utils.InferenceRequest(
        model_name=target, requested_output_names=["OUT"], inputs=[x], **options)

def outcome(answer):
    if answer.has_error():
        return answer.error().message()
    return [t.as_numpy().tolist() for t in answer.output_tensors()]

def report(value):
    return response(np.array([json.dumps(value)], object))
"""

SYNC = (
    CALLER
    + """
class TritonPythonModel:
    def execute(self, requests):
        out = []
        for r in requests:
            how, _, target = r.request_id().partition(":")
            out.append(report(getattr(self, how)(r, target)))
        return out

    def call(self, r, target):
        return outcome(make(r, target).exec())

    def failing(self, r, target):
        return outcome(make(r, target, request_id="fail").exec())

    def unexpected(self, r, target):
        x = pb_utils.Tensor("IN", tensor(r).as_numpy())
        return outcome(pb_utils.InferenceRequest(
            model_name=target, requested_output_names=["OUT", "NO"], inputs=[x]).exec())

    def twice(self, r, target):
        x = pb_utils.Tensor("IN", tensor(r).as_numpy())
        return outcome(pb_utils.InferenceRequest(
            model_name=target, requested_output_names=["OUT"], inputs=[x, x]).exec())

    def stream(self, r, target):
        return [outcome(a) for a in make(r, target).exec(decoupled=True)]

    def total(self, r, target):
        answer = make(r, target).exec()
        return float(answer.output_tensors()[0].as_numpy().sum())

    def own_loop(self, r, target):
        import asyncio
        async def both():
            return await asyncio.gather(make(r, target).async_exec(), make(r, target).async_exec())
        return [outcome(a) for a in asyncio.run(both())]

    def ready(self, r, target):
        facts = [pb_utils.is_model_ready(target), pb_utils.is_model_ready("nobody")]
        try:
            pb_utils.is_model_ready(target, "x")
        except pb_utils.TritonModelException as error:
            facts.append(str(error))
        return facts

    def load(self, r, target):
        pb_utils.load_model(target)
        return pb_utils.is_model_ready(target)

    def load_unknown(self, r, target):
        try:
            pb_utils.load_model(target)
        except pb_utils.TritonModelException as error:
            return str(error)
"""
)

ASYNC = (
    CALLER
    + """
import asyncio

class TritonPythonModel:
    async def execute(self, requests):
        out = []
        for r in requests:
            how, _, target = r.request_id().partition(":")
            out.append(report(await getattr(self, how)(r, target)))
        return out

    async def call(self, r, target):
        return outcome(await make(r, target).async_exec())

    async def blocking(self, r, target):
        return outcome(make(r, target).exec())

    async def stream(self, r, target):
        return [outcome(a) async for a in await make(r, target).async_exec(decoupled=True)]

    async def plain_for(self, r, target):
        return [outcome(a) for a in await make(r, target).async_exec(decoupled=True)]

    async def two_streams(self, r, target):
        return await asyncio.gather(self.plain_for(r, target), self.plain_for(r, target))
"""
)

# Answers its requests two by two.
PAIRS = """
class TritonPythonModel:
    def initialize(self, args):
        self.waiting = []

    def execute(self, requests):
        self.waiting += [r.get_response_sender() for r in requests]
        if len(self.waiting) == 2:
            while self.waiting:
                self.waiting.pop().send(response(np.ones(1, np.float32)), flags=1)
"""

TRACED = (
    CALLER
    + """
class TritonPythonModel:
    def execute(self, requests):
        answers = [make(r, "double", trace=r.trace()).exec() for r in requests]
        return [report([a.has_error(), r.trace().get_context()]) for a, r in zip(answers, requests)]
"""
)


@pytest.fixture
def repository(tmp_path: Path, execution: str) -> Path:
    """A model that calls, `sync`, its async twin, and models to be called."""
    for name, code in (("sync", SYNC), ("async", ASYNC), ("double", DOUBLE)):
        write_model(tmp_path, name, code)
    write_model(tmp_path, "repeat", STREAM, DECOUPLED)
    return tmp_path


async def _ask(models: Models, caller: str, what: str, values: object = (1, 2)) -> object:
    call = await models.infer(caller, {"IN": np.array(values, np.float32)}, id=what)
    return json.loads(call.text)


async def test_calls(repository: Path, execution: str) -> None:
    """exec, async_exec, their decoupled forms, errors and readiness."""
    async with served(repository, execution) as models:
        for caller, what, expected in (
            ("sync", "call:double", [[2, 4]]),
            ("sync", "stream:repeat", [[[1]], [[2]], []]),
            ("sync", "stream:double", [[[2, 4]]]),
            ("sync", "own_loop:double", [[[2, 4]]] * 2),
            ("async", "call:double", [[2, 4]]),
            ("async", "blocking:double", [[2, 4]]),
            ("async", "stream:repeat", [[[1]], [[2]], []]),
            (
                "sync", "call:nobody",
                "Model nobody - Error when running inference: Failed for execute the inference "
                "request. Model 'nobody' is not ready.",
            ),
            (
                "sync", "ready:double",
                [True, False, "Failed to check model readiness: failed to get model version from "
                 "specified version string 'x' (details: stol), version should be an integral "
                 "value > 0"],
            ),
        ):  # fmt: skip
            assert await _ask(models, caller, what) == expected, what
        failed = await _ask(models, "sync", "failing:double")
        assert str(failed).startswith("Failed to process the request(s) for model")
        strange = await _ask(models, "sync", "unexpected:double")
        assert strange == (
            "Model double - Error when running inference: unexpected inference output 'NO' for "
            "model 'double'"
        )
        assert await _ask(models, "sync", "twice:double") == (
            "Model double - Error when running inference: input 'IN' already exists in request"
        )
        refused = await _ask(models, "sync", "call:repeat")
        assert "Please use 'decoupled=True' argument" in str(refused)


async def test_async_exec_waits_for_the_first_of_many_responses(
    repository: Path, execution: str
) -> None:
    """A plain `for` over the responses keeps no other task of the model from its own request."""
    write_model(repository, "pairs", PAIRS, DECOUPLED)
    async with served(repository, execution) as models:
        assert await _ask(models, "async", "plain_for:repeat") == [[[1]], [[2]], []]
        assert await _ask(models, "async", "two_streams:pairs") == [[[[1]]]] * 2


async def test_large_tensors_cross_both_ways(repository: Path, execution: str) -> None:
    """A call with megabytes in and out gives the right sum, and nothing stays lent."""
    async with served(repository, execution) as models:
        for _ in range(3):
            values = np.ones(500_000, np.float32)
            assert await _ask(models, "sync", "total:double", values) == 1_000_000.0
        if execution == "process":
            for name in ("sync", "double"):
                link = models.instance(name)._connection.link
                assert link.lent_count <= 1  # the last one comes back with the next batch


async def test_model_that_calls_itself_gets_an_error(repository: Path, execution: str) -> None:
    """With one instance the call could never be answered: an error at once, and service goes on."""
    async with served(repository, execution) as models:
        answer = await _ask(models, "sync", "call:sync")
        assert "could never be answered" in str(answer)
        assert await _ask(models, "sync", "call:double") == [[2, 4]]


@pytest.mark.parametrize("decoupled", [True, False])
async def test_overlapping_model_that_blocks_on_itself(
    tmp_path: Path, execution: str, decoupled: bool
) -> None:
    """A decoupled or async model that waits within execute for itself gets an error as well."""
    if decoupled:
        model = """
class TritonPythonModel:
    def execute(self, requests):
        for r in requests:
            (answer,) = make(r, "m").exec(decoupled=True)
            sender = r.get_response_sender()
            sender.send(report(outcome(answer)))
            sender.send(flags=1)
"""
    else:
        model = """
class TritonPythonModel:
    count = 0

    async def execute(self, requests):
        self.count += 1
        return [report([self.count, outcome(make(r, "m").exec())]) for r in requests]
"""
    write_model(tmp_path, "m", CALLER + model, DECOUPLED if decoupled else CONFIG)
    async with served(tmp_path, execution) as models:
        answers = [str((await models.infer()).text) for _ in range(3)]
    assert ["could never be answered" in answer for answer in answers] == [True] * 3
    if not decoupled:  # the calls that were refused were not executed after all
        assert [json.loads(answer)[0] for answer in answers] == [1, 2, 3]


OWN_LOOP = """
import asyncio

class TritonPythonModel:
    def execute(self, requests):
        for r in requests:
            sender = r.get_response_sender()
            sender.send(report([outcome(a) for a in asyncio.run(self.ask(r))]))
            sender.send(flags=1)

    async def ask(self, r):
        other = make(r, "double").async_exec()
        (answer,) = [a async for a in await make(r, "m").async_exec(decoupled=True)]
        return [answer, await other]
"""


async def test_model_that_awaits_itself_in_its_own_loop(tmp_path: Path, execution: str) -> None:
    """A decoupled model that runs asyncio within execute is as occupied as one that blocks."""
    write_model(tmp_path, "m", CALLER + OWN_LOOP, DECOUPLED)
    write_model(tmp_path, "double", DOUBLE)
    async with served(tmp_path, execution) as models:
        for _ in range(2):
            call = await models.infer("m", {"IN": np.array([1, 2], np.float32)})
            itself, other = json.loads(call.text)
            assert "could never be answered" in itself
            assert other == [[2, 4]]


ITERATES = (
    CALLER
    + """
def lengths(answers):
    return [a.error().message() if a.has_error() else len(a.output_tensors()) for a in answers]

class TritonPythonModel:
    def execute(self, requests):
        for r in requests:
            answers = [] if r.request_id() == "leaf" else make(r, "inner").exec(decoupled=True)
            r.get_response_sender().send(report(lengths(answers)), flags=1)
"""
)

CALLS_BACK = (
    CALLER
    + """
class TritonPythonModel:
    def execute(self, requests):
        for r in requests:
            sender = r.get_response_sender()
            sender.send(report("first"))
            (answer,) = make(r, "m", request_id="leaf").exec(decoupled=True)
            if answer.has_error():
                sender.send(pb_utils.InferenceResponse(error=answer.error()), flags=1)
            else:
                sender.send(report("second"), flags=1)
"""
)


@pytest.mark.parametrize("count", [1, 2])
async def test_model_that_is_called_back_between_two_responses(
    tmp_path: Path, execution: str, count: int
) -> None:
    """Waiting for the second response occupies an instance as waiting for the first one does."""
    instances = DECOUPLED.replace("KIND_CPU", f"KIND_CPU count: {count}")
    write_model(tmp_path, "m", ITERATES, instances)
    write_model(tmp_path, "inner", CALLS_BACK, DECOUPLED)
    async with served(tmp_path, execution) as models:
        for _ in range(2):
            first, second = json.loads((await models.infer("m")).text)
            assert first == 1
            if count == 1:
                assert "could never be answered" in second
            else:
                assert second == 1


BACK = (
    CALLER
    + """
class TritonPythonModel:
    def execute(self, requests):
        return [report(self.ask(r)) for r in requests]

    def ask(self, r):
        other = "b" if pb_utils.get_model_dir().split("/")[-2] == "a" else "a"
        answer = make(r, other).exec()
        if answer.has_error():
            return answer.error().message()
        return json.loads(answer.output_tensors()[0].as_numpy()[0])
"""
)


async def test_circle_through_a_model_with_a_free_instance(tmp_path: Path, execution: str) -> None:
    """The free instance of b is of no use to a, which waits for the one that calls it back."""
    write_model(tmp_path, "a", BACK)
    write_model(tmp_path, "b", BACK, CONFIG.replace("KIND_CPU", "KIND_CPU count: 3"))
    async with served(tmp_path, execution) as models:
        for _ in range(2):
            assert "could never be answered" in (await models.infer("a")).text


COUNTS_DOWN = (
    CALLER
    + """
class TritonPythonModel:
    async def execute(self, requests):
        return [report(await self.one(r)) for r in requests]

    async def one(self, r):
        (left,) = tensor(r).as_numpy()
        if not left:
            return 0
        x = pb_utils.Tensor("IN", np.array([left - 1], np.float32))
        answer = await pb_utils.InferenceRequest(
            model_name="m", requested_output_names=["OUT"], inputs=[x]).async_exec()
        if answer.has_error():
            return answer.error().message()
        return json.loads(answer.output_tensors()[0].as_numpy()[0])
"""
)


@pytest.mark.parametrize("limit", [2, 3])
async def test_async_model_all_batches_of_which_await_it(
    tmp_path: Path, execution: str, limit: int
) -> None:
    """A chain of calls that is longer than batches may overlap cannot be answered, others can."""
    write_model(tmp_path, "m", COUNTS_DOWN, CONFIG + parameter("async_batches", str(limit)))
    async with served(tmp_path, execution) as models:
        deep = {"IN": np.array([limit], np.float32)}
        answers = await asyncio.gather(*(models.infer("m", deep) for _ in range(4)))
        assert all("could never be answered" in answer.text for answer in answers)
        fits = {"IN": np.array([limit - 1], np.float32)}
        assert (await models.infer("m", fits)).text == "0"


async def test_model_loads_another(repository: Path, execution: str) -> None:
    """load_model works in explicit mode, and its failures have Triton's prefix."""
    async with served(
        repository, execution, model_control_mode="explicit", load_model=("sync",)
    ) as models:
        assert await _ask(models, "sync", "load:double") is True
        assert await _ask(models, "sync", "call:double") == [[2, 4]]
        failure = await _ask(models, "sync", "load_unknown:nobody")
        assert str(failure).startswith("Failed to load model: ")


async def test_call_continues_the_trace(tmp_path: Path, execution: str) -> None:
    """A request made with trace=request.trace() is traced below the one it serves."""
    write_model(tmp_path, "traced", TRACED)
    write_model(tmp_path, "double", DOUBLE)
    file = tmp_path / "trace.json"
    settings = TraceOptions(level=("TIMESTAMPS",), rate=1, file=str(file))
    async with served(tmp_path, execution, trace_config=settings) as models:
        assert json.loads((await models.infer("traced")).text) == [False, None]
    parts = json.loads(file.read_text())
    ids = {part["model_name"]: part for part in parts if "model_name" in part}
    assert ids["double"]["parent_id"] == ids["traced"]["id"]


async def test_calls_outside_execute_are_refused(tmp_path: Path, execution: str) -> None:
    """BLS in initialize fails the load with Triton's text."""
    code = (
        CALLER
        + """
class TritonPythonModel:
    def initialize(self, args):
        x = pb_utils.Tensor("IN", np.ones(1, np.float32))
        pb_utils.InferenceRequest(model_name="m", requested_output_names=[], inputs=[x]).exec()
"""
    )
    async with served_model(tmp_path, code, execution=execution) as models:
        (entry,) = await models.server.repository_index()
    assert "BLS is only supported during the 'execute' function." in entry.reason


METRICS = """
class TritonPythonModel:
    def initialize(self, args):
        self.family = pb_utils.MetricFamily(
            name="jobs_total", description="jobs", kind=pb_utils.MetricFamily.COUNTER)
        self.metric = self.family.Metric(labels={"m": "a"})
        self.gauges = pb_utils.MetricFamily(
            name="level", description="a level", kind=pb_utils.MetricFamily.GAUGE)
        self.gauge = self.gauges.Metric(labels={})
        self.histograms = pb_utils.MetricFamily(
            name="sizes", description="sizes", kind=pb_utils.MetricFamily.HISTOGRAM)
        self.histogram = self.histograms.Metric(buckets=[1, 2])

    def execute(self, requests):
        self.metric.increment(2)
        self.gauge.set(float("nan"))
        nothing = self.gauge.value()
        self.gauge.set(-4.5)
        texts = [str(nothing)]
        for wrong in (lambda: self.metric.increment(-1), lambda: self.metric.set(1),
                      lambda: self.gauge.observe(1), lambda: self.histogram.increment(1)):
            try:
                wrong()
            except pb_utils.TritonModelException as error:
                texts.append(str(error))
        value = [self.metric.value(), self.gauge.value(), texts]
        return [response(np.array([json.dumps(value)], object)) for _ in requests]
"""


async def test_custom_metrics(tmp_path: Path, execution: str) -> None:
    """Metrics of a model are scraped until it is unloaded, and misuse has Triton's texts."""
    async with served_model(tmp_path, METRICS, execution=execution) as models:
        await models.infer()
        first, second, texts = json.loads((await models.infer()).text)
        assert (first, second) == (4, -4.5)
        counter, gauge, histogram = (
            f"TRITONSERVER_METRIC_KIND_{kind}" for kind in ("COUNTER", "GAUGE", "HISTOGRAM")
        )
        assert texts == [
            "nan",
            f"Failed to increment metric value: {counter} can only be incremented monotonically by "
            "non-negative values.",
            f"Failed to set metric value: {counter} does not support Set",
            f"Failed to observe metric value: {gauge} does not support Observe",
            f"Failed to increment metric value: {histogram} does not support Increment",
        ]
        assert 'jobs_total{m="a"} 4.0' in _scrape(models)
    assert "jobs_total{" not in _scrape(models)


def _scrape(models: Models) -> str:
    registry = CollectorRegistry()

    class _Adapter(Collector):
        def collect(self):  # type: ignore[no-untyped-def]
            yield from models.server.custom_metrics.collect()

    registry.register(_Adapter())
    return generate_latest(registry).decode()


async def test_async_batches_overlap(tmp_path: Path, execution: str) -> None:
    """Requests of an async model run at the same time."""
    code = """
    import asyncio

    class TritonPythonModel:
        def initialize(self, args):
            self.waiting = 0
            self.all_here = None

        async def execute(self, requests):
            self.all_here = self.all_here or asyncio.Event()
            self.waiting += 1
            if self.waiting == 3:
                self.all_here.set()
            await self.all_here.wait()
            return [response(tensor(r).as_numpy()) for r in requests]
    """
    async with served_model(tmp_path, code, execution=execution) as models:
        await asyncio.gather(*(models.infer() for _ in range(3)))


async def test_odd_arguments_are_errors(tmp_path: Path, execution: str) -> None:
    """What the server cannot make anything of raises in the model, which goes on."""
    code = """
    def calls():
        kind = pb_utils.MetricFamily.GAUGE
        yield lambda: pb_utils.MetricFamily(name=5, description="", kind=kind)
        yield lambda: pb_utils.is_model_ready(5)
        yield lambda: pb_utils.is_model_ready("m", 1)
        yield lambda: pb_utils.unload_model(5)
        yield lambda: pb_utils.load_model("m", config=5)
        yield lambda: pb_utils.load_model("m", files={1: 2})
        yield lambda: pb_utils.load_model("m", config="{}", files={"file:1/model.py": "text"})

    class TritonPythonModel:
        def execute(self, requests):
            kinds = []
            for call in calls():
                try:
                    call()
                except (TypeError, pb_utils.TritonModelException) as error:
                    kinds.append(type(error).__name__)
            return [response(np.array([len(kinds)], np.float32)) for _ in requests]
    """
    write_model(tmp_path, "m", code)
    async with served(
        tmp_path, execution, model_control_mode="explicit", load_model=("m",)
    ) as models:
        assert (await models.infer()).value == [7.0]


SHOWS_ITSELF = """
class TritonPythonModel:
    def execute(self, requests):
        return [response(np.array([json.dumps([
            r.request_id(), r.correlation_id(), r.flags(), r.timeout(), sorted(
                json.loads(r.parameters()).items()),
            [t.name() for t in r.inputs()]])], object)) for r in requests]
"""

FROM_NUMPY = (
    CALLER
    + """
import enum

class Flags(enum.IntFlag):
    START = 1

class TritonPythonModel:
    def execute(self, requests):
        text = np.str_
        answer = pb_utils.InferenceRequest(
            request_id=text("id"), correlation_id=text("seq"), model_name=text("target"),
            model_version=np.int64(1), flags=Flags.START, timeout=np.uint32(7),
            requested_output_names=[text("OUT")],
            inputs=[pb_utils.Tensor(text("IN"), np.ones(1, np.float32))],
            parameters={text("a"): text("b"), "n": -(2**63)}).exec()
        (shown,) = answer.output_tensors()
        ready = pb_utils.is_model_ready(text("target"), text("1"))
        return [report([json.loads(shown.as_numpy()[0]), ready]) for _ in requests]
"""
)


async def test_values_of_numpy_and_enumerations(tmp_path: Path, execution: str) -> None:
    """Text and numbers of derived types arrive as what they stand for."""
    write_model(tmp_path, "m", FROM_NUMPY)
    write_model(tmp_path, "target", SHOWS_ITSELF)
    async with served(tmp_path, execution) as models:
        assert json.loads((await models.infer()).text) == [
            ["id", "seq", 1, 7, [["a", "b"], ["n", -(2**63)]], ["IN"]],
            True,
        ]
