"""Clients that repeat themselves: what was seen before must be answered as if it were new."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npuserve.protocol.http.codec import decode_infer
from npuserve.protocol.http.json_text import parse_json
from npuserve.protocol.http.reply import BINARY, Reply
from npuserve.protocol.http.templates import InferTemplate, Templates
from npuserve.response import InferenceResponse
from npuserve.tensor import Tensor
from tests.protocol.http.fakes import infer_binary, infer_json, post, post_binary
from tests.protocol.http.test_session import PATH, in_loop

DATA = b"\1\0\0\0\2\0\0\0"
SMALL = post_binary(*infer_binary(DATA))
OTHER_DATA = post_binary(*infer_binary(b"\7\0\0\0\2\0\0\0"))
LONGER = post_binary(*infer_binary(DATA * 2))
LARGE = post_binary(*infer_binary(b"\1\2\3\4" * 10_000))
JSON = post(PATH, infer_json([5]))
BAD = post_binary(infer_binary(DATA)[0], DATA[:-1])
CHANGED_HEADER = SMALL.replace(b"\r\n", b"\r\nX-Other: 1\r\n", 1)
# By name, so that a counterexample can be read.
REQUESTS = {
    "small": SMALL,
    "other data": OTHER_DATA,
    "longer": LONGER,
    "large": LARGE,
    "JSON": JSON,
    "bad": BAD,
    "changed header": CHANGED_HEADER,
}


def replies_one_by_one(requests: list[bytes]) -> bytes:
    """Each on a connection of its own, so that nothing is known."""
    return b"".join(in_loop([request]).written for request in requests)


@given(
    st.lists(st.sampled_from(sorted(REQUESTS)), min_size=2, max_size=6),
    st.lists(st.integers(0, 10_000), max_size=8),
)
def test_a_kept_connection_answers_as_fresh_ones_do(names: list[str], cuts: list[int]) -> None:
    """Repeated and changing requests, cut anywhere, get the replies they would get alone."""
    requests = [REQUESTS[name] for name in names]
    stream = b"".join(requests)
    places = sorted({0, *(cut % len(stream) for cut in cuts), len(stream)})
    pieces = [stream[a:b] for a, b in itertools.pairwise(places)]
    assert in_loop(pieces).written == replies_one_by_one(requests)


def test_repeated_requests_in_one_packet_are_all_answered() -> None:
    """A known head does not hide what follows its body."""
    assert in_loop([SMALL, SMALL + OTHER_DATA + JSON]).statuses == [200, 200, 200, 200]


def test_hundreds_of_small_requests_in_one_packet_are_all_answered() -> None:
    """However many requests a read holds, each gets its reply."""
    small = post(PATH, b"{}")
    count = 60_000 // len(small)
    assert in_loop([small, small * count]).statuses == [400] * (count + 1)


def test_a_body_that_looks_like_the_end_of_a_head_is_no_head() -> None:
    """Bytes of a body never become part of what is taken for a known head."""
    body = b"\r\n\r\n" + infer_json([1])
    request = post(PATH, body)
    wire = in_loop([request + b"\r\n\r\n", request, post(PATH, infer_json([1], id="z"))])
    assert wire.statuses == [200, 200, 200]
    assert wire.ids[-1] == "z"


def test_a_known_head_does_not_outlive_a_different_one() -> None:
    """The last head counts; a head that only begins alike is parsed."""
    wire = in_loop([SMALL, LONGER, SMALL, CHANGED_HEADER, SMALL])
    assert wire.statuses == [200] * 5


def decoded(text: bytes, binary: bytes) -> InferTemplate | None:
    document = parse_json(text)
    message = decode_infer(document, binary, "m", lambda *place: b"")
    return Templates().remember(text, document, message)


def test_a_template_makes_the_tensors_of_the_next_request() -> None:
    """Names, datatypes and shapes from before, data from now."""
    text, binary = infer_binary(DATA)
    template = decoded(text, binary)
    assert template is not None
    (tensor,) = template.inputs(memoryview(b"\3\0\0\0\4\0\0\0")).values()
    assert bytes(tensor.data) == b"\3\0\0\0\4\0\0\0"
    assert template.binary_size == 8


@pytest.mark.parametrize(
    "text",
    [
        b'{"id":"7","inputs":[{"name":"X","datatype":"UINT8","shape":[1],'
        b'"parameters":{"binary_data_size":1}}]}',
        b'{"parameters":{"sequence_id":7},"inputs":[{"name":"X","datatype":"UINT8","shape":[1],'
        b'"parameters":{"binary_data_size":1}}]}',
        b'{"inputs":[{"name":"X","datatype":"UINT8","shape":[1],"parameters":'
        b'{"binary_data_size":1}},{"name":"Y","datatype":"UINT8","shape":[1],"data":[1]}]}',
        b'{"inputs":[{"name":"X","datatype":"UINT8","shape":[1],"parameters":'
        b'{"binary_data_size":1}},{"name":"Y","datatype":"UINT8","shape":[0],"data":[],'
        b'"parameters":5}]}',
        b'{"inputs":[{"name":"X","datatype":"UINT8","shape":[1],"parameters":'
        b'{"binary_data_size":1}},{"name":"Y","datatype":"UINT8","shape":[0],"data":[],'
        b'"parameters":{"binary_data_size":null}}]}',
    ],
)
def test_what_hardly_repeats_or_is_not_all_binary_is_not_remembered(text: bytes) -> None:
    """Ids, sequences and JSON data are decoded each time."""
    assert decoded(text, b"\1") is None


def test_templates_are_bounded() -> None:
    """A client that never repeats itself cannot make the memory grow."""
    templates = Templates()
    for index in range(2000):
        text = (
            b'{"inputs":[{"name":"X%d","datatype":"UINT8","shape":[1],'
            b'"parameters":{"binary_data_size":1}}]}' % index
        )
        document = parse_json(text)
        templates.remember(text, document, decode_infer(document, b"\1", "m", lambda *p: b""))
    assert len(templates._known) <= 512


def test_a_remembered_reply_carries_the_new_data() -> None:
    """JSON and headers from before, data from now; another shape is another reply."""
    text = infer_binary(DATA)[0].replace(
        b'{"inputs"', b'{"parameters":{"binary_data_output":true},"inputs"'
    )
    template = decoded(text, DATA)
    assert template is not None

    def response(*values: int) -> InferenceResponse:
        tensor = Tensor.from_numpy("Y", np.array(values, np.int32))
        return InferenceResponse([tensor], model_name="m", model_version="1")

    first = Reply(200, [b"{}", response(1).outputs[0].data], BINARY, [(b"A", b"b")])
    template.remember_reply(response(1), first)
    again = template.reply(response(9))
    assert again is not None
    assert bytes(again.parts[1]) == b"\x09\0\0\0"
    assert again.head(keep_alive=True) == first.head(keep_alive=True)
    assert b"Connection: close" in again.head(keep_alive=False)
    assert template.reply(response(1, 2)) is None
