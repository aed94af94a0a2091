"""Auto-completion and checking of a configuration against a model's file."""

from __future__ import annotations

import pytest

from npuserve.backends.model_signature import (
    ModelSignature,
    ModelTensor,
    check_config,
    complete_config,
)
from npuserve.errors import InvalidArgumentError
from tests.backends.onnx_models import config

BATCHING = ModelSignature(
    (ModelTensor("IN", "FP32", (-1, 16)),), (ModelTensor("OUT", "INT64", (-1, -1, 2)),)
)
FIXED = ModelSignature((ModelTensor("IN", "FP32", (1, 3)),), (ModelTensor("OUT", "FP32", (1, 2)),))
FILLED_IN = 'input { name: "IN" data_type: TYPE_FP32 dims: 16 }'
FILLED_OUT = 'output { name: "OUT" data_type: TYPE_INT64 dims: [ -1, 2 ] }'


def test_an_empty_configuration_is_filled_from_the_file() -> None:
    """A model that can batch gets Triton's default of 4, its tensors and a dynamic batcher."""
    completed = config()
    complete_config(completed, BATCHING)
    assert completed == config(
        f"max_batch_size: 4 {FILLED_IN} {FILLED_OUT} dynamic_batching {{ preferred_batch_size: 4 }}"
    )


def test_the_default_batch_size_can_be_given() -> None:
    """`default-max-batch-size` of the backend's options takes the place of 4."""
    completed = config()
    complete_config(completed, BATCHING, 32)
    assert completed.max_batch_size == 32


def test_a_default_batch_size_of_one_brings_no_batcher() -> None:
    """There is nothing to batch then."""
    completed = config()
    complete_config(completed, BATCHING, 1)
    assert completed.max_batch_size == 1
    assert completed.WhichOneof("scheduling_choice") is None


def test_a_model_with_a_fixed_first_dimension_does_not_batch() -> None:
    """The whole shape becomes dims."""
    completed = config()
    complete_config(completed, FIXED)
    assert completed.max_batch_size == 0
    assert list(completed.input[0].dims) == [1, 3]
    assert completed.WhichOneof("scheduling_choice") is None


def test_configured_dims_mean_that_max_batch_size_zero_is_meant() -> None:
    """An explicit 0 cannot be seen, dims can."""
    completed = config('input { name: "IN" data_type: TYPE_FP32 dims: [ -1, 16 ] }')
    complete_config(completed, BATCHING)
    assert completed.max_batch_size == 0


def test_a_name_alone_is_completed() -> None:
    """Type and dims come from the file, by name; outputs left out stay left out."""
    signature = ModelSignature(
        BATCHING.inputs, (*BATCHING.outputs, ModelTensor("EXTRA", "FP32", (-1,)))
    )
    completed = config('max_batch_size: 8 input { name: "IN" } output { name: "OUT" }')
    complete_config(completed, signature)
    assert list(completed.input[0].dims) == [16]
    assert [output.name for output in completed.output] == ["OUT"]


def test_a_given_scheduler_is_kept() -> None:
    """A sequence model stays one."""
    completed = config("max_batch_size: 8 sequence_batching { }")
    complete_config(completed, BATCHING)
    assert completed.WhichOneof("scheduling_choice") == "sequence_batching"


def test_tensors_of_the_scheduler_are_not_for_clients() -> None:
    """Sequence controls and states are inputs of the file, not of the configuration."""
    signature = ModelSignature(
        (
            ModelTensor("IN", "FP32", (-1, 16)),
            ModelTensor("START", "INT32", (-1, 1)),
            ModelTensor("STATE_IN", "FP32", (-1, 2)),
        ),
        (ModelTensor("OUT", "FP32", (-1, 2)), ModelTensor("STATE_OUT", "FP32", (-1, 2))),
    )
    completed = config(
        """max_batch_size: 8 sequence_batching {
          control_input { name: "START"
            control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }
          state { input_name: "STATE_IN" output_name: "STATE_OUT" data_type: TYPE_FP32 dims: 2 } }
        """
    )
    complete_config(completed, signature)
    check_config(completed, signature)
    assert [tensor.name for tensor in completed.input] == ["IN"]
    assert [tensor.name for tensor in completed.output] == ["OUT"]


