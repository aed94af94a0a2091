"""The ensemble scheduler against members that answer when the test says so."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st

from npuserve.errors import InternalError, NotFoundError, NpuserveError, StatusCode
from npuserve.model_config import ModelConfig
from npuserve.request import SEQUENCE_END, SEQUENCE_START, InferenceRequest
from npuserve.response import InferenceResponse
from npuserve.server.response_cache import LocalStore
from npuserve.server.schedulers.base import SchedulerContext
from npuserve.server.schedulers.ensemble import EnsembleScheduler
from npuserve.server.statistics import ModelStatistics
from npuserve.tensor import Tensor
from npuserve.testing.clock import FakeClock

Values = dict[str, float]


def config(text: str) -> ModelConfig:
    parsed: ModelConfig = text_format.Parse(text, ModelConfig())
    return parsed


def member_config(
    name: str, inputs: str, outputs: str, *, batch: int = 0, decoupled: bool = False
) -> ModelConfig:
    """A model with FP32 [1] tensors; an input whose name ends in ? is optional."""
    text = f'name: "{name}" max_batch_size: {batch}\n'
    for kind, names in (("input", inputs), ("output", outputs)):
        for each in names.split():
            optional = "optional: true" if each.endswith("?") else ""
            bare = each.rstrip("?")
            text += f'{kind} {{ name: "{bare}" data_type: TYPE_FP32 dims: 1 {optional} }}\n'
    if decoupled:
        text += "model_transaction_policy { decoupled: true }\n"
    return config(text)


def tensor(name: str, value: float, batched: bool = False) -> Tensor:
    shape = (1, 1) if batched else (1,)
    return Tensor.from_numpy(name, np.full(shape, value, np.float32))


def values(tensors: list[Tensor]) -> Values:
    return {each.name: float(each.as_numpy().reshape(-1)[0]) for each in tensors}


class Answers:
    """What a client sees of one request."""

    def __init__(self) -> None:
        self.responses: list[InferenceResponse] = []
        self.final: int = 0

    def __call__(self, response: InferenceResponse | None, final: bool) -> None:
        assert not self.final, "nothing comes after the final response"
        if response is not None:
            self.responses.append(response)
        self.final += final

    @property
    def outputs(self) -> list[Values]:
        return [values(response.outputs) for response in self.responses]

    @property
    def error(self) -> NpuserveError:
        assert self.final == 1
        assert self.responses[-1].error is not None
        return self.responses[-1].error


class Members:
    """Stands in for the server: keeps the requests of members until a test answers them."""

    def __init__(self, *configs: ModelConfig) -> None:
        self._configs = {each.name: each for each in configs}
        self.holds: Counter[str] = Counter()
        self.waiting: list[InferenceRequest] = []
        self.seen: list[InferenceRequest] = []
        self.at_once: dict[str, Callable[[Values], Values]] = {}

    def lookup(self, name: str, version: int) -> Any:
        if name not in self._configs:
            raise NotFoundError(f"Request for unknown model: '{name}' is not found")
        return SimpleNamespace(
            config=self._configs[name],
            labels=lambda output: [f"{name} {output}"],
            accept=self.accept,
            hold=lambda: self.holds.update([name]),
            let_go=lambda: self.holds.subtract([name]),
        )

    def accept(self, request: InferenceRequest) -> None:
        self.seen.append(request)
        function = self.at_once.get(request.model_name)
        if function is not None:
            self.answer(request, function(values(list(request.inputs.values()))))
        else:
            self.waiting.append(request)

    def unload(self, name: str) -> None:
        del self._configs[name]

    def take(self, name: str) -> InferenceRequest:
        """The request of this member that waits longest."""
        request = next(each for each in self.waiting if each.model_name == name)
        self.waiting.remove(request)
        return request

    def answer(
        self,
        request: InferenceRequest,
        outputs: Values | None,
        *,
        final: bool = True,
        parameters: Any = None,
    ) -> None:
        response = None
        if outputs is not None:
            batched = self._configs[request.model_name].max_batch_size > 0
            tensors = [tensor(name, value, batched) for name, value in outputs.items()]
            response = InferenceResponse(tensors, parameters=parameters)
        request.deliver(response, final)

    def fail(self, request: InferenceRequest, error: NpuserveError) -> None:
        request.deliver(InferenceResponse.from_error(error), True)


class Ensemble:
    """An ensemble scheduler with everything around it faked."""

    def __init__(self, text: str, *members: ModelConfig, cache: Any = None) -> None:
        self.members = Members(*members)
        self.statistics = ModelStatistics()
        self.clock = FakeClock()
        self.scheduler = EnsembleScheduler(
            SchedulerContext(
                name="e",
                version=1,
                config=config('name: "e" platform: "ensemble"\n' + text),
                model_dir=Path(),
                instances=None,  # type: ignore[arg-type]
                statistics=self.statistics,
                clock=self.clock,
                lookup=self.members.lookup,
                cache=cache,
            )
        )

    def infer(
        self, inputs: Values, outputs: tuple[str, ...] = (), **kwargs: Any
    ) -> tuple[InferenceRequest, Answers]:
        answers = Answers()
        request = InferenceRequest(
            "e",
            {name: tensor(name, value) for name, value in inputs.items()},
            answers,
            requested_outputs=outputs,
            **kwargs,
        )
        request.start_ns = request.queue_ns = self.clock.now_ns()
        self.statistics.pending += 1
        self.scheduler.enqueue(request)
        return request, answers


def io(kind: str, names: str) -> str:
    return "".join(
        f'{kind} {{ name: "{name.rstrip("?")}" data_type: TYPE_FP32 dims: 1 '
        f"optional: {str(name.endswith('?')).lower()} }}\n"
        if kind == "input"
        else f'{kind} {{ name: "{name}" data_type: TYPE_FP32 dims: 1 }}\n'
        for name in names.split()
    )


def step(model: str, inputs: str, outputs: str) -> str:
    """A step with maps given as "X=A Y=B"."""
    text = f'step {{ model_name: "{model}" model_version: -1 '
    for kind, pairs in (("input_map", inputs), ("output_map", outputs)):
        for pair in pairs.split():
            key, _, value = pair.partition("=")
            text += f'{kind} {{ key: "{key}" value: "{value}" }} '
    return text + "}\n"


def steps(*entries: str, extra: str = "") -> str:
    return f"ensemble_scheduling {{ {''.join(entries)} {extra} }}\n"


ONE = member_config("one", "X", "Y")
ADD = member_config("add", "X Y", "Z")
STREAM = member_config("stream", "X", "Y", decoupled=True)

CHAIN = (
    io("input", "A")
    + io("output", "MID END SIDE")
    + steps(
        step("one", "X=A", "Y=MID"), step("two", "X=MID", "Y=END"), step("three", "X=A", "Y=SIDE")
    )
)
CHAIN_MEMBERS = tuple(member_config(name, "X", "Y") for name in ("one", "two", "three"))


def test_a_step_starts_as_soon_as_its_tensors_are_there() -> None:
    """Independent steps run side by side, a dependent one after its producer."""
    ensemble = Ensemble(CHAIN, *CHAIN_MEMBERS)
    members = ensemble.members
    _, answers = ensemble.infer({"A": 1})
    assert sorted(each.model_name for each in members.waiting) == ["one", "three"]
    members.answer(members.take("one"), {"Y": 2})
    assert sorted(each.model_name for each in members.waiting) == ["three", "two"]
    members.answer(members.take("two"), {"Y": 3})
    assert answers.responses == []
    members.answer(members.take("three"), {"Y": 4})
    assert answers.final == 1
    assert answers.outputs == [{"MID": 2, "END": 3, "SIDE": 4}]


@pytest.mark.parametrize(
    ("outputs", "models"),
    [(("MID",), ["one"]), (("SIDE",), ["three"]), (("END", "SIDE"), ["one", "three", "two"])],
)
def test_any_subset_of_the_outputs_can_be_asked_for(
    outputs: tuple[str, ...], models: list[str]
) -> None:
    """Only the steps that are needed run, and only what was asked for comes."""
    ensemble = Ensemble(CHAIN, *CHAIN_MEMBERS)
    for name in ("one", "two", "three"):
        ensemble.members.at_once[name] = lambda given: {"Y": given["X"] + 1}
    _, answers = ensemble.infer({"A": 1}, outputs)
    assert sorted(each.model_name for each in ensemble.members.seen) == models
    assert set(answers.outputs[0]) == set(outputs)


def test_tensors_are_handed_on_without_a_copy() -> None:
    """The member sees the very buffer that the client's request brought."""
    ensemble = Ensemble(CHAIN, *CHAIN_MEMBERS)
    request, answers = ensemble.infer({"A": 1}, ("END",))
    members = ensemble.members
    first = members.take("one")
    assert first.inputs["X"].data is request.inputs["A"].data
    produced = tensor("Y", 5)
    first.deliver(InferenceResponse([produced]), True)
    second = members.take("two")
    assert second.inputs["X"].data is produced.data
    second.deliver(InferenceResponse([produced]), True)
    assert answers.responses[0].outputs[0].data is produced.data


