"""Implicit state: initial tensors, what is taken out of a response, and bad settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from numpy.typing import NDArray

from npuserve.errors import InternalError, InvalidArgumentError
from npuserve.model_config import ModelConfig
from npuserve.response import InferenceResponse
from npuserve.server.implicit_state import ImplicitState
from npuserve.tensor import Tensor


def state(
    *entries: str, max_batch_size: int = 4, outputs: str = "", model_dir: Path = Path()
) -> ImplicitState:
    states = "".join(f"state {{ {each} }}" for each in entries)
    config = text_format.Parse(
        f'name: "m" max_batch_size: {max_batch_size} {outputs} sequence_batching {{ {states} }}',
        ModelConfig(),
    )
    return ImplicitState(config, model_dir)


def entry(
    extra: str = "", name: str = "SI", output: str = "SO", kind: str = "FP32", dims: str = "2"
) -> str:
    return (
        f'input_name: "{name}" output_name: "{output}" data_type: TYPE_{kind} dims: [ {dims} ] '
        + extra
    )


def initial(source: str = "zero_data: true", kind: str = "FP32", dims: str = "2") -> str:
    return f'initial_state {{ name: "init" data_type: TYPE_{kind} dims: [ {dims} ] {source} }}'


def floats(values: list[Any]) -> NDArray[np.float32]:
    return np.array(values, np.float32)


def response(**outputs: NDArray[Any]) -> InferenceResponse:
    return InferenceResponse([Tensor.from_numpy(name, value) for name, value in outputs.items()])


@pytest.mark.parametrize(("max_batch_size", "shape"), [(0, (3, 1)), (4, (1, 3, 1))])
def test_without_initial_state_the_first_input_is_zero(
    max_batch_size: int, shape: tuple[int, ...]
) -> None:
    """A variable dimension is 1, and a batch dimension is added where the model has one."""
    made = state(entry(dims="3, -1"), max_batch_size=max_batch_size).initial["SI"]
    assert tuple(made.shape) == shape
    assert not made.as_numpy().any()


def test_one_output_may_feed_two_inputs() -> None:
    """Both are there from the first request on, and both get what the model writes."""
    states = state(entry(name="A"), entry(name="B"))
    assert list(states.initial) == ["A", "B"]
    held = states.absorb(states.initial, response(SO=floats([[1, 2]])))
    assert [held[name].as_numpy().tolist() for name in ("A", "B")] == [[[1, 2]], [[1, 2]]]


def test_zero_text_is_empty_text() -> None:
    """Every element is there, with length 0."""
    made = state(entry(kind="STRING", dims="3"), max_batch_size=0).initial["SI"]
    assert made.as_numpy().tolist() == [b"", b"", b""]


def test_an_initial_state_comes_from_a_file(tmp_path: Path) -> None:
    """Raw bytes below initial_state of the model directory; its dims settle variable ones."""
    (tmp_path / "initial_state").mkdir()
    (tmp_path / "initial_state" / "start.bin").write_bytes(floats([[1, 2]]).tobytes())
    given = entry(initial('data_file: "start.bin"', dims="1, 2"), dims="-1, 2")
    made = state(given, model_dir=tmp_path).initial["SI"]
    assert made.as_numpy().tolist() == [[[1, 2]]]


@pytest.mark.parametrize(
    ("content", "name", "text"),
    [
        (
            b"\0" * 7,
            "start.bin",
            "expects 8 bytes, but the data provided from start.bin only has 7",
        ),
        (b"\0" * 9, "start.bin", "expects 8 bytes, but the data provided from start.bin has 9"),
        (b"", "other.bin", "failed to read initial_state data file"),
        (b"", "../../etc/passwd", "is outside of"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(
    tmp_path: Path, content: bytes, name: str, text: str
) -> None:
    """Wrong size, missing, or outside of its directory."""
    (tmp_path / "initial_state").mkdir()
    (tmp_path / "initial_state" / "start.bin").write_bytes(content)
    with pytest.raises(InvalidArgumentError, match=text):
        state(entry(initial(f'data_file: "{name}"')), model_dir=tmp_path)


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        (
            [entry(initial() + initial())],
            "initial_state field for state input 'SI' must contain exactly one or zero element. "
            "Found '2' elements.",
        ),
        (
            [entry(initial(kind="INT32"))],
            "The data type used for 'initial_state' field of state 'SI' does not match the state "
            "data type.",
        ),
        (
            [entry(initial().replace('name: "init"', ""))],
            "Field 'name' must be set when using initial_state for state input 'SI'.",
        ),
        ([entry(), entry(output="S2")], "State input name 'SI' specified more than once."),
        (
            [entry(initial(dims="2, 2"))],
            "Number of dimensions in 'initial_state' doesn't match the size of 'state' "
            "dimensions for state input 'SI'. 2 != 1",
        ),
        (
            [entry(initial(dims="-1"), dims="-1")],
            "'initial_state' field for state input name 'SI' contains variable dimensions.",
        ),
        (
            [entry(initial(dims="3"))],
            "'initial_state' dim for input name 'SI' doesn't match 'state' dim description. 3 != 2",
        ),
    ],
)
def test_bad_settings_have_the_texts_of_triton(entries: list[str], text: str) -> None:
    """Each rule on its own."""
    with pytest.raises(InvalidArgumentError) as caught:
        state(*entries)
    assert str(caught.value) == text


def test_state_outputs_leave_the_response() -> None:
    """They become the next inputs; the client's outputs stay."""
    made = state(entry(), entry(name="TI", output="TO"))
    answer = response(OUT=floats([[9]]), SO=floats([[1, 2]]), TO=floats([[3, 4]]))
    held = made.absorb(made.initial, answer)
    assert [tensor.name for tensor in answer.outputs] == ["OUT"]
    assert {name: tensor.as_numpy().tolist() for name, tensor in held.items()} == {
        "SI": [[1, 2]],
        "TI": [[3, 4]],
    }


