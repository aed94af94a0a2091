"""The short cuts for repeated messages against the slow way."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npuserve._proto import grpc_service_pb2 as pb
from npuserve.buffer_pool import LARGE_TENSOR_BYTES
from npuserve.protocol.grpc import codec
from npuserve.protocol.grpc.templates import RequestTemplates, ResponseHeads
from npuserve.response import InferenceResponse
from npuserve.tensor import Buffer, Tensor

names = st.text(min_size=1, max_size=8)
blobs = st.binary(min_size=1, max_size=300)


def message(
    model: str, raws: list[bytes], outputs: list[str] | None = None, shape: int = 1
) -> pb.ModelInferRequest:
    """A plain request with inputs IN0, IN1, …."""
    made = pb.ModelInferRequest(model_name=model)
    for index, raw in enumerate(raws):
        made.inputs.add(name=f"IN{index}", datatype="UINT8", shape=[shape, len(raw)])
    for name in outputs or []:
        made.outputs.add(name=name)
    made.raw_input_contents.extend(raws)
    return made


def learned(made: pb.ModelInferRequest) -> RequestTemplates:
    """Templates that have seen this request."""
    templates = RequestTemplates()
    data = made.SerializeToString()
    parsed, raw = codec.parse_infer_request(data)
    templates.learn(data, parsed, raw, -1)
    return templates


@given(names, st.lists(blobs, min_size=1, max_size=4), st.lists(names, max_size=2), st.randoms())
def test_a_match_is_what_the_slow_way_gives(
    model: str, raws: list[bytes], outputs: list[str], dice: Any
) -> None:
    """A request like an earlier one is decoded the same, with its own bytes."""
    templates = learned(message(model, raws, outputs))
    others = [dice.randbytes(len(raw)) for raw in raws]
    data = message(model, others, outputs).SerializeToString()
    template = templates.match(data)
    assert template is not None
    assert (template.model_name, template.version) == (model, -1)
    assert template.requested_outputs == tuple(outputs)
    slow = codec.to_inference_request(
        *codec.parse_infer_request(data), lambda *_: None, -1, lambda *_: b""
    )
    fast = template.tensors(data)
    assert list(fast) == list(slow.inputs)
    for name, tensor in slow.inputs.items():
        assert (fast[name].datatype, fast[name].shape) == (tensor.datatype, tensor.shape)
        assert bytes(fast[name].data) == bytes(tensor.data)


@pytest.mark.parametrize(
    "other",
    [
        message("other", [b"abcd", b"efgh"]),
        message("model", [b"abcd", b"efgh"], shape=2),
        message("model", [b"abc", b"efghi"]),
        message("model", [b"abcde", b"efgh"]),
    ],
)
def test_what_differs_does_not_match(other: pb.ModelInferRequest) -> None:
    """Another model, shape or division of the same bytes is decoded anew."""
    templates = learned(message("model", [b"abcd", b"efgh"]))
    assert templates.match(other.SerializeToString()) is None


def _with(change: Any) -> pb.ModelInferRequest:
    made = message("model", [b"abcd", b"efgh"], ["OUT"])
    change(made)
    return made


@pytest.mark.parametrize(
    "made",
    [
        _with(lambda m: setattr(m, "id", "7")),
        _with(lambda m: m.parameters["p"].MergeFrom(pb.InferParameter(int64_param=1))),
        _with(lambda m: m.inputs[0].parameters["p"].MergeFrom(pb.InferParameter())),
        _with(lambda m: m.outputs[0].parameters["p"].MergeFrom(pb.InferParameter())),
        _with(lambda m: m.inputs[0].contents.uint_contents.append(1)),
        _with(lambda m: m.raw_input_contents.append(b"extra")),
        _with(lambda m: setattr(m.inputs[1], "name", "IN0")),
        message("model", [b""]),
        message("model", []),
    ],
)
def test_only_plain_requests_are_learned(made: pb.ModelInferRequest) -> None:
    """What may differ between requests, or is an error, always goes the slow way."""
    assert learned(made).match(made.SerializeToString()) is None


def test_unusual_field_order_is_not_learned() -> None:
    """Raw contents that do not end the message as protobuf writes them are left alone."""
    made = message("model", [b"abcd"])
    data = made.SerializeToString() + b"\x1a\x00"  # an id of no characters after them
    templates = RequestTemplates()
    parsed, raw = codec.parse_infer_request(data)
    templates.learn(data, parsed, raw, -1)
    assert templates.match(data) is None


tensors = st.builds(
    lambda name, shape, data: Tensor(name, "UINT8", shape, data),
    names,
    st.lists(st.integers(0, 2**40), max_size=3),
    st.one_of(st.binary(max_size=50), st.just(b"x" * LARGE_TENSOR_BYTES)),
)


@given(st.lists(tensors, max_size=3), st.text(max_size=5), st.sampled_from([None, False, True]))
def test_cached_heads_give_the_same_response(
    outputs: list[Tensor], request_id: str, final: bool | None
) -> None:
    """First and repeated responses are what the slow way writes, field by field."""
    response = InferenceResponse(outputs, model_name="m", model_version="2")
    slow = codec.infer_response_message(response, request_id, final)
    raw: list[Buffer] = []
    for tensor in outputs:
        codec.add_output(slow, raw, tensor)
    slow.raw_output_contents.extend(map(bytes, raw))
    heads = ResponseHeads()
    for _ in range(2):
        fast = b"".join(heads.encode(response, request_id, final))
        assert pb.ModelInferResponse.FromString(fast) == slow