def test_nothing_is_left_of_a_request_that_was_answered() -> None:
    """Buffers are freed by the last reference, not by the garbage collector."""
    ensemble = Ensemble(CHAIN, *CHAIN_MEMBERS)
    gc.disable()
    try:
        request, answers = ensemble.infer({"A": 1}, ("MID",))
        member = ensemble.members.take("one")
        ensemble.members.seen.clear()
        array = np.zeros(1, np.float32)
        watched = weakref.ref(array)
        member.deliver(InferenceResponse([Tensor.from_numpy("Y", array)]), True)
        assert answers.final
        del request, member, answers, array
        assert watched() is None
    finally:
        gc.enable()


def test_members_inherit_what_the_client_sent() -> None:
    """Id, sequence, priority, timeout and parameters reach every step."""
    ensemble = Ensemble(CHAIN, *CHAIN_MEMBERS)
    request, _ = ensemble.infer(
        {"A": 1},
        id="r",
        correlation_id="s",
        flags=SEQUENCE_START,
        priority=2,
        timeout_us=7,
        parameters={"k": 1},
    )
    member = ensemble.members.take("one")
    assert (member.id, member.correlation_id, member.flags) == ("r", "s", SEQUENCE_START)
    assert (member.priority, member.timeout_us, member.parameters) == (2, 7, {"k": 1})
    assert member.parent is request


