"""Infer messages: JSON and binary data to values and back."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npuserve.errors import InvalidArgumentError, UnsupportedError
from npuserve.protocol.http.codec import (
    InferMessage,
    Output,
    decode_infer,
    decode_raw,
    encode_infer,
)
from npuserve.protocol.http.json_text import parse_json
from npuserve.request import SEQUENCE_END, SEQUENCE_START
from npuserve.response import InferenceResponse
from npuserve.tensor import Tensor


def no_region(name: str, offset: int, size: int) -> bytes:
    raise AssertionError("no shared memory here")


def decode(document: Any, binary: bytes = b"") -> InferMessage:
    return decode_infer(document, binary, "m", no_region)


def entry(**changes: Any) -> dict[str, Any]:
    return {"name": "x", "datatype": "INT32", "shape": [2], "data": [1, 2], **changes}


def encode(response: InferenceResponse, message: InferMessage) -> tuple[Any, list[bytes]]:
    response.model_name, response.model_version = "m", "1"
    head, blobs = encode_infer(response, message, {}, labels=lambda name: [], batched=False)
    return parse_json(head), [bytes(blob) for blob in blobs]


tensors = st.lists(st.tuples(st.binary(max_size=40), st.booleans()), min_size=1, max_size=5)


@given(tensors)
def test_binary_inputs_are_cut_in_their_order(parts: list[tuple[bytes, bool]]) -> None:
    """Each input gets its own bytes; JSON inputs between them take none."""
    inputs, binary = [], b""
    for number, (blob, is_binary) in enumerate(parts):
        fields: dict[str, Any] = {"name": f"x{number}", "datatype": "UINT8", "shape": [len(blob)]}
        if is_binary:
            fields["parameters"] = {"binary_data_size": len(blob)}
            binary += blob
        else:
            fields["data"] = list(blob)
        inputs.append(fields)
    message = decode({"inputs": inputs}, binary)
    assert [bytes(t.data) for t in message.inputs.values()] == [blob for blob, _ in parts]


@given(tensors)
def test_outputs_come_back_in_order(parts: list[tuple[bytes, bool]]) -> None:
    """Decoding what was encoded gives the same tensors, JSON or binary."""
    message = InferMessage()
    outputs = []
    for number, (blob, is_binary) in enumerate(parts):
        message.outputs[f"y{number}"] = Output(binary=is_binary)
        outputs.append(Tensor(f"y{number}", "UINT8", [len(blob)], blob))
    head, blobs = encode(InferenceResponse(outputs), message)
    back = decode({"inputs": head["outputs"]}, b"".join(blobs)).inputs
    assert [bytes(t.data) for t in back.values()] == [blob for blob, _ in parts]


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ([], "non-existing object member 'inputs'"),
        ({}, "non-existing object member 'inputs'"),
        ({"inputs": {}}, "'inputs': attempt to access JSON non-array as array"),
        ({"inputs": [5]}, "'inputs': attempt to access JSON non-object as object"),
        ({"inputs": [], "id": 5}, "'id': attempt to access JSON non-string"),
        ({"inputs": [], "parameters": []}, "failed to get request params"),
        ({"inputs": [{}]}, "But no field is set"),
        ({"inputs": [entry(data=None)]}, "'data': attempt to access JSON non-array as array"),
        ({"inputs": [], "parameters": {"sequence_id": -1}}, "'sequence_id': attempt to access"),
        ({"inputs": [], "parameters": {"sequence_id": 2**64}}, "JSON non-string as string"),
        ({"inputs": [], "parameters": {"sequence_id": None}}, "JSON non-string as string"),
        (
            {"inputs": [entry(parameters={"shared_memory_offset": None})]},
            "'shared_memory_offset': attempt to access JSON non-unsigned-integer",
        ),
        (
            {
                "inputs": [],
                "outputs": [{"name": "y", "parameters": {"shared_memory_byte_size": "4"}}],
            },
            "'shared_memory_byte_size': attempt to access JSON non-unsigned-integer",
        ),
        (
            {"inputs": [entry(parameters={"binary_data_size": 8})]},
            "But set 'data' 'binary_data_size'",
        ),
        ({"inputs": [{"data": []}]}, "member 'name'"),
        ({"inputs": [entry(shape=[-1])]}, "non-unsigned-integer"),
        ({"inputs": [entry(shape=[True])]}, "non-unsigned-integer"),
        ({"inputs": [entry(shape=[2**63])]}, "non-unsigned-integer"),
        ({"inputs": [entry(shape=2)]}, "'shape': attempt to access JSON non-array"),
        ({"inputs": [entry(), entry()]}, "input 'x' already exists in request"),
        ({"inputs": [], "outputs": [{}]}, "member 'name'"),
        ({"inputs": [], "outputs": {}}, "'outputs': attempt to access JSON non-array as array"),
        ({"inputs": [], "outputs": ""}, "'outputs': attempt to access JSON non-array as array"),
        ({"inputs": [], "outputs": 0}, "'outputs': attempt to access JSON non-array as array"),
        (
            {"inputs": [], "outputs": [{"name": "y", "parameters": {"binary_data": 1}}]},
            "'binary_data': attempt to access JSON non-boolean",
        ),
        (
            {
                "inputs": [],
                "outputs": [
                    {
                        "name": "y",
                        "parameters": {
                            "shared_memory_region": "r",
                            "shared_memory_byte_size": 4,
                            "classification": 1,
                        },
                    }
                ],
            },
            "can't set both 'shared_memory_region' and 'classification'",
        ),
        ({"inputs": [], "parameters": {"triton_x": 1}}, "reserved for Triton usage"),
        ({"inputs": [], "parameters": {"p": [1]}}, "parameter 'p' has invalid type"),
        ({"inputs": [], "parameters": {"priority": -1}}, "'priority': attempt"),
        ({"inputs": [], "parameters": {"sequence_start": 1}}, "'sequence_start': attempt"),
    ],
)
def test_malformed_requests_say_what_is_wrong(document: Any, text: str) -> None:
    """Every mistake has its own message."""
    with pytest.raises(InvalidArgumentError, match=text.replace("(", r"\(")):
        decode(document)


def test_binary_data_must_add_up() -> None:
    """Too little and too much are told apart."""
    fields = {"name": "x", "datatype": "INT8", "shape": [4], "parameters": {"binary_data_size": 4}}
    with pytest.raises(InvalidArgumentError, match="expecting 1 additional bytes for model 'm'"):
        decode({"inputs": [fields]}, b"abc")
    with pytest.raises(InvalidArgumentError, match="unexpected additional input data"):
        decode({"inputs": [fields]}, b"abcde")


def test_parameters_with_a_meaning_are_no_custom_ones() -> None:
    """Only the rest goes to the model."""
    message = decode(
        {
            "inputs": [],
            "parameters": {
                "sequence_id": "s", "sequence_start": True, "sequence_end": True, "priority": 2,
                "timeout": 5, "binary_data_output": True, "temperature": 0.7, "n": 1, "b": False,
            },
        }
    )  # fmt: skip
    assert message.correlation_id == "s"
    assert message.flags == SEQUENCE_START | SEQUENCE_END
    assert (message.priority, message.timeout_us) == (2, 5)
    assert message.default_output.binary
    assert message.parameters == {"temperature": 0.7, "n": 1, "b": False}


@pytest.mark.parametrize("datatype", ["INT32", "BOOL", "BYTES", "FP16", "unknown"])
@pytest.mark.parametrize("data", [None, [], {}, "x", 5, [1], [None], [["x"]]])
def test_data_of_an_empty_tensor_may_be_anything(datatype: str, data: Any) -> None:
    """As with Triton, which does not look at it where a dimension is 0."""
    message = decode({"inputs": [entry(datatype=datatype, shape=[2, 0, 2**62], data=data)]})
    assert len(message.inputs["x"].data) == 0


def test_null_is_no_second_source_of_data() -> None:
    """As if it were left out."""
    members = {"data": None, "parameters": {"binary_data_size": 8}}
    assert (
        bytes(decode({"inputs": [entry(**members)]}, b"12345678").inputs["x"].data) == b"12345678"
    )
    parameters = {"binary_data_size": None, "shared_memory_region": None}
    assert len(decode({"inputs": [entry(parameters=parameters)]}).inputs["x"].data) == 8


@pytest.mark.parametrize("parameters", [None, "x", "", 5, [], [1], True])
def test_parameters_of_an_output_that_are_no_object_are_none(parameters: Any) -> None:
    """Triton ignores them."""
    outputs = [{"name": "y", "parameters": parameters}]
    assert decode({"inputs": [], "outputs": outputs}).outputs == {"y": Output()}


def test_a_region_without_a_size_is_one_of_no_bytes() -> None:
    """As with Triton over HTTP; no region gives so few."""
    outputs = [{"name": "y", "parameters": {"shared_memory_region": "r"}}]
    assert decode({"inputs": [], "outputs": outputs}).outputs["y"].region == ("r", 0, 0)


def test_an_empty_sequence_id_is_a_text() -> None:
    """A model sees it as the client sent it."""
    assert decode({"inputs": [], "parameters": {"sequence_id": ""}}).correlation_id == ""


def test_text_sequence_ids_have_at_most_128_bytes() -> None:
    """Whatever the model; looked at before the inputs, as Triton does."""
    for text in ("x" * 129, "\u6a21" * 43):
        with pytest.raises(UnsupportedError, match="cannot be longer than 128 characters"):
            decode({"parameters": {"sequence_id": text}, "inputs": 5})


def test_a_listed_output_says_itself_whether_it_is_binary() -> None:
    """`binary_data_output` is for requests that list no outputs."""
    message = decode(
        {"inputs": [], "parameters": {"binary_data_output": True}, "outputs": [{"name": "y"}]}
    )
    head, blobs = encode(InferenceResponse([Tensor("y", "INT8", [1], b"\5")]), message)
    assert head["outputs"][0]["data"] == [5]
    assert blobs == []


def test_of_an_output_listed_twice_the_first_counts() -> None:
    """As in Triton 2.51."""
    binary = {"name": "y", "parameters": {"binary_data": True}}
    for entries in ([{"name": "y"}, binary], [binary, {"name": "y"}]):
        message = decode({"inputs": [], "outputs": entries})
        assert message.outputs == {"y": Output(binary=entries[0] is binary)}


def test_null_is_no_value() -> None:
    """Clients that are generated from a schema send it for what they leave out."""
    message = decode({"inputs": [entry(parameters=None)], "outputs": None, "id": None})
    assert (message.id, message.outputs) == ("", {})
    assert bytes(message.inputs["x"].data) == bytes(decode({"inputs": [entry()]}).inputs["x"].data)


def test_outputs_nobody_asked_for_are_left_out() -> None:
    """The model's order is kept."""
    message = decode({"inputs": [], "outputs": [{"name": "c"}, {"name": "a"}]})
    outputs = [Tensor(name, "INT8", [1], b"\1") for name in "abc"]
    head, _ = encode(InferenceResponse(outputs), message)
    assert [output["name"] for output in head["outputs"]] == ["a", "c"]


