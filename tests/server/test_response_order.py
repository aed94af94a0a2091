"""preserve_ordering: responses leave in the order of arrival."""

from __future__ import annotations

from functools import partial
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npuserve.request import InferenceRequest, ModelCall
from npuserve.response import InferenceResponse
from npuserve.server.response_order import ResponseOrder


@given(st.lists(st.integers(0, 3), max_size=8), st.randoms())
def test_any_interleaving_comes_out_in_order(counts: list[int], random: object) -> None:
    """Requests with any number of responses, answered in any order, come out request by request."""
    order = ResponseOrder()
    seen: list[tuple[int, bool]] = []
    requests = []

    def note(number: int, response: InferenceResponse | None, final: bool) -> None:
        seen.append((number, final))

    for number in range(len(counts)):
        requests.append(InferenceRequest("m", {}, partial(note, number)))
        order.add(requests[-1])
    todo = [(number, index) for number, count in enumerate(counts) for index in range(count + 1)]
    random.shuffle(todo)  # type: ignore[attr-defined]  # hypothesis' Random
    left = [count + 1 for count in counts]
    for number, _ in todo:
        left[number] -= 1
        final = left[number] == 0
        requests[number].deliver(None if final else InferenceResponse([]), final)
    assert seen == [
        (number, index == count)
        for number, count in enumerate(counts)
        for index in range(count + 1)
    ]
    assert len(order) == 0


def test_what_a_model_asks_for_is_not_held() -> None:
    """The request before it may be the one that it is asked for."""
    order = ResponseOrder()
    seen: list[bool] = []
    order.add(InferenceRequest("m", {}, lambda *_: None))
    asked = InferenceRequest("m", {}, lambda _, final: seen.append(final))
    asked.for_model = cast("ModelCall", object())
    order.add(asked)
    asked.deliver(InferenceResponse([]), True)
    assert seen == [True]


def test_the_first_in_line_is_not_held() -> None:
    """Responses of the first request pass at once, before its final one."""
    order = ResponseOrder()
    seen: list[bool] = []
    request = InferenceRequest("m", {}, lambda _, final: seen.append(final))
    order.add(request)
    request.deliver(InferenceResponse([]), False)
    assert seen == [False]


def test_a_callback_that_raises_holds_up_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """What was held behind it comes out, and what was held for it too."""
    order = ResponseOrder()
    seen: list[tuple[str, bool]] = []
    requests = {}
    for name in ("first", "bad", "last"):

        def note(_: object, final: bool, name: str = name) -> None:
            seen.append((name, final))
            if name == "bad":
                raise ValueError("the front end is broken")

        requests[name] = InferenceRequest("m", {}, note)
        order.add(requests[name])
    requests["last"].deliver(InferenceResponse([]), True)
    requests["bad"].deliver(InferenceResponse([]), False)
    requests["bad"].deliver(None, True)
    requests["first"].deliver(InferenceResponse([]), True)
    assert seen == [("first", True), ("bad", False), ("bad", True), ("last", True)]
    assert len(order) == 0
    assert "the front end is broken" in caplog.text


def test_what_comes_in_while_responses_are_let_out_comes_after_them() -> None:
    """A request sent from a callback, and answered at once, does not overtake what is held."""
    order = ResponseOrder()
    seen: list[str] = []

    def send_another(response: InferenceResponse | None, final: bool) -> None:
        seen.append("held")
        if not final:
            another = InferenceRequest("m", {}, lambda *_: seen.append("another"))
            order.add(another)
            another.deliver(None, True)

    first = InferenceRequest("m", {}, lambda *_: seen.append("first"))
    second = InferenceRequest("m", {}, send_another)
    for request in (first, second):
        order.add(request)
    second.deliver(InferenceResponse([]), False)
    second.deliver(None, True)
    first.deliver(None, True)
    assert seen == ["first", "held", "held", "another"]