def test_a_state_that_is_also_an_output_stays_visible() -> None:
    """For debugging, a state may be listed among the outputs."""
    made = state(entry(), outputs='output { name: "SO" data_type: TYPE_FP32 dims: 2 }')
    answer = response(SO=floats([[1, 2]]))
    made.absorb(made.initial, answer)
    assert [tensor.name for tensor in answer.outputs] == ["SO"]


def test_a_state_the_model_leaves_out_is_kept() -> None:
    """The next request sees it again."""
    made = state(entry(), entry(name="TI", output="TO"))
    held = made.absorb(made.initial, response(SO=floats([[1, 2]])))
    held = made.absorb(held, response(TO=floats([[3, 4]])))
    assert held["SI"].as_numpy().tolist() == [[1, 2]]


def test_datatype_and_variable_dimensions_may_change_between_steps() -> None:
    """The next input is what the model wrote."""
    made = state(entry(dims="-1"))
    held = made.absorb(made.initial, response(SO=np.array([[1, 2, 3]], np.int64)))
    assert (held["SI"].datatype, tuple(held["SI"].shape)) == ("INT64", (1, 3))


@pytest.mark.parametrize("value", [floats([[1, 2, 3]]), floats([1, 2])])
def test_a_state_of_the_wrong_shape_is_an_error(value: NDArray[Any]) -> None:
    """The text shows both shapes."""
    made = state(entry())
    text = "unexpected shape for state 'SO' for model 'm'. Expected [1,2], got "
    with pytest.raises(InternalError) as caught:
        made.absorb(made.initial, response(SO=value))
    assert str(caught.value).startswith(text)


def test_a_state_does_not_hold_the_buffer_it_came_in() -> None:
    """A sequence may rest for long; the worker's memory must not wait for it."""
    made = state(entry())
    array = floats([[1, 2]])
    held = made.absorb(made.initial, response(SO=array))
    array[:] = 0
    assert held["SI"].as_numpy().tolist() == [[1, 2]]
