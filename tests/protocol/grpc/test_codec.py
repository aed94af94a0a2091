"""The inference codec: protobuf messages ↔ requests and responses."""

from __future__ import annotations

import struct
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npuserve._proto import grpc_service_pb2 as pb
from npuserve.buffer_pool import LARGE_TENSOR_BYTES
from npuserve.errors import InvalidArgumentError, UnsupportedError
from npuserve.protocol.grpc import codec, raw_contents
from npuserve.protocol.grpc.parameters import SharedMemoryReference, set_parameter
from npuserve.request import SEQUENCE_END, SEQUENCE_START, InferenceRequest
from npuserve.response import InferenceResponse, ParameterValue
from npuserve.tensor import Buffer, Tensor, serialize_bytes

LARGE = b"L" * LARGE_TENSOR_BYTES


def decode(message: pb.ModelInferRequest) -> InferenceRequest:
    """A message through the whole way in."""
    parsed, raw = codec.parse_infer_request(message.SerializeToString())
    return codec.to_inference_request(parsed, raw, lambda *_: None, -1, _no_region)


def _no_region(name: str, offset: int, size: int) -> Buffer:
    return f"{name}:{offset}:{size}".encode()


def typed(datatype: str, field: str, values: list[Any]) -> pb.ModelInferRequest:
    """A request with one input in typed contents."""
    message = pb.ModelInferRequest(model_name="m")
    item = message.inputs.add(name="IN", datatype=datatype, shape=[len(values)])
    getattr(item.contents, field).extend(values)
    return message


@pytest.mark.parametrize(
    ("datatype", "field", "values", "raw"),
    [
        ("BOOL", "bool_contents", [True, False], b"\1\0"),
        ("INT8", "int_contents", [-1, 127], b"\xff\x7f"),
        ("INT16", "int_contents", [-2], struct.pack("<h", -2)),
        ("INT32", "int_contents", [-3, 4], struct.pack("<2i", -3, 4)),
        ("INT64", "int64_contents", [1 << 60], struct.pack("<q", 1 << 60)),
        ("UINT8", "uint_contents", [255], b"\xff"),
        ("UINT16", "uint_contents", [65535], b"\xff\xff"),
        ("UINT32", "uint_contents", [1 << 31], struct.pack("<I", 1 << 31)),
        ("UINT64", "uint64_contents", [1 << 63], struct.pack("<Q", 1 << 63)),
        ("FP32", "fp32_contents", [1.5], struct.pack("<f", 1.5)),
        ("FP64", "fp64_contents", [0.1], struct.pack("<d", 0.1)),
        ("BYTES", "bytes_contents", [b"a\0", b""], b"\2\0\0\0a\0\0\0\0\0"),
    ],
)
def test_typed_contents(datatype: str, field: str, values: list[Any], raw: bytes) -> None:
    """Typed contents become the tensor's wire form."""
    tensor = decode(typed(datatype, field, values)).inputs["IN"]
    assert bytes(tensor.data) == raw
    assert (tensor.datatype, tensor.shape) == (datatype, (len(values),))


def _raw_and_contents() -> pb.ModelInferRequest:
    message = typed("INT32", "int_contents", [1])
    message.raw_input_contents.append(b"1234")
    return message


def _two_lists() -> pb.ModelInferRequest:
    message = typed("INT32", "int_contents", [1])
    message.inputs[0].contents.fp32_contents.append(1)
    return message


def _twice() -> pb.ModelInferRequest:
    message = typed("INT32", "int_contents", [1])
    message.inputs.add(name="IN")
    return message


def _no_data() -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name="m")
    message.inputs.add(name="IN", datatype="FP32", shape=[1])
    return message


def _surplus_data() -> pb.ModelInferRequest:
    message = _no_data()
    message.raw_input_contents.extend([b"1234", b"5678"])
    return message


def _region(**parameters: Any) -> pb.ModelInferRequest:
    message = _no_data()
    for key, value in parameters.items():
        set_parameter(message.inputs[0].parameters[f"shared_memory_{key}"], value)
    return message