def test_the_response_carries_the_sequence_parameters() -> None:
    """0 and false without a sequence, else the request's own."""
    ensemble = Ensemble(CHAIN, *CHAIN_MEMBERS)
    ensemble.members.at_once["one"] = lambda given: {"Y": 0}
    _, plain = ensemble.infer({"A": 1}, ("MID",))
    _, sequence = ensemble.infer({"A": 1}, ("MID",), correlation_id=5, flags=SEQUENCE_END)
    assert plain.responses[0].parameters == {
        "sequence_id": 0, "sequence_start": False, "sequence_end": False,
    }  # fmt: skip
    assert sequence.responses[0].parameters == {
        "sequence_id": 5, "sequence_start": False, "sequence_end": True,
    }  # fmt: skip


def test_a_member_can_change_the_sequence_of_the_steps_behind_it() -> None:
    """Response parameters replace id and flags for the tensors they come with."""
    ensemble = Ensemble(CHAIN, *CHAIN_MEMBERS)
    members = ensemble.members
    _, answers = ensemble.infer({"A": 1}, ("END",), correlation_id=5)
    parameters = {"sequence_id": 9, "sequence_start": True}
    members.answer(members.take("one"), {"Y": 1}, parameters=parameters)
    second = members.take("two")
    assert (second.correlation_id, second.flags) == (9, SEQUENCE_START)
    members.answer(second, {"Y": 1})
    assert answers.responses[0].parameters == {
        "sequence_id": 9, "sequence_start": True, "sequence_end": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"sequence_id": 1.5}, "expected parameter 'sequence_id' to be"),
        ({"sequence_start": 1}, "expect parameter 'sequence_start' to be"),
        ({"sequence_end": "x"}, "expect parameter 'sequence_end' to be"),
    ],
)
def test_sequence_parameters_of_a_wrong_type_are_an_error(
    parameters: dict[str, Any], text: str
) -> None:
    """The request fails with Triton's text."""
    ensemble = Ensemble(CHAIN, *CHAIN_MEMBERS)
    _, answers = ensemble.infer({"A": 1}, ("END",))
    member = ensemble.members.take("one")
    ensemble.members.answer(member, {"Y": 1}, parameters=parameters)
    assert f"in ensemble 'e', {text}" in str(answers.error)


