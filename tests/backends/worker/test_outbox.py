"""Responses of a decoupled model travel together where they come fast, and never late."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npuserve.backends.worker import outbox, wire
from npuserve.backends.worker.outbox import Outbox
from tests.backends.worker.models import DECOUPLED, served_model


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


async def test_a_slow_reader_stops_the_model_at_its_next_large_response(tmp_path: Path) -> None:
    """References to large tensors are small: the channel alone would take hundreds of them."""
    about_to_send = tmp_path / "about_to_send"
    os.mkfifo(about_to_send)
    code = f"""
    class TritonPythonModel:
        def execute(self, requests):
            sender = requests[0].get_response_sender()
            if tensor(requests[0]).as_numpy()[0]:
                open({str(about_to_send)!r}, "w").close()
                for _ in range(2):
                    now = np.frombuffer(np.int64(time.monotonic_ns()).tobytes(), np.float32)
                    sender.send(response(np.concatenate([now, np.zeros(20_000, np.float32)])))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
    """
    async with served_model(tmp_path, code, DECOUPLED) as models:
        first = models.start(inputs={"IN": np.zeros(1, np.float32)})
        held = models.start()  # waits behind the first one
        held.request.hold(True)
        await first.answer()
        await asyncio.to_thread(about_to_send.read_bytes)
        released_ns = time.monotonic_ns()
        held.request.hold(False)
        await held.answer()
        sent_ns = [np.frombuffer(r.outputs[0].data[:8], np.int64).item() for r in held.responses]
        assert len(sent_ns) == 2
        assert sent_ns[1] > released_ns