def _region_and_contents() -> pb.ModelInferRequest:
    message = _region(region="r", byte_size=4)
    message.inputs[0].contents.fp32_contents.append(1)
    return message


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (
            _raw_and_contents(),
            "contents field must not be specified when using raw_input_contents for 'IN' for "
            "model 'm'",
        ),
        (
            _two_lists(),
            "unexpected explicit tensor data for input tensor 'IN' for model 'm' of type 'FP32', "
            "binary data was already supplied.",
        ),
        (_twice(), "[request id: <id_unknown>] input 'IN' already exists in request"),
        (_no_data(), "unable to find data for input tensor 'IN' for model 'm' in request."),
        (_surplus_data(), "unexpected additional input data for model 'm'"),
        (
            typed("FP32", "int_contents", [1]),
            "unexpected explicit tensor data for input tensor 'IN' for model 'm' of type "
            "'INT32', expected datatype 'FP32'",
        ),
        (
            _region(region="r"),
            "'shared_memory_byte_size' must be specified along with 'shared_memory_region' "
            "parameter for tensor 'IN'",
        ),
        (
            _region_and_contents(),
            "unexpected 'content' provided when using shared memory for input tensor 'IN' for "
            "model 'm'",
        ),
        (
            _region(byte_size=4),
            "'shared_memory_byte_size' can not be specified without 'shared_memory_region' "
            "parameter for tensor 'IN'",
        ),
        (
            _region(offset=4),
            "'shared_memory_offset' can not be specified without 'shared_memory_region' "
            "parameter for tensor 'IN'",
        ),
        (
            _region(region=1, byte_size=4),
            "invalid value type for 'shared_memory_region' parameter for tensor 'IN', expected "
            "string_param.",
        ),
        (
            _region(region="r", byte_size="4"),
            "invalid value type for 'shared_memory_byte_size' parameter for tensor 'IN', "
            "expected int64_param.",
        ),
    ],
)
def test_bad_inputs(message: pb.ModelInferRequest, text: str) -> None:
    """Contradictory tensor data is refused in Triton's words."""
    with pytest.raises(InvalidArgumentError) as caught:
        decode(message)
    assert text in str(caught.value)


def test_shared_memory_inputs_take_no_raw_entry() -> None:
    """Raw contents go to the inputs that are not in shared memory, in order."""
    message = _region(region="r", byte_size=4, offset=8)
    message.inputs.add(name="IN2", datatype="FP32", shape=[1])
    message.raw_input_contents.append(b"rawd")
    inputs = decode(message).inputs
    assert bytes(inputs["IN"].data) == b"r:8:4"
    assert bytes(inputs["IN2"].data) == b"rawd"


def with_parameter(key: str, field: str, value: Any) -> pb.ModelInferRequest:
    """A request with one parameter."""
    message = pb.ModelInferRequest(model_name="m")
    setattr(message.parameters[key], field, value)
    return message


def test_reserved_parameters() -> None:
    """Parameters of Triton's extensions become fields of the request."""
    message = pb.ModelInferRequest(model_name="m", id="7", outputs=[{"name": "A"}, {"name": "B"}])
    parameters: dict[str, ParameterValue] = {
        "sequence_id": 9, "sequence_start": True, "sequence_end": True, "priority": 2,
        "timeout": 700, "triton_enable_empty_final_response": True, "mine": "x",
    }  # fmt: skip
    for key, value in parameters.items():
        set_parameter(message.parameters[key], value)
    request = decode(message)
    assert request.id == "7"
    assert request.requested_outputs == ("A", "B")
    assert request.correlation_id == 9
    assert request.flags == SEQUENCE_START | SEQUENCE_END
    assert (request.priority, request.timeout_us) == (2, 700)
    assert request.parameters == {"mine": "x"}


def test_sequence_ids_may_be_text_or_use_all_64_bits() -> None:
    """A text id stays text; the sign bit of an integer id is part of it."""
    assert decode(with_parameter("sequence_id", "string_param", "s")).correlation_id == "s"
    assert decode(with_parameter("sequence_id", "int64_param", -1)).correlation_id == 2**64 - 1


def test_text_sequence_ids_have_at_most_128_bytes() -> None:
    """Whatever the model; as Triton."""
    longest = "x" * 128
    assert decode(with_parameter("sequence_id", "string_param", longest)).correlation_id == longest
    for text in ("x" * 129, "\u6a21" * 43):
        with pytest.raises(UnsupportedError, match="cannot be longer than 128 characters"):
            decode(with_parameter("sequence_id", "string_param", text))