def test_an_error_of_a_member_names_the_ensemble_and_stops_the_rest() -> None:
    """Same code, prefixed text; running steps are told, nothing new starts."""
    ensemble = Ensemble(CHAIN, *CHAIN_MEMBERS)
    members = ensemble.members
    _, answers = ensemble.infer({"A": 1})
    other = members.take("three")
    members.fail(members.take("one"), InternalError("broken"))
    assert answers.error.code is StatusCode.INTERNAL
    assert str(answers.error) == "in ensemble 'e', broken"
    assert other.cancelled
    members.answer(other, {"Y": 1})
    assert not members.waiting
    assert ensemble.statistics.failures["OTHER"] == 1


def test_a_member_that_is_gone_fails_the_request_with_its_error() -> None:
    """A member unloaded under the ensemble is a clear error to the requests concerned."""
    ensemble = Ensemble(CHAIN, *CHAIN_MEMBERS)
    ensemble.members.unload("two")
    _, answers = ensemble.infer({"A": 1}, ("END",))
    assert str(answers.error) == "in ensemble 'e', Request for unknown model: 'two' is not found"
    assert not ensemble.members.waiting
    assert not ensemble.members.holds.total()
    _, answers = ensemble.infer({"A": 1}, ("SIDE",))
    ensemble.members.answer(ensemble.members.take("three"), {"Y": 3})
    assert answers.outputs == [{"SIDE": 3}]


def test_a_request_keeps_the_members_it_began_with() -> None:
    """They are held until its final answer, so that one unloaded meanwhile still runs."""
    ensemble = Ensemble(CHAIN, *CHAIN_MEMBERS)
    members = ensemble.members
    _, answers = ensemble.infer({"A": 1}, ("END",))
    assert members.holds == {"one": 1, "two": 1}
    members.answer(members.take("one"), {"Y": 2})
    members.answer(members.take("two"), {"Y": 3})
    assert answers.outputs == [{"END": 3}]
    assert not members.holds.total()
    _, answers = ensemble.infer({"A": 1}, ("END",))
    members.fail(members.take("one"), InternalError("broken"))
    assert answers.error.code is StatusCode.INTERNAL
    assert not members.holds.total()


def test_cancellation_reaches_running_steps_and_starts_no_new_one() -> None:
    """The client gets CANCELLED once what runs has ended."""
    ensemble = Ensemble(CHAIN, *CHAIN_MEMBERS)
    members = ensemble.members
    request, answers = ensemble.infer({"A": 1}, ("END",))
    running = members.take("one")
    request.cancel()
    assert running.cancelled
    assert not answers.final
    members.answer(running, {"Y": 1})
    assert answers.error.code is StatusCode.CANCELLED
    assert not members.waiting
    assert ensemble.statistics.failures["CANCELED"] == 1


