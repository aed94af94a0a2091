"""The ensemble scheduler against members that answer when the test says so."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

from npuserve.errors import InternalError, NpuserveError, StatusCode
from npuserve.request import SEQUENCE_END, SEQUENCE_START
from npuserve.response import InferenceResponse
from npuserve.server.ensemble_run import EnsembleRun
from npuserve.server.response_cache import LocalStore
from npuserve.tensor import Tensor
from tests.server.schedulers.ensemble_driver import (
    CHAIN,
    CHAIN_MEMBERS,
    ONE,
    OPT,
    OPTIONAL,
    Ensemble,
    io,
    member_config,
    step,
    steps,
    tensor,
)


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


def test_an_output_written_twice_is_answered_once() -> None:
    """Configurations made by scripts repeat entries."""
    text = io("input", "A") + io("output", "B B") + steps(step("one", "X=A", "Y=B"))
    ensemble = Ensemble(text, member_config("one", "X", "Y"))
    ensemble.members.at_once["one"] = lambda given: {"Y": given["X"] + 1}
    _, answers = ensemble.infer({"A": 1})
    assert [[tensor.name for tensor in each.outputs] for each in answers.responses] == [["B"]]


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


def test_a_fault_of_the_ensemble_itself_answers_the_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The client gets an error, the log the cause, and the other requests go on."""
    ensemble = Ensemble(CHAIN, *CHAIN_MEMBERS)
    _, answers = ensemble.infer({"A": 1}, ("SIDE",))
    with monkeypatch.context() as patch:
        patch.setattr(EnsembleRun, "_settle", lambda *_: 1 // 0)
        ensemble.members.answer(ensemble.members.take("three"), {"Y": 1})
    assert str(answers.error) == "in ensemble 'e', internal error, see the server's log"
    assert "ZeroDivisionError" in caplog.text
    assert not ensemble.members.holds.total()
    _, answers = ensemble.infer({"A": 1}, ("SIDE",))
    ensemble.members.answer(ensemble.members.take("three"), {"Y": 3})
    assert answers.outputs == [{"SIDE": 3}]


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