def test_a_scalar_is_one_element() -> None:
    """Triton's configuration cannot say scalar."""
    signature = ModelSignature(
        (ModelTensor("IN", "FP32", (-1,)),), (ModelTensor("MAX", "FP32", ()),)
    )
    completed = config()
    complete_config(completed, signature)
    check_config(completed, signature)
    assert list(completed.output[0].dims) == [1]


@pytest.mark.parametrize(
    ("text", "signature", "message"),
    [
        pytest.param(
            "max_batch_size: 256",
            FIXED,
            r"model does not support batching .* tensor 'IN' \(shape \[1,3\]\).*max_batch_size: 0",
            id="fixed batch",
        ),
    ],
)
def test_refused_while_completing(text: str, signature: ModelSignature, message: str) -> None:
    """Batching asked of a model that cannot batch: the tensor and the cure are named."""
    with pytest.raises(InvalidArgumentError, match=message):
        complete_config(config(text), signature)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(
            f'{FILLED_IN} input {{ name: "B" data_type: TYPE_FP32 dims: 1 }} {FILLED_OUT}',
            r"unable to load model 'm', configuration expects 2 inputs, model provides 1 \(IN\)",
            id="count",
        ),
        pytest.param(
            f'input {{ name: "X" data_type: TYPE_FP32 dims: 16 }} {FILLED_OUT}',
            "unexpected inference input 'X', allowed inputs are: IN",
            id="input name",
        ),
        pytest.param(
            f'{FILLED_IN} output {{ name: "Y" data_type: TYPE_INT64 dims: 2 }}',
            "unexpected inference output 'Y', allowed outputs are: OUT",
            id="output name",
        ),
        pytest.param(
            f'input {{ name: "IN" data_type: TYPE_INT32 dims: 16 }} {FILLED_OUT}',
            "configuration expects datatype TYPE_INT32 for input 'IN', model provides TYPE_FP32",
            id="datatype",
        ),
        pytest.param(
            f'input {{ name: "IN" data_type: TYPE_FP32 dims: [ 16, 1 ] }} {FILLED_OUT}',
            r"model 'm', tensor 'IN': the model expects 2 dimensions \(shape \[-1,16\]\) but the "
            r"model configuration specifies 3 dimensions \(an initial batch dimension because "
            r"max_batch_size > 0 followed by the explicit tensor shape, making complete shape "
            r"\[-1,16,1\]\)",
            id="rank",
        ),
        pytest.param(
            f'input {{ name: "IN" data_type: TYPE_FP32 dims: 17 }} {FILLED_OUT}',
            r"making complete shape \[-1,17\]",
            id="size",
        ),
    ],
)
def test_a_contradiction_is_refused(text: str, message: str) -> None:
    """With Triton's text."""
    with pytest.raises(InvalidArgumentError, match=message):
        check_config(config(f"max_batch_size: 8 {text}"), BATCHING)


def test_batching_is_refused_without_auto_completion_too() -> None:
    """The check does not rely on `complete_config` having run."""
    text = 'max_batch_size: 8 input { name: "IN" data_type: TYPE_FP32 dims: 3 }'
    with pytest.raises(
        InvalidArgumentError, match=r"the first dimension must be -1; but .*\[1,3\]"
    ):
        check_config(config(text), FIXED)


def test_concrete_dims_fit_free_ones() -> None:
    """A file of free dimensions takes any configured size (onnxruntime_backend#165)."""
    free = ModelSignature((ModelTensor("IN", "FP32", (-1, -1, -1)),), ())
    check_config(config('input { name: "IN" data_type: TYPE_FP32 dims: [ 1, 3, 2 ] }'), free)


def test_reshape_is_what_the_file_sees() -> None:
    """Dims differ from the file, the reshape does not."""
    text = 'input { name: "IN" data_type: TYPE_FP32 dims: [ 4, 4 ] reshape { shape: 16 } }'
    check_config(config(f"max_batch_size: 8 {text} {FILLED_OUT}"), BATCHING)