def test_outputs_have_the_labels_of_the_member_that_makes_them() -> None:
    """Classification of an ensemble's output needs no label file of its own."""
    ensemble = Ensemble(CHAIN, *CHAIN_MEMBERS)
    assert ensemble.scheduler.labels == {"MID": ["one Y"], "END": ["two Y"], "SIDE": ["three Y"]}


def test_statistics_count_the_ensemble_once() -> None:
    """One execution and one inference a request, whatever the number of steps."""
    ensemble = Ensemble(CHAIN, *CHAIN_MEMBERS)
    for name in ("one", "two", "three"):
        ensemble.members.at_once[name] = lambda given: {"Y": 0}
    for _ in range(3):
        ensemble.infer({"A": 1})
    statistics = ensemble.statistics
    assert (statistics.execution_count, statistics.inference_count) == (3, 3)
    assert (statistics.success.count, statistics.pending) == (3, 0)


def test_an_ensemble_can_answer_from_the_response_cache() -> None:
    """The steps do not run again, except for a request of a sequence."""
    ensemble = Ensemble(CHAIN, *CHAIN_MEMBERS, cache=LocalStore(10_000))
    ensemble.members.at_once["one"] = lambda given: {"Y": given["X"] + 1}
    answers = [ensemble.infer({"A": 1}, ("MID",), id=name)[1] for name in ("a", "b")]
    assert [each.outputs for each in answers] == [[{"MID": 2}]] * 2
    assert len(ensemble.members.seen) == 1
    statistics = ensemble.statistics
    assert (statistics.cache_hit.count, statistics.cache_miss.count) == (1, 1)
    assert (statistics.success.count, statistics.execution_count, statistics.pending) == (2, 1, 0)
    ensemble.infer({"A": 1}, ("MID",), correlation_id=3)
    assert len(ensemble.members.seen) == 2


OPTIONAL = (
    io("input", "A B?")
    + io("output", "C D")
    + steps(step("opt", "X=A Y=B", "P=t Q=C"), step("opt", "X=A Y=t", "P=D"))
)
OPT = member_config("opt", "X Y?", "P Q")


def test_optional_tensors_that_are_not_there_are_left_out() -> None:
    """An input the client left out and an output a model left out skip optional inputs."""
    ensemble = Ensemble(OPTIONAL, OPT)
    members = ensemble.members
    _, answers = ensemble.infer({"A": 1})
    first = members.take("opt")
    assert set(first.inputs) == {"X"}
    members.answer(first, {"Q": 4})
    second = members.take("opt")
    assert set(second.inputs) == {"X"}
    members.answer(second, {"P": 5})
    assert answers.outputs == [{"C": 4, "D": 5}]


def test_an_output_that_a_model_leaves_out_is_left_out_of_the_response() -> None:
    """The other outputs come."""
    ensemble = Ensemble(OPTIONAL, OPT)
    _, answers = ensemble.infer({"A": 1}, ("C",))
    ensemble.members.answer(ensemble.members.take("opt"), {"P": 5})
    assert answers.outputs == [{}]


def test_a_missing_tensor_that_a_step_needs_is_a_deadlock() -> None:
    """Triton's text, with the request's id."""
    ensemble = Ensemble(CHAIN, *CHAIN_MEMBERS)
    _, answers = ensemble.infer({"A": 1}, ("END",), id="r")
    ensemble.members.answer(ensemble.members.take("one"), {})
    assert str(answers.error) == (
        "in ensemble 'e', [request id: r] unexpected deadlock, at least one output is not set "
        "while no more ensemble steps can be made"
    )