@pytest.mark.parametrize(
    ("key", "field", "value", "text"),
    [
        ("sequence_id", "bool_param", True, "expected int64_param or string_param."),
        ("sequence_start", "int64_param", 1, "expected bool_param."),
        ("priority", "string_param", "a", "expected int64_param or uint64_param."),
        ("priority", "int64_param", -1, "invalid value for 'priority', expected value >= 0."),
        ("timeout", "string_param", "1", "expected int64_param."),
        ("triton_x", "int64_param", 1, "Only the following keys starting with 'triton_'"),
        ("x", "uint64_param", 1, "expected int64_param, bool_param, or string_param."),
        ("triton_enable_empty_final_response", "int64_param", 1, "expected bool_param."),
    ],
)
def test_bad_parameters(key: str, field: str, value: Any, text: str) -> None:
    """Parameters of the wrong type are refused in Triton's words."""
    with pytest.raises(InvalidArgumentError, match=text.replace(".", r"\.")):
        decode(with_parameter(key, field, value))


@pytest.mark.parametrize("field", [b"\0\0", b"\x3a\0", b"\x58\1", b"\x0a\1m"])
def test_a_large_message_of_tiny_fields_is_refused(field: bytes) -> None:
    """Reading it would hold up everybody: no tag, empty tensors, unknown numbers, names."""
    begun = time.process_time()
    with pytest.raises(InvalidArgumentError, match=r"more than 10000 fields|failed to parse"):
        codec.parse_infer_request(memoryview(field * (10 << 20)))
    assert time.process_time() - begun < 1


def test_large_raw_contents_are_views() -> None:
    """A large tensor is a view of the message's bytes, whatever stands around it."""
    message = pb.ModelInferRequest(model_name="m", id="i")
    for name in ("A", "B", "C"):
        message.inputs.add(name=name, datatype="UINT8", shape=[1])
    message.raw_input_contents.extend([b"a", LARGE, b""])
    data = bytearray(message.SerializeToString())
    parsed, raw = codec.parse_infer_request(memoryview(data))
    assert parsed.id == "i"
    assert [bytes(part) for part in raw] == [b"a", LARGE, b""]
    assert isinstance(raw[1], memoryview)
    assert raw[1].obj is data


def test_padding_aligns_the_first_large_tensor() -> None:
    """With the padding in front, the large tensor starts at a multiple of 64 bytes."""
    message = pb.ModelInferRequest(model_name="name", raw_input_contents=[b"small", LARGE])
    data = message.SerializeToString()
    padding = raw_contents.padding_for_alignment(memoryview(data[:200]))
    _, raw = codec.parse_infer_request(data)
    assert (padding + data.index(LARGE)) % 64 == 0
    assert bytes(raw[1]) == LARGE


@given(st.binary(max_size=200))
def test_padding_takes_any_bytes(data: bytes) -> None:
    """The beginning of any message gives a small number and never an error."""
    assert 0 <= raw_contents.padding_for_alignment(memoryview(data)) < 64


@given(st.binary(max_size=300), st.booleans())
def test_random_bytes_are_refused_or_read(data: bytes, large: bool) -> None:
    """Bytes from anywhere give a request or InvalidArgumentError, on both ways to parse."""
    if large:
        data += b"\x3a" + raw_contents.varint(len(LARGE)) + LARGE
    try:
        parsed, raw = codec.parse_infer_request(data)
        codec.to_inference_request(parsed, raw, lambda *_: None, -1, _no_region)
        codec.output_options(parsed)
    except InvalidArgumentError:
        pass


@given(st.binary(min_size=1, max_size=60), st.integers(0, LARGE_TENSOR_BYTES + 50))
def test_cut_messages_are_refused(name: bytes, cut: int) -> None:
    """No prefix of a large message is taken for a message with the same tensor."""
    message = pb.ModelInferRequest(id=name.hex(), raw_input_contents=[LARGE])
    data = message.SerializeToString()[:cut]
    try:
        _, raw = codec.parse_infer_request(data)
    except InvalidArgumentError:
        return
    assert len(raw) == 0 or len(data) == len(message.SerializeToString())


tensors = st.builds(
    lambda name, array: Tensor.from_numpy(name, np.array(array)),
    st.text(min_size=1, max_size=5),
    st.one_of(
        st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5).map(
            lambda values: np.array(values, np.int32)
        ),
        st.lists(st.binary(max_size=5), min_size=1, max_size=4).map(
            lambda values: np.array(values, np.object_)
        ),
        st.sampled_from([LARGE_TENSOR_BYTES // 4, LARGE_TENSOR_BYTES * 2]).map(
            lambda size: np.arange(size, dtype=np.float32)
        ),
    ),
)
parameter_values = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False),
    st.text(max_size=5),
)