def test_nan_and_infinity_are_written_as_triton_does() -> None:
    """Python's json reads them; other outputs of the reply stay as they are."""
    outputs = [
        Tensor.from_numpy("f", np.array([np.nan, np.inf, -np.inf, 1], np.float32)),
        Tensor.from_numpy("i", np.array([1], np.int64)),
    ]
    response = InferenceResponse(outputs, model_name="m", model_version="1")
    response.parameters = {"n": math.nan, "i": -math.inf, "x": 0.5}
    message = InferMessage()
    text, _ = encode_infer(response, message, {}, labels=lambda name: [], batched=False)
    assert b'"parameters":{"n":NaN,"i":-Infinity,"x":0.5}' in text
    assert b"[NaN,Infinity,-Infinity,1.0]" in text
    assert json.loads(text)["outputs"][1]["data"] == [1]


SPECS = {"x": ("INT32", [-1, 2])}


def test_a_raw_body_takes_the_shape_of_the_only_input() -> None:
    """The variable dimension follows from the size; a batch of one is added."""
    message = decode_raw(bytes(24), "m", SPECS, 8)
    assert list(message.inputs["x"].shape) == [1, 3, 2]
    assert message.default_output.binary
    text = decode_raw(b"hi", "m", {"x": ("BYTES", [1])}, 0).inputs["x"]
    assert bytes(text.data) == b"\2\0\0\0hi"


@pytest.mark.parametrize(
    ("specs", "body", "text"),
    [
        ({**SPECS, "z": ("INT8", [1])}, b"", "must only have 1 input .* but got 2 inputs in 'm'"),
        ({"x": ("INT8", [-1, -1])}, b"", "more than one variable-sized dimension"),
        ({"x": ("BYTES", [2])}, b"", r"the model must have input shape \[1\]"),
        (SPECS, bytes(9), "input byte size mismatch for input 'raw_input'.* Expected 8, got 9"),
    ],
)
def test_raw_bodies_that_cannot_be_deduced(specs: Any, body: bytes, text: str) -> None:
    """Triton's messages, without an id."""
    with pytest.raises(InvalidArgumentError, match=r"\[request id: <id_unknown>\] .*" + text):
        decode_raw(body, "m", specs, 0)