def test_a_batch_dimension_is_added_and_stripped_between_members() -> None:
    """Members with and without a batch dimension can follow each other."""
    text = (
        io("input", "A")
        + io("output", "C")
        + steps(step("batching", "X=A", "Y=t"), step("plain", "X=t", "Y=C"))
    )
    ensemble = Ensemble(
        text, member_config("batching", "X", "Y", batch=4), member_config("plain", "X", "Y")
    )
    members = ensemble.members
    _, answers = ensemble.infer({"A": 1})
    first = members.take("batching")
    assert list(first.inputs["X"].shape) == [1, 1]
    members.answer(first, {"Y": 2})
    second = members.take("plain")
    assert list(second.inputs["X"].shape) == [1]
    members.answer(second, {"Y": 3})
    assert answers.outputs == [{"C": 3}]


STREAMING = (
    io("input", "A")
    + io("output", "C")
    + steps(step("stream", "X=A", "Y=t"), step("one", "X=A", "Y=u"), step("add", "X=t Y=u", "Z=C"))
)


def test_every_response_of_a_decoupled_step_goes_its_own_way() -> None:
    """Iterations share the tensors from before the decoupled step, even late ones."""
    ensemble = Ensemble(STREAMING, STREAM, ONE, ADD)
    members = ensemble.members
    _, answers = ensemble.infer({"A": 1})
    stream = members.take("stream")
    members.answer(stream, {"Y": 10}, final=False)
    assert [each.model_name for each in members.waiting] == ["one"]
    members.answer(members.take("one"), {"Y": 1})
    members.answer(stream, {"Y": 20}, final=False)
    members.answer(stream, None)
    adds = [members.take("add"), members.take("add")]
    assert [values(list(each.inputs.values())) for each in adds] == [
        {"X": 10, "Y": 1}, {"X": 20, "Y": 1},
    ]  # fmt: skip
    members.answer(adds[1], {"Z": 21})
    assert not answers.responses
    members.answer(adds[0], {"Z": 11})
    assert answers.final == 1
    assert answers.outputs == [{"C": 11}, {"C": 21}]


def test_a_decoupled_ensemble_may_end_without_a_response() -> None:
    """Only the final flag comes."""
    ensemble = Ensemble(STREAMING, STREAM, ONE, ADD)
    members = ensemble.members
    _, answers = ensemble.infer({"A": 1})
    members.answer(members.take("one"), {"Y": 1})
    members.answer(members.take("stream"), None)
    assert (answers.responses, answers.final) == ([], 1)


def test_a_slow_reader_slows_the_streaming_member_down() -> None:
    """Its wish for a pause reaches the decoupled steps, also those that start later."""
    text = (
        io("input", "A")
        + io("output", "C")
        + steps(step("one", "X=A", "Y=t"), step("stream", "X=t", "Y=C"))
    )
    ensemble = Ensemble(text, ONE, STREAM)
    members = ensemble.members
    request, _ = ensemble.infer({"A": 1})
    request.hold(True)
    first = members.take("one")
    assert not first.held
    members.answer(first, {"Y": 1})
    stream = members.take("stream")
    assert stream.held
    request.hold(False)
    assert not stream.held


def test_responses_of_a_stream_are_sent_at_once() -> None:
    """A response does not wait for the next one."""
    text = io("input", "A") + io("output", "C") + steps(step("stream", "X=A", "Y=C"))
    ensemble = Ensemble(text, STREAM)
    members = ensemble.members
    _, answers = ensemble.infer({"A": 1})
    stream = members.take("stream")
    for number in range(3):
        members.answer(stream, {"Y": number}, final=number == 2)
        assert answers.outputs[-1] == {"C": number}
    assert answers.final == 1


