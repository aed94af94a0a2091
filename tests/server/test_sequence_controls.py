"""Control tensors of sequence batchers."""

from __future__ import annotations

import pytest
from google.protobuf import text_format

from npuserve.errors import InvalidArgumentError
from npuserve.model_config import ModelConfig
from npuserve.request import SEQUENCE_END, SEQUENCE_START
from npuserve.server.sequence_controls import SequenceControls


def controls(entries: str, max_batch_size: int = 4) -> SequenceControls:
    text = f'name: "m" max_batch_size: {max_batch_size} sequence_batching {{ {entries} }}'
    return SequenceControls(text_format.Parse(text, ModelConfig()))


def entry(kind: str, values: str) -> str:
    return (
        f'control_input {{ name: "{kind}" control {{ kind: CONTROL_SEQUENCE_{kind} {values} }} }}'
    )


@pytest.mark.parametrize(
    ("values", "datatype", "false", "true"),
    [
        ("int32_false_true: [ 5, 6 ]", "INT32", 5, 6),
        ("fp32_false_true: [ -1, 7.5 ]", "FP32", -1, 7.5),
        ("bool_false_true: [ false, true ]", "BOOL", False, True),
    ],
)
def test_flags_have_the_configured_values(
    values: str, datatype: str, false: float, true: float
) -> None:
    """Every kind of pair works for START, END and READY."""
    made = controls("".join(entry(kind, values) for kind in ("START", "END", "READY")))
    for flags in range(4):
        tensors = made.flags(flags)
        got = {name: tensor.as_numpy().item() for name, tensor in tensors.items()}
        assert got == {
            "START": true if flags & SEQUENCE_START else false,
            "END": true if flags & SEQUENCE_END else false,
            "READY": true,
        }
        assert {tensor.datatype for tensor in tensors.values()} == {datatype}
    assert {tensor.as_numpy().item() for tensor in made.filler.values()} == {false}


@pytest.mark.parametrize(("max_batch_size", "shape"), [(0, (1,)), (4, (1, 1))])
def test_the_shape_has_a_batch_dimension_where_the_model_has(
    max_batch_size: int, shape: tuple[int, ...]
) -> None:
    """[1] or [1, 1]."""
    made = controls(
        entry("START", "int32_false_true: [ 0, 1 ]") + entry("CORRID", "data_type: TYPE_UINT64"),
        max_batch_size,
    )
    tensors = {**made.flags(0), **made.correlation_id_tensor(1)}
    assert {tuple(tensor.shape) for tensor in tensors.values()} == {shape}


@pytest.mark.parametrize(
    ("datatype", "given", "seen"),
    [
        ("UINT64", 2**64 - 1, 2**64 - 1),
        ("INT64", 2**64 - 1, -1),
        ("UINT32", 2**32 + 5, 5),
        ("INT32", 2**31, -(2**31)),
        ("STRING", "用户-1", "用户-1".encode()),
        ("STRING", 5, b"5"),
    ],
)
def test_the_correlation_id_comes_in_the_declared_datatype(
    datatype: str, given: int | str, seen: int | bytes
) -> None:
    """Numbers are cut to the width, texts are one element."""
    made = controls(entry("CORRID", f"data_type: TYPE_{datatype}"))
    made.check(given)
    assert made.correlation_id_tensor(given)["CORRID"].as_numpy().item() == seen


def test_a_filler_has_no_correlation_id() -> None:
    """0, or an empty text."""
    number = controls(entry("CORRID", "data_type: TYPE_UINT64")).filler
    text = controls(entry("CORRID", "data_type: TYPE_STRING")).filler
    assert number["CORRID"].as_numpy().item() == 0
    assert text["CORRID"].as_numpy().item() == b""


def test_a_text_for_a_numeric_control_is_refused() -> None:
    """The text names the input and both datatypes."""
    made = controls(entry("CORRID", "data_type: TYPE_UINT64"))
    with pytest.raises(InvalidArgumentError) as caught:
        made.check("abc")
    assert str(caught.value) == (
        "sequence batching control 'CORRID' data-type is 'BYTES', but model 'm' expects 'UINT64'"
    )
