"""Random traffic of sequences is answered once, in order and apart."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from npuserve.errors import InvalidArgumentError
from npuserve.request import SEQUENCE_END, SEQUENCE_START, InferenceRequest
from npuserve.response import InferenceResponse
from npuserve.tensor import Tensor
from tests.server.schedulers.sequence_driver import BOTH, STATE, Client, Model, number


@settings(max_examples=60)
@given(data=st.data(), strategy=st.sampled_from(["direct { }", "oldest { }", "oldest { delay }"]))
def test_random_traffic_is_answered_once_in_order_and_apart(
    data: st.DataObject, strategy: str
) -> None:
    """No request is lost, answered twice, overtaken or given another sequence's state."""
    strategy = strategy.replace(
        "delay", "max_candidate_sequences: 3 max_queue_delay_microseconds: 50"
    )
    model = Model(
        f"max_sequence_idle_microseconds: 400 {STATE} {strategy}",
        max_batch_size=2,
        instances=data.draw(st.integers(1, 2)),
    )
    clients: list[Client] = []
    executed: dict[int | str, list[InferenceRequest]] = {}

    def finish(index: int) -> None:
        batch = model.instances[index].batches.pop(0)
        for request in batch.requests:
            if request.filler:
                batch.send(request, InferenceResponse([]))
                continue
            history = executed.setdefault(request.correlation_id, [])
            state = number(request, "SI")
            if request.flags & SEQUENCE_START:
                assert state == 0
            else:
                assert state == history[-1].inputs["IN"].as_numpy().item()
            history.append(request)
            value = Tensor.from_numpy("SO", request.inputs["IN"].as_numpy())
            batch.send(request, InferenceResponse([value]))
        batch.done()

    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["send", "send", "send", "finish", "cancel", "time"]))
        if action == "send":
            flags = data.draw(st.sampled_from([0, 0, SEQUENCE_START, SEQUENCE_END, BOTH]))
            try:
                clients.append(
                    model.send(
                        data.draw(st.integers(1, 4)),
                        flags,
                        len(clients) + 1,
                        timeout_us=data.draw(st.sampled_from([0, 0, 200])),
                    )
                )
            except InvalidArgumentError:
                assert not flags & SEQUENCE_START
        elif action == "finish":
            index = data.draw(st.integers(0, len(model.instances) - 1))
            if model.running(index):
                finish(index)
        elif action == "cancel" and clients:
            data.draw(st.sampled_from(clients)).request.cancel()
        else:
            model.clock.advance(us=data.draw(st.sampled_from([1, 60, 500])))
    for _ in range(500):
        for index in range(len(model.instances)):
            if model.running(index):
                finish(index)
        model.clock.advance(us=500)
    assert all(client.final == 1 for client in clients)
    assert len(model.released) == len(clients)
    order = {id(client.request): position for position, client in enumerate(clients)}
    for history in executed.values():
        positions = [order[id(request)] for request in history]
        assert positions == sorted(positions)
    assert model.batcher.live_sequences == model.batcher.queued == 0
    assert model.statistics.pending == 0