@given(
    st.lists(tensors, max_size=4),
    st.dictionaries(st.text(min_size=1, max_size=5), parameter_values, max_size=3),
    st.one_of(st.none(), st.booleans()),
)
def test_responses_round_trip(
    outputs: list[Tensor], parameters: dict[str, Any], final: bool | None
) -> None:
    """What is encoded by hand is what protobuf reads, inside a stream message too."""
    response = InferenceResponse(outputs, parameters=parameters, model_name="m", model_version="3")
    message = codec.infer_response_message(response, "id", final)
    raw: list[Buffer] = []
    for tensor in outputs:
        codec.add_output(message, raw, tensor)
    parts = codec.serialize_infer_response(message, raw)
    wrapped = codec.wrap_in_stream_response(parts)
    plain = pb.ModelInferResponse.FromString(b"".join(parts))
    streamed = pb.ModelStreamInferResponse.FromString(b"".join(wrapped)).infer_response
    assert plain == streamed
    assert (plain.id, plain.model_name, plain.model_version) == ("id", "m", "3")
    assert [o.name for o in plain.outputs] == [t.name for t in outputs]
    assert list(plain.raw_output_contents) == [bytes(t.data) for t in outputs]
    assert ("triton_final_response" in plain.parameters) == (final is not None)
    for key, value in parameters.items():
        kind = plain.parameters[key].WhichOneof("parameter_choice")
        assert kind is not None
        assert getattr(plain.parameters[key], kind) == value


@given(st.lists(tensors, max_size=3, unique_by=lambda tensor: tensor.name))
def test_requests_round_trip(inputs: list[Tensor]) -> None:
    """Tensors sent as raw contents arrive as they were."""
    message = pb.ModelInferRequest(model_name="m")
    for tensor in inputs:
        message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        message.raw_input_contents.append(bytes(tensor.data))
    request = decode(message)
    assert list(request.inputs) == [tensor.name for tensor in inputs]
    for sent, got in zip(inputs, request.inputs.values(), strict=True):
        assert (got.datatype, list(got.shape)) == (sent.datatype, list(sent.shape))
        assert bytes(got.data) == bytes(sent.data)


def test_a_response_beyond_grpcs_limit_is_refused() -> None:
    """A response larger than INT_MAX is told in Triton's words."""

    class Huge(bytes):
        def __len__(self) -> int:
            return 2**31

    with pytest.raises(InvalidArgumentError) as caught:
        codec.serialize_infer_response(pb.ModelInferResponse(), [Huge()])
    assert str(caught.value) == (
        "Response has byte size 2147483648 which exceeds gRPC's byte size limit 2147483647."
    )


def test_output_options() -> None:
    """Classification and shared memory of requested outputs are read; plain ones cost nothing."""
    message = pb.ModelInferRequest(outputs=[{"name": "A"}])
    assert codec.output_options(message) is None
    output = message.outputs.add(name="B")
    output.parameters["classification"].int64_param = 3
    memory = message.outputs.add(name="C")
    set_parameter(memory.parameters["shared_memory_region"], "r")
    set_parameter(memory.parameters["shared_memory_byte_size"], 64)
    assert codec.output_options(message) == {
        "B": codec.OutputOption(3, None),
        "C": codec.OutputOption(0, SharedMemoryReference("r", 0, 64)),
    }


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("classification", 0, "invalid value for 'classification' parameter, expected >= 0"),
        ("classification", -1, "invalid value for 'classification' parameter, expected >= 0"),
        (
            "classification",
            "3",
            "invalid value type for 'classification' parameter, expected int64_param",
        ),
        (
            "shared_memory_byte_size",
            8,
            "'shared_memory_byte_size' can not be specified without 'shared_memory_region' "
            "parameter for tensor 'B'",
        ),
    ],
)
def test_wrong_output_options(key: str, value: ParameterValue, text: str) -> None:
    """With the texts of Triton 2.51."""
    message = pb.ModelInferRequest(outputs=[{"name": "B"}])
    set_parameter(message.outputs[0].parameters[key], value)
    with pytest.raises(InvalidArgumentError) as caught:
        codec.output_options(message)
    assert str(caught.value) == text


def test_bytes_stay_in_wire_form() -> None:
    """BYTES contents are length-prefixed exactly as raw ones would be."""
    values = [b"\xff", b"x" * 300]
    tensor = decode(typed("BYTES", "bytes_contents", values)).inputs["IN"]
    array = np.empty(2, np.object_)
    array[:] = values
    assert bytes(tensor.data) == serialize_bytes(array)