def test_the_limit_of_requests_in_flight_holds_over_all_requests() -> None:
    """Calls above the limit wait, and start in order as others end."""
    text = (
        io("input", "A")
        + io("output", "C")
        + steps(step("one", "X=A", "Y=C"), extra="max_inflight_requests: 2")
    )
    ensemble = Ensemble(text, ONE)
    members = ensemble.members
    runs = [ensemble.infer({"A": number}) for number in range(5)]
    assert len(members.waiting) == 2
    assert ensemble.scheduler.queued == 3
    runs[2][0].cancel()
    for _ in range(4):
        request = members.take("one")
        members.answer(request, {"Y": values(list(request.inputs.values()))["X"]})
    assert [answers.outputs for _, answers in runs if not answers.responses[0].error] == [
        [{"C": 0}], [{"C": 1}], [{"C": 3}], [{"C": 4}],
    ]  # fmt: skip
    assert runs[2][1].error.code is StatusCode.CANCELLED
    assert ensemble.scheduler.queued == 0


@pytest.mark.parametrize(
    ("behind", "pauses"),
    [pytest.param("one", True, id="another model"), pytest.param("stream", False, id="the same")],
)
def test_a_stream_pauses_while_the_step_behind_it_is_full(behind: str, pauses: bool) -> None:
    """So tensors do not pile up; but nothing waits for an instance that it pauses itself."""
    chain = (step("stream", "X=A", "Y=t"), step(behind, "X=t", "Y=C"))
    text = io("input", "A") + io("output", "C") + steps(*chain, extra="max_inflight_requests: 1")
    ensemble = Ensemble(text, STREAM, ONE)
    members = ensemble.members
    _, answers = ensemble.infer({"A": 0})
    stream = members.take("stream")
    members.answer(stream, {"Y": 1}, final=False)
    assert not stream.held
    members.answer(stream, {"Y": 2}, final=False)
    assert stream.held == pauses
    members.answer(members.take(behind), {"Y": 10})
    assert not stream.held
    members.answer(stream, None)
    members.answer(members.take(behind), {"Y": 20})
    assert answers.outputs == [{"C": 10}, {"C": 20}]
    assert answers.final == 1


def test_a_stopped_scheduler_refuses_new_requests() -> None:
    """Those it has go on."""
    ensemble = Ensemble(CHAIN, *CHAIN_MEMBERS)
    _, answers = ensemble.infer({"A": 1}, ("MID",))
    ensemble.scheduler.stop()
    with pytest.raises(NpuserveError, match="Server is stopping"):
        ensemble.infer({"A": 1})
    ensemble.members.answer(ensemble.members.take("one"), {"Y": 1})
    assert answers.final


def test_a_long_chain_that_answers_at_once_needs_no_deep_stack() -> None:
    """Members that answer while being submitted (cache hits) do not nest."""
    length = 2_000
    text = io("input", "t0") + io("output", f"t{length}")
    text += steps(*(step("one", f"X=t{n}", f"Y=t{n + 1}") for n in range(length)))
    ensemble = Ensemble(text, ONE)
    ensemble.members.at_once["one"] = lambda given: {"Y": given["X"] + 1}
    _, answers = ensemble.infer({"t0": 0})
    assert answers.outputs == [{f"t{length}": length}]


@given(st.data())
def test_random_graphs_give_what_direct_evaluation_gives(data: st.DataObject) -> None:
    """Whatever the graph, the outputs asked for and the order in which members answer."""
    count = data.draw(st.integers(1, 8), label="steps")
    tensors = ["A", "B"]
    entries, expected = [], {"A": 1.0, "B": 2.0}
    for number in range(count):
        left, right = (data.draw(st.sampled_from(tensors)) for _ in range(2))
        entries.append(step("add", f"X={left} Y={right}", f"Z=t{number}"))
        tensors.append(f"t{number}")
        expected[f"t{number}"] = expected[left] + 2 * expected[right]
    order = data.draw(st.permutations(entries), label="order in the configuration")
    names = [f"t{number}" for number in range(count)]
    text = io("input", "A B") + io("output", " ".join(names)) + steps(*order)
    ensemble = Ensemble(text, ADD)
    wanted = data.draw(st.lists(st.sampled_from(names), unique=True), label="outputs")
    _, answers = ensemble.infer({"A": 1, "B": 2}, tuple(wanted))
    members = ensemble.members
    while members.waiting:
        request = members.waiting.pop(data.draw(st.integers(0, len(members.waiting) - 1)))
        given = values(list(request.inputs.values()))
        members.answer(request, {"Z": given["X"] + 2 * given["Y"]})
    assert answers.outputs == [{name: expected[name] for name in wanted or names}]
    assert len(members.seen) <= count


