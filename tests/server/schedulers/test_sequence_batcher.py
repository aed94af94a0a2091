"""The sequence batcher over real instance wrappers, with a backend that the test drives."""

from __future__ import annotations

import numpy as np
import pytest

from npuserve.errors import InvalidArgumentError, StatusCode, UnavailableError, UnsupportedError
from npuserve.request import SEQUENCE_END, SEQUENCE_START
from npuserve.response import InferenceResponse
from npuserve.tensor import Tensor
from tests.server.schedulers.sequence_driver import BOTH, STATE, Model, ids, number, oldest

# ---------------------------------------------------------------- enqueue


@pytest.mark.parametrize("correlation_id", [0, ""])
def test_a_request_needs_a_correlation_id(correlation_id: int | str) -> None:
    """0 and the empty text are none."""
    text = "inference request to model 'm' must specify a non-zero or non-empty correlation ID"
    with pytest.raises(InvalidArgumentError, match=text):
        Model().send(correlation_id, SEQUENCE_START)


def test_a_request_has_one_batch_element() -> None:
    """Larger ones are refused."""
    model = Model()
    client = model.send(1, SEQUENCE_START)
    client.request.batch_size = 2
    text = "inference request to model 'm' must specify batch-size 1 due to requirements of"
    with pytest.raises(InvalidArgumentError, match=text):
        model.batcher.enqueue(client.request)


