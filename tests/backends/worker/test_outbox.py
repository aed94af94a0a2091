"""Responses of a decoupled model travel together where they come fast, and never late."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from npuserve.backends.worker import outbox, wire
from npuserve.backends.worker.outbox import Outbox
from tests.backends.worker.models import CONFIG, served_model

DECOUPLED = CONFIG + "model_transaction_policy { decoupled: true }"


class FakeChannel:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.sent: list[list[Any]] = []

    def send(self, kind: int, payload: Any) -> None:
        """See `Channel.send`."""
        assert kind == wire.RESPONSES
        self.sent.append([key for key, _, _ in payload])


@pytest.fixture
def channel() -> FakeChannel:
    """Nothing was sent through it."""
    return FakeChannel()


@pytest.fixture
def kept(channel: FakeChannel, monkeypatch: pytest.MonkeyPatch) -> Outbox:
    """An outbox whose thread never gets its turn, on a clock that stands still."""
    monkeypatch.setattr(outbox, "_now_ns", lambda: 10**9)
    monkeypatch.setattr(Outbox, "_ring", lambda self: None)
    return Outbox(channel)  # type: ignore[arg-type]


def test_the_first_goes_at_once(kept: Outbox, channel: FakeChannel) -> None:
    """A response that is not followed by others is not held back."""
    kept.put(1, None, False)
    assert channel.sent == [[1]]


def test_those_that_follow_closely_go_together(kept: Outbox, channel: FakeChannel) -> None:
    """One message for all of a burst but the first, in order."""
    for key in range(5):
        kept.put(key, None, False)
    kept.flush()
    kept.flush()
    assert channel.sent == [[0], [1, 2, 3, 4]]


def test_a_message_does_not_grow_without_limit(kept: Outbox, channel: FakeChannel) -> None:
    """A model that sends without a break is heard all the time."""
    for key in range(129):
        kept.put(key, None, False)
    assert [len(keys) for keys in channel.sent] == [1, 64, 64]


async def test_a_model_that_goes_on_computing_does_not_hold_its_responses(tmp_path: Path) -> None:
    """Both responses arrive while the model spins, which it does until the client cancels."""
    code = """
    class TritonPythonModel:
        def execute(self, requests):
            sender = requests[0].get_response_sender()
            for value in (1, 2):
                sender.send(response(np.array([value], np.float32)))
            while not sender.is_cancelled():
                pass
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
    """
    async with served_model(tmp_path, code, DECOUPLED) as models:
        call = models.start()
        deliver = call.request.on_response

        def on_response(response: Any, final: bool) -> None:
            deliver(response, final)
            if len(call.responses) == 2:
                call.request.cancel()

        call.request.on_response = on_response
        await call.answer()
        assert call.values == [[1.0], [2.0]]


async def test_a_response_is_what_it_was_when_it_was_sent(tmp_path: Path) -> None:
    """A model may use one array for all its responses."""
    code = """
    class TritonPythonModel:
        def execute(self, requests):
            sender = requests[0].get_response_sender()
            array = np.zeros(1, np.float32)
            for value in range(20):
                array[0] = value
                sender.send(response(array))
            array[0] = -1
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
    """
    async with served_model(tmp_path, code, DECOUPLED) as models:
        call = await models.infer()
        assert call.values == [[float(value)] for value in range(20)]