@given(st.data())
def test_random_streaming_graphs_give_one_response_per_iteration_in_order(
    data: st.DataObject,
) -> None:
    """Steps before, behind and beside a decoupled one, answering in any order."""
    tensors = ["A", "B"]
    entries: list[str] = []
    formulas: list[tuple[str, str, str]] = []
    streaming = data.draw(st.integers(0, 3), label="position of the decoupled step")
    for number in range(5):
        name = f"t{number}"
        if number == streaming:
            source = data.draw(st.sampled_from(tensors))
            entries.append(step("stream", f"X={source}", f"Y={name}"))
            formulas.append(("stream", source, name))
            tensors.append(name)
            continue
        left, right = (data.draw(st.sampled_from(tensors)) for _ in range(2))
        entries.append(step("add", f"X={left} Y={right}", f"Z={name}"))
        formulas.append((left, right, name))
        tensors.append(name)
    names = [f"t{number}" for number in range(5)]
    wanted = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    wanted = sorted({*wanted, f"t{streaming}"})
    ensemble = Ensemble(
        io("input", "A B") + io("output", " ".join(names)) + steps(*entries), ADD, STREAM
    )
    _, answers = ensemble.infer({"A": 1, "B": 2}, tuple(wanted))
    iterations = data.draw(st.integers(0, 4), label="iterations")
    members = ensemble.members
    sent: dict[int, int] = {}
    while members.waiting:
        request = members.waiting[data.draw(st.integers(0, len(members.waiting) - 1))]
        given_values = values(list(request.inputs.values()))
        if request.model_name == "add":
            members.waiting.remove(request)
            members.answer(request, {"Z": given_values["X"] + 2 * given_values["Y"]})
            continue
        count = sent.get(id(request), 0)
        if count == iterations:
            members.waiting.remove(request)
            members.answer(request, None)
        else:
            sent[id(request)] = count + 1
            members.answer(request, {"Y": given_values["X"] + 100 * (count + 1)}, final=False)
    assert answers.final == 1
    expected = []
    for iteration in range(1, iterations + 1):
        known = {"A": 1.0, "B": 2.0}
        for left, right, name in formulas:
            streamed = left == "stream"
            known[name] = (
                known[right] + 100 * iteration if streamed else (known[left] + 2 * known[right])
            )
        expected.append({name: known[name] for name in wanted})
    assert answers.outputs == expected


def test_a_decoupled_step_may_follow_a_decoupled_step() -> None:
    """Every response of the first one starts the second one, which answers as often as it likes."""
    text = (
        io("input", "A")
        + io("output", "C D")
        + steps(step("stream", "X=A", "Y=C"), step("stream", "X=C", "Y=D"))
    )
    ensemble = Ensemble(text, STREAM)
    members = ensemble.members
    _, answers = ensemble.infer({"A": 1})
    outer = members.take("stream")
    for number in (10, 20):
        members.answer(outer, {"Y": number}, final=number == 20)
    for base in (10, 20):
        inner = members.take("stream")
        members.answer(inner, {"Y": base + 1}, final=False)
        members.answer(inner, {"Y": base + 2}, final=False)
        members.answer(inner, None)
    assert answers.final == 1
    assert answers.outputs == [
        {"C": 10, "D": 11}, {"C": 10, "D": 12}, {"C": 20, "D": 21}, {"C": 20, "D": 22},
    ]  # fmt: skip
