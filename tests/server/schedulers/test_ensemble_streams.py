"""Ensembles with decoupled members, against members that answer when the test says so."""

from __future__ import annotations

from typing import Any

import pytest

from npuserve.errors import StatusCode, UnavailableError
from tests.server.schedulers.ensemble_driver import (
    ADD,
    ONE,
    STREAM,
    Ensemble,
    io,
    step,
    steps,
    values,
)

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


def one_at_a_time() -> Ensemble:
    """A stream whose responses go through a gate to the step behind it."""
    chain = (step("stream", "X=A", "Y=t"), step("one", "X=t", "Y=C"))
    text = io("input", "A") + io("output", "C") + steps(*chain, extra="max_inflight_requests: 1")
    return Ensemble(text, STREAM, ONE)


def test_a_call_that_leaves_a_gate_and_is_answered_at_once_ends_nothing_early() -> None:
    """As by a cache that the answer before it has just filled: no response is lost."""
    ensemble = one_at_a_time()
    members = ensemble.members
    _, answers = ensemble.infer({"A": 0})
    stream = members.take("stream")
    members.answer(stream, {"Y": 1}, final=False)
    members.answer(stream, {"Y": 2})
    members.at_once["one"] = lambda inputs: {"Y": 10 * inputs["X"]}
    members.answer(members.take("one"), {"Y": 10})
    assert answers.outputs == [{"C": 10}, {"C": 20}]
    assert answers.final == 1


def test_a_call_that_leaves_a_gate_and_is_refused_fails_the_request_once() -> None:
    """Others that wait there are of no use then."""
    ensemble = one_at_a_time()
    members = ensemble.members
    _, answers = ensemble.infer({"A": 0})
    stream = members.take("stream")
    for number in (1, 2, 3):
        members.answer(stream, {"Y": number}, final=number == 3)

    def refuse(_: object) -> Any:
        raise UnavailableError("Exceeds maximum queue size")

    members.at_once["one"] = refuse
    members.answer(members.take("one"), {"Y": 10})
    assert answers.outputs[0] == {"C": 10}
    assert "Exceeds maximum queue size" in str(answers.error)
    assert ensemble.scheduler.queued == 0
    assert len(members.seen) == 3


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