@pytest.mark.parametrize("character", ["x", "\xe9"])
def test_a_text_id_has_at_most_128_bytes(character: str) -> None:
    """As in Triton, whatever its text says; also in requests that models make."""
    fits = character * (128 // len(character.encode()))
    model = Model(controls="")
    model.send(fits, SEQUENCE_START)
    with pytest.raises(UnsupportedError, match="cannot be longer than 128 characters"):
        model.send(fits + "x", SEQUENCE_START)


def test_a_stopping_model_refuses_new_sequences_only() -> None:
    """Live ones go on."""
    model = Model()
    model.send(1, SEQUENCE_START)
    model.batcher.stop()
    last = model.send(1, SEQUENCE_END)
    with pytest.raises(UnavailableError, match="^Server is stopping, scheduler for model has"):
        model.send(2, SEQUENCE_START)
    model.run_all()
    assert last.ok


def test_a_stopping_model_runs_its_backlog_without_waiting_for_idle_clients() -> None:
    """An unload ends as soon as what was queued is done."""
    model = Model("max_sequence_idle_microseconds: 60000000", max_batch_size=1)
    model.send(1, SEQUENCE_START)
    model.run_all()
    running, queued = model.send(2, SEQUENCE_START), model.send(3, SEQUENCE_START)
    model.batcher.stop()
    model.run_all()
    assert running.ok
    assert queued.ok


# ---------------------------------------------------------------- direct


def test_controls_and_inputs_reach_the_model_in_order() -> None:
    """Controls come before the client's inputs."""
    model = Model()
    model.send(7, SEQUENCE_START, 5)
    (request,) = model.running()
    assert list(request.inputs) == ["START", "READY", "CORRID", "IN"]
    assert [number(request, name) for name in request.inputs] == [1, 1, 7, 5]


def test_the_position_in_the_batch_is_the_slot() -> None:
    """Slots without a request get a filler, those behind the last request are left out."""
    model = Model()
    for each in (1, 2, 3):
        model.send(each, SEQUENCE_START)
    model.run_all()
    model.send(2)
    batch = model.running()
    assert ids(batch) == [None, 2]
    filler = batch[0]
    assert (number(filler, "READY"), number(filler, "CORRID")) == (0, 0)
    assert list(filler.inputs["IN"].shape) == [1, 1]


def test_fillers_are_not_counted() -> None:
    """Only real requests are inferences; the execution's size includes the fillers."""
    model = Model()
    for each in (1, 2):
        model.send(each, SEQUENCE_START)
    model.run_all()
    model.send(2)
    model.run_all()
    statistics = model.statistics
    assert (statistics.inference_count, statistics.success.count) == (3, 3)
    assert (statistics.execution_count, statistics.pending) == (2, 0)
    assert set(statistics.batch) == {2}


def test_requests_of_one_sequence_run_one_after_the_other() -> None:
    """Even when they are all queued, and on the same slot."""
    model = Model()
    clients = [
        model.send(1, flags, value)
        for value, flags in enumerate((SEQUENCE_START, 0, 0, SEQUENCE_END))
    ]
    for value in range(4):
        assert [number(each, "IN") for each in model.running()] == [value]
        model.finish()
    assert all(client.ok for client in clients)
    assert model.batcher.live_sequences == 0


def test_a_request_of_another_shape_waits_for_the_next_execution() -> None:
    """Its slot gets a filler meanwhile."""
    model = Model(dims="-1")
    model.send(1, SEQUENCE_START, shape=(1,))
    model.send(2, SEQUENCE_START, shape=(2,))
    model.send(3, SEQUENCE_START, shape=(1,))
    assert ids(model.running()) == [1, None, 3]
    model.finish()
    assert ids(model.running()) == [None, 2]


def test_a_batch_waits_for_its_minimum_utilization() -> None:
    """Until enough slots are ready or the delay is over."""
    model = Model("direct { max_queue_delay_microseconds: 100 minimum_slot_utilization: 0.5 }")
    model.send(1, SEQUENCE_START)
    assert model.running() == []
    model.send(2, SEQUENCE_START)
    assert ids(model.running()) == [1, 2]
    model.finish()
    model.send(1)
    model.clock.advance(us=99)
    assert model.running() == []
    model.clock.advance(us=1)
    assert ids(model.running()) == [1]


def test_without_batching_an_instance_has_one_sequence() -> None:
    """max_batch_size 0: the next sequence waits until the first one has ended."""
    model = Model(max_batch_size=0)
    model.send(1, SEQUENCE_START)
    waiting = model.send(2, BOTH)
    model.run_all()
    assert not waiting.final
    model.send(1, SEQUENCE_END)
    model.run_all()
    assert waiting.ok


# ---------------------------------------------------------------- oldest


def test_oldest_batches_across_sequences_without_fillers() -> None:
    """One request of each, in the order of arrival, up to the largest batch."""
    model = oldest()
    for each in (5, 4, 3, 2, 1):
        model.send(each, SEQUENCE_START)
    model.send(5)
    assert ids(model.running()) == [5, 4, 3, 2]
    model.finish()
    assert ids(model.running()) == [1, 5]


def test_oldest_waits_for_a_preferred_size() -> None:
    """Preferred sizes go at once, others wait the delay."""
    model = oldest("preferred_batch_size: [2] max_queue_delay_microseconds: 100")
    model.send(1, SEQUENCE_START)
    assert model.running() == []
    model.send(2, SEQUENCE_START)
    assert ids(model.running()) == [1, 2]
    model.finish()
    model.send(1)
    model.clock.advance(us=100)
    assert ids(model.running()) == [1]


def test_oldest_ages_a_request_from_when_it_can_run() -> None:
    """Time spent behind the request before it is no time in the batcher."""
    model = oldest("preferred_batch_size: [2] max_queue_delay_microseconds: 100")
    model.send(1, SEQUENCE_START)
    model.send(1)
    model.clock.advance(us=100)
    assert len(model.running()) == 1
    model.clock.advance(us=500)
    model.finish()
    assert model.running() == []
    model.clock.advance(us=100)
    assert ids(model.running()) == [1]


# ---------------------------------------------------------------- leaving the queue


def test_cancellation_takes_the_rest_of_the_sequence_with_it() -> None:
    """What came before it runs, another sequence is not touched, the slot is free again."""
    model = Model(max_batch_size=1)
    running = model.send(1, SEQUENCE_START)
    model.running()
    queued = [model.send(1) for _ in range(3)]
    other = model.send(2, BOTH)
    queued[1].request.cancel()
    assert not queued[0].final
    assert [client.error.code for client in queued[1:]] == [StatusCode.CANCELLED] * 2
    model.run_all()
    assert running.ok
    assert queued[0].ok
    assert other.ok
    assert model.statistics.failures["CANCELED"] == 2
    with pytest.raises(InvalidArgumentError, match="START"):
        model.send(1)


def test_a_sequence_whose_client_disappears_leaves_after_the_idle_time() -> None:
    """Its slot goes to who waits."""
    model = Model("max_sequence_idle_microseconds: 1000", max_batch_size=1)
    model.send(1, SEQUENCE_START)
    model.run_all()
    waiting = model.send(2, BOTH)
    model.clock.advance(us=999)
    assert model.running() == []
    model.clock.advance(us=1)
    model.run_all()
    assert waiting.ok
    with pytest.raises(InvalidArgumentError, match="START"):
        model.send(1)


def test_a_backlogged_sequence_times_out() -> None:
    """All its requests get Triton's text and count as rejected."""
    model = Model(max_batch_size=1)
    model.send(1, SEQUENCE_START)
    late = [model.send(2, SEQUENCE_START, timeout_us=50), model.send(2)]
    model.clock.advance(us=50)
    for client in late:
        assert str(client.error) == "timeout of the corresponding sequence has been expired"
        assert client.error.code is StatusCode.UNAVAILABLE
    assert model.statistics.failures["REJECTED"] == 2


def test_an_instance_that_dies_takes_its_own_sequences_only() -> None:
    """Running and queued requests of it fail, START is needed again, others go on."""
    model = Model(max_batch_size=1, instances=2)
    first, other = model.send(1, SEQUENCE_START), model.send(2, SEQUENCE_START)
    model.running()
    queued = model.send(1)
    model.instances[0].die()
    model.clock.run()
    assert str(first.error) == "the worker died"
    assert str(queued.error) == (
        "sequence 1 of model 'm' is lost: model instance 'm_0_0' ended unexpectedly"
    )
    with pytest.raises(InvalidArgumentError, match="START"):
        model.send(1)
    again = model.send(1, SEQUENCE_START)
    model.finish(1)
    assert other.ok
    assert not again.final
    model.instances[0].restart()
    model.run_all()
    assert again.ok


# ---------------------------------------------------------------- implicit state


def test_a_state_output_is_the_next_state_input() -> None:
    """It starts at zero, is reset by START, and the client does not see it."""
    model = Model(STATE)
    seen = []
    for flags in (SEQUENCE_START, 0, 0, SEQUENCE_START):
        client = model.send(1, flags)
        (request,) = model.running()
        assert next(iter(request.inputs)) == "SI"
        seen.append(number(request, "SI"))
        model.finish(SO=np.full((1, 1), seen[-1] + 3, np.int32))
        assert [tensor.name for tensor in client.responses[0].outputs] == ["OUT"]
    assert seen == [0, 3, 6, 0]


def test_a_state_of_the_wrong_shape_fails_that_request_only() -> None:
    """It counts as a failure, the others of the batch are fine and the state is as before."""
    model = Model(STATE)
    bad, good = model.send(1, SEQUENCE_START), model.send(2, SEQUENCE_START)
    model.running()
    batch = model.instances[0].batches.pop()
    for request, shape in zip(batch.requests, ((1, 2), (1, 1)), strict=True):
        value = Tensor.from_numpy("SO", np.full(shape, 7, np.int32))
        batch.send(request, InferenceResponse([value]))
    batch.done()
    assert "unexpected shape for state 'SO'" in str(bad.error)
    assert good.ok
    assert (model.statistics.success.count, model.statistics.failures["BACKEND"]) == (1, 1)
    model.send(1)
    model.send(2)
    assert [number(request, "SI") for request in model.running()] == [0, 7]


def test_sequences_with_implicit_state_survive_their_instance() -> None:
    """The state is in the server."""
    model = Model(STATE, max_batch_size=1)
    model.send(1, SEQUENCE_START)
    model.running()
    model.finish(SO=np.full((1, 1), 5, np.int32))
    model.instances[0].die()
    model.send(1)
    model.instances[0].restart()
    assert number(model.running()[0], "SI") == 5


def test_a_freed_model_is_not_kept_by_its_idle_sequences() -> None:
    """The timer that would end them goes with it."""
    model = Model("max_sequence_idle_microseconds: 3600000000")
    model.send(1, SEQUENCE_START)
    model.run_all()
    assert model.clock.next_timer_ns
    model.batcher.stop()
    model.batcher.close()
    model.clock.run()
    assert model.clock.next_timer_ns == 0


# ---------------------------------------------------------------- iterative sequences


def test_an_iterative_request_is_executed_until_it_is_released() -> None:
    """The server makes the id and sets START once; others join between its executions."""
    model = Model("iterative_sequence: true", more="model_transaction_policy { decoupled: true }")
    first = model.send(0)
    (request,) = model.running()
    own_id = request.correlation_id
    assert own_id
    assert request.flags == SEQUENCE_START
    second = model.send(0)
    batch = model.instances[0].batches.pop()
    batch.send(request, InferenceResponse([]), final=False)
    batch.reschedule(request)
    batch.done()
    assert model.running() == [request, second.request]
    assert (request.correlation_id, request.flags) == (own_id, 0)
    assert number(request, "START") == 0
    batch = model.instances[0].batches.pop()
    for each in batch.requests:
        batch.send(each, None)
    batch.done()
    assert (len(first.responses), first.final) == (1, 1)
    assert (len(second.responses), second.final) == (0, 1)
    assert model.statistics.pending == model.batcher.live_sequences == 0


def test_an_iterative_request_with_an_id_keeps_its_flags() -> None:
    """As in Triton: one without an id is given both, END of its client or not."""
    model = Model("iterative_sequence: true")
    for correlation_id, flags in ((7, SEQUENCE_START), (8, BOTH), (0, SEQUENCE_END)):
        model.send(correlation_id, flags)
    assert [request.flags for request in model.running()] == [SEQUENCE_START, BOTH, SEQUENCE_START]


def test_an_iterative_request_with_an_id_needs_start() -> None:
    """Triton's rule, even while another request of this id is executed."""
    text = "for sequence 7 to model 'm' must specify the START flag on the first request of the"
    model = Model("iterative_sequence: true")
    for _ in range(2):
        for flags in (0, SEQUENCE_END):
            with pytest.raises(InvalidArgumentError, match=text):
                model.send(7, flags)
        model.send(7, SEQUENCE_START)
    assert len(model.running()) == 1


def test_iterative_requests_of_one_id_are_executed_one_after_the_other() -> None:
    """Each until it is released, END or not; Triton mixes them up, or never answers."""
    model = Model("iterative_sequence: true", more="model_transaction_policy { decoupled: true }")
    clients = [model.send(7, BOTH), model.send(7, SEQUENCE_START)]
    for client in clients:
        for flags in (client.request.flags, 0):
            assert [(each, each.flags) for each in model.running()] == [(client.request, flags)]
            batch = model.instances[0].batches.pop()
            if flags:
                batch.reschedule(client.request)
            else:
                batch.send(client.request, None)
            batch.done()
        assert client.final == 1
    assert model.batcher.live_sequences == 0


def test_a_cancelled_iterative_request_is_not_executed_again() -> None:
    """It is answered when the model gives it back."""
    model = Model("iterative_sequence: true")
    client = model.send(0)
    (request,) = model.running()
    client.request.cancel()
    batch = model.instances[0].batches.pop()
    batch.reschedule(request)
    batch.done()
    assert client.error.code is StatusCode.CANCELLED
    assert model.running() == []
    assert model.batcher.live_sequences == 0


def test_a_request_that_was_answered_is_not_executed_again() -> None:
    """A model that ends its responses and reschedules all the same has ended the sequence."""
    model = Model("iterative_sequence: true", more="model_transaction_policy { decoupled: true }")
    client = model.send(0)
    (request,) = model.running()
    batch = model.instances[0].batches.pop()
    batch.send(request, None)
    batch.reschedule(request)
    batch.done()
    assert client.final == 1
    assert model.running() == []
    assert model.statistics.pending == model.batcher.queued == 0


def test_other_models_cannot_reschedule() -> None:
    """The request is answered with Triton's text."""
    model = Model()
    client = model.send(1, SEQUENCE_START)
    (request,) = model.running()
    batch = model.instances[0].batches.pop()
    batch.reschedule(request)
    batch.done()
    assert "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE" in str(client.error)
