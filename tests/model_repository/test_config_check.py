"""Every rule of a configuration, with Triton's words."""

from __future__ import annotations

import pytest

from npuserve.errors import InvalidArgumentError
from npuserve.model_repository.config_check import validate
from npuserve.model_repository.pbtxt import parse_config

PLAIN = 'name: "m" backend: "python" max_batch_size: 4 '


def problems(text: str, completed: bool = True) -> str:
    config = parse_config(text, "config.pbtxt")
    with pytest.raises(InvalidArgumentError) as caught:
        validate(config, "/repo/m", completed=completed)
    return str(caught.value)


def accept(text: str, completed: bool = True) -> None:
    validate(parse_config(text, "config.pbtxt"), "/repo/m", completed=completed)


@pytest.mark.parametrize(
    "text",
    [
        PLAIN,
        'name: "m" platform: "onnxruntime_onnx" backend: "onnxruntime"',
        'name: "m" platform: "onnxruntime_onnx" backend: "python"',
        PLAIN + "input { name: 'I' data_type: TYPE_FP32 dims: [ 3, -1 ] }",
        PLAIN + "input { name: 'I' data_type: TYPE_FP32 dims: 1 reshape { shape: [] } }",
        PLAIN
        + "input { name: 'I' data_type: TYPE_FP32 dims: [2,4,-1,6] reshape { shape: [8,-1,1,6] } }",
        PLAIN + "output { name: 'O' data_type: TYPE_FP32 dims: 1 label_filename: 'a/../l.txt' }",
        PLAIN + "dynamic_batching { preferred_batch_size: [ 2, 4 ] }",
        PLAIN + "dynamic_batching { priority_levels: 2 default_priority_level: 2 }",
        PLAIN + "instance_group { kind: KIND_GPU gpus: [ 0 ] }",
        "name: 'm' backend: 'python' dynamic_batching {}",
        PLAIN + "output { name: 'O' data_type: TYPE_FP32 dims: 1 }" * 2,
    ],
)
def test_sound_configurations_pass(text: str) -> None:
    """What Triton serves is not refused."""
    accept(text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('name: "m"', "must specify 'platform' or 'backend' for 'm'"),
        ('name: "m" platform: "python_backend"', "unexpected platform type 'python_backend' for m"),
        (
            'name: "m" platform: "onnxruntime_onnx" backend: "pytorch"',
            "unexpected 'platform' and 'backend' pair, got:onnxruntime_onnx, pytorch",
        ),
        (
            'name: "m" backend: "python" max_batch_size: -1',
            "'max_batch_size' must be non-negative value for m",
        ),
        (
            PLAIN + "response_cache { enable: true } sequence_batching {}",
            "Response Cache does not currently support model m with sequence batching scheduler. "
            "Please disable the response cache.",
        ),
        (
            PLAIN + "response_cache { enable: true } model_transaction_policy { decoupled: true }",
            "Response Cache does not currently support model m with 'decoupled' transaction "
            "policy. Please disable the response cache.",
        ),
        (
            PLAIN + "model_metrics { metric_control { metric_identifier {} } }",
            "metric identifier must specify non-empty 'family'; metric control must specify "
            "'histogram_options'",
        ),
        *(
            (
                PLAIN + "model_metrics { metric_control { metric_identifier { family: 'f' } "
                f"histogram_options {{ buckets: [ {buckets} ] }} }} }}",
                "histogram options must specify strictly increasing 'buckets'",
            )
            for buckets in ("5, 1", "1, 1", "nan", "1, nan")
        ),
        *(
            (
                PLAIN + f"metric_tags {{ key: '{name}' value: 'v' }}",
                f"metric tag '{name}' of model m makes no label: write letters, digits and "
                "underscores, which are not the first",
            )
            for name in ("my-tag", "_x", "ü")
        ),
        (
            PLAIN + "instance_group { passive: true } instance_group { count: 2 passive: true }",
            "all instance groups of model m are passive, so that no instance would ever be given a "
            "request",
        ),
        (
            PLAIN + "instance_group { kind: KIND_CPU gpus: [ 0 ] }",
            "instance group m_0 of model m has kind KIND_CPU but specifies one or more GPUs",
        ),
    ],
)
def test_rules_of_the_whole_model(text: str, problem: str) -> None:
    """Backend, batch size, cache, metrics and instance groups."""
    assert problems(text, completed=False) == problem


@pytest.mark.parametrize(
    ("tensor", "problem"),
    [
        ("data_type: TYPE_FP32 dims: 1", "model input must specify 'name' for m"),
        ("name: 'I' dims: 1", "model input 'I' must specify 'data_type' for m"),
        ("name: 'I' dims: 1 data_type: 99", "model input 'I' must specify 'data_type' for m"),
        ("name: 'I' data_type: TYPE_FP32", "model input 'I' must specify 'dims' for m"),
        (
            "name: 'I' data_type: TYPE_FP32 dims: 0",
            "model input 'I' dimension must be integer >= 1, or -1 to indicate a variable-size "
            "dimension for m",
        ),
        (
            "name: 'I' data_type: TYPE_FP32 dims: 4 reshape { shape: [ 2, 3 ] }",
            "model input 'I' has different size for dims and reshape for m",
        ),
        (
            "name: 'I' data_type: TYPE_FP32 dims: 4 reshape { shape: [ ] }",
            "model input 'I' has different size for dims and reshape for m",
        ),
        (
            "name: 'I' data_type: TYPE_FP32 dims: -1 reshape { shape: [ 4 ] }",
            "model input 'I' has different size for dims and reshape for m",
        ),
        (
            "name: 'I' data_type: TYPE_FP32 dims: -1 reshape { shape: [ -1, -1 ] }",
            "model input 'I' has different number of variable-size dimensions for dims and "
            "reshape for m",
        ),
        (
            "name: 'I' data_type: TYPE_FP32 dims: 4 reshape { shape: [ 0 ] }",
            "model input 'I' reshape dimensions must be integer >= 1, or -1 to indicate a "
            "variable-size dimension for m",
        ),
        (
            "name: 'I' data_type: TYPE_FP32 dims: 4 format: FORMAT_NCHW",
            "model input NHWC/NCHW require 3 dims for m",
        ),
        (
            "name: 'I' data_type: TYPE_FP32 dims: 4 is_shape_tensor: true",
            "shape tensors are only supported for TensorRT platform for m",
        ),
    ],
)
def test_rules_of_a_tensor(tensor: str, problem: str) -> None:
    """They are checked once inputs and outputs are final, not while they may be completed."""
    text = f"{PLAIN} input {{ {tensor} }}"
    assert problems(text) == problem
    accept(text, completed=False)


def test_a_scalar_needs_a_batch_dimension() -> None:
    """An empty reshape is a scalar, which a model without batching cannot have."""
    text = (
        "name: 'm' backend: 'python' output { name: 'O' data_type: TYPE_FP32 dims: 1 "
        "reshape { shape: [] } }"
    )
    assert problems(text) == (
        "model output 'O' cannot have empty reshape for non-batching model as scalar tensors are "
        "not supported for m"
    )


@pytest.mark.parametrize("path", ["../l.txt", "/etc/passwd", "a/../../l.txt"])
def test_labels_stay_inside_the_model_folder(path: str) -> None:
    """A configuration cannot make the server read other files."""
    text = PLAIN + f"output {{ name: 'O' label_filename: '{path}' }}"
    message = problems(text, completed=False)
    assert message.endswith("for output 'O' in model 'm' is outside model directory")


@pytest.mark.parametrize(
    ("block", "problem"),
    [
        ("preferred_batch_size: 0", "dynamic batching preferred size must be positive for m"),
        (
            "preferred_batch_size: 5",
            "dynamic batching preferred size must be <= max batch size for m",
        ),
        ("priority_levels: 2", "default priority level must be in range [1, 2] for m"),
        (
            "priority_levels: 1 default_priority_level: 1 "
            "priority_queue_policy { key: 2 value {} }",
            "priority queue policy must have priority level in range [1, 1] for m",
        ),
        (
            "preserve_ordering: true priority_levels: 2 default_priority_level: 1",
            "Only one priority level is allowed when 'preserve_ordering' is true for m",
        ),
        (
            "preserve_ordering: true "
            "default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 1 }",
            "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true "
            "for m",
        ),
    ],
)
def test_rules_of_dynamic_batching(block: str, problem: str) -> None:
    """Preferred sizes, priorities and ordering."""
    assert problems(f"{PLAIN} dynamic_batching {{ {block} }}", completed=False) == problem


@pytest.mark.parametrize(
    ("block", "problem"),
    [
        (
            "direct { minimum_slot_utilization: 1.5 }",
            "sequence batching minimum slot utilization must be in range (0.0, 1.0] for m",
        ),
        (
            "oldest { preferred_batch_size: 9 }",
            "sequence batching preferred batch size must be <= max batch size for m",
        ),
        (
            "control_input { control { kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] } }",
            "sequence batching control tensor must have a name for m",
        ),
        (
            "control_input { name: 'C' control { kind: CONTROL_SEQUENCE_START } }",
            "sequence batching must specify either 'int32_false_true', 'fp32_false_true' or "
            "'bool_false_true' for CONTROL_SEQUENCE_START for m",
        ),
        (
            "control_input { name: 'C' control { kind: CONTROL_SEQUENCE_END "
            "int32_false_true: [0, 1] fp32_false_true: [0, 1] } }",
            "sequence batching specifies more than one from 'int32_false_true', 'fp32_false_true' "
            "and 'bool_false_true' for CONTROL_SEQUENCE_END for m",
        ),
        (
            "control_input { name: 'C' control { kind: CONTROL_SEQUENCE_READY "
            "fp32_false_true: [0] } }",
            "sequence batching control 'fp32_false_true' must have exactly 2 entries for "
            "CONTROL_SEQUENCE_READY for m",
        ),
        (
            "control_input { name: 'C' control { kind: CONTROL_SEQUENCE_CORRID "
            "data_type: TYPE_FP32 } }",
            "unexpected data type for control CONTROL_SEQUENCE_CORRID for m. Allowed data types "
            "are TYPE_UINT64, TYPE_INT64, TYPE_UINT32, TYPE_INT32 and TYPE_STRING",
        ),
        (
            "control_input { name: 'C' control { kind: CONTROL_SEQUENCE_CORRID "
            "data_type: TYPE_UINT64 bool_false_true: [false, true] } }",
            "sequence batching must not specify either 'int32_false_true', 'fp32_false_true' or "
            "'bool_false_true' for CONTROL_SEQUENCE_CORRID for m",
        ),
        (
            "control_input [ { name: 'A' control { kind: CONTROL_SEQUENCE_START "
            "int32_false_true: [0, 1] } }, { name: 'B' control { kind: CONTROL_SEQUENCE_START "
            "int32_false_true: [0, 1] } } ]",
            "sequence batching specifies multiple CONTROL_SEQUENCE_START tensors for m",
        ),
        (
            "control_input [ { name: 'A' control { kind: CONTROL_SEQUENCE_START "
            "int32_false_true: [0, 1] } }, { name: 'A' control { kind: CONTROL_SEQUENCE_END "
            "int32_false_true: [0, 1] } } ]",
            "sequence batching control tensor 'A' is specified for multiple control kinds for m",
        ),
    ],
)
def test_rules_of_sequence_batching(block: str, problem: str) -> None:
    """Strategies and control tensors."""
    assert problems(f"{PLAIN} sequence_batching {{ {block} }}", completed=False) == problem


@pytest.mark.parametrize(
    ("block", "problem"),
    [
        (
            "batch_input { kind: BATCH_ELEMENT_COUNT data_type: TYPE_FP32 }",
            "batch input kind 'BATCH_ELEMENT_COUNT' expects 1 source input, got 0 for m",
        ),
        (
            "batch_input { kind: 77 data_type: TYPE_FP32 source_input: 'I' }",
            "unknown batch input kind '77' for m",
        ),
        (
            "batch_input { data_type: TYPE_INT64 source_input: 'I' }",
            "batch input data type must be TYPE_INT32 or TYPE_FP32 for m",
        ),
        (
            "batch_input { data_type: TYPE_INT32 source_input: 'X' }",
            "unknown source input name 'X' for m",
        ),
        (
            "batch_output { target_name: 'X' source_input: 'I' }",
            "unknown target output name 'X' for m",
        ),
        (
            "batch_output [ { target_name: 'O' source_input: 'I' }, "
            "{ target_name: 'O' source_input: 'I' } ]",
            "target output name 'O' can only be specified once for m",
        ),
    ],
)
def test_rules_of_batch_inputs_and_outputs(block: str, problem: str) -> None:
    """Kinds, types and the tensors they refer to."""
    tensors = "data_type: TYPE_FP32 dims: 1"
    text = f"{PLAIN} input {{ name: 'I' {tensors} }} output {{ name: 'O' {tensors} }} {block}"
    assert problems(text) == problem


@pytest.mark.parametrize(
    ("block", "field"),
    [
        ("instance_group { count: 2147483647 }", "instance_group[0].count"),
        ("sequence_batching { oldest { max_candidate_sequences: 2147483647 } }",
         "sequence_batching.oldest.max_candidate_sequences"),
        ("model_warmup { batch_size: 1 } model_warmup { batch_size: 4294967295 }",
         "model_warmup[1].batch_size"),
        ("model_warmup { count: 4294967295 }", "model_warmup[0].count"),
    ],
)  # fmt: skip
def test_numbers_that_would_fill_the_memory(block: str, field: str) -> None:
    """Are refused before anything is made."""
    assert f"'{field}' is " in problems(f"{PLAIN} {block}")
    sequences = "name: 'm' backend: 'x' max_batch_size: 2147483647 sequence_batching { }"
    assert "'max_batch_size' is 2147483647" in problems(sequences)
    accept(f"{PLAIN} instance_group {{ count: 64 }} model_warmup {{ batch_size: 64 count: 9 }}")


@pytest.mark.parametrize(
    ("block", "field"),
    [
        ("instance_group { count: 1 } instance_group { kind: 99 }", "instance_group[1].kind"),
        ("optimization { priority: 99 }", "optimization.priority"),
        ("model_warmup { inputs { key: 'X' value { data_type: 99 } } }",
         "model_warmup[0].inputs.data_type"),
    ],
)  # fmt: skip
def test_numbers_that_stand_for_no_name(block: str, field: str) -> None:
    """An enumeration of protobuf takes any number."""
    assert problems(f"{PLAIN} {block}") == f"'{field}' has the unknown value 99 for m"


ENSEMBLE = "name: 'e' platform: 'ensemble' "
A_TO_B = (
    "step { model_name: 's' input_map { key: 'I' value: 'A' } output_map { key: 'O' value: 'B' } }"
)
TENSORS = (
    "input { name: 'A' data_type: TYPE_FP32 dims: 1 } "
    "output { name: 'B' data_type: TYPE_FP32 dims: 1 } "
)


def test_a_sound_ensemble_passes() -> None:
    """One step from the input to the output."""
    accept(f"{ENSEMBLE} {TENSORS} ensemble_scheduling {{ {A_TO_B} }}", completed=False)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (ENSEMBLE, "ensemble scheduling must be set for ensemble e whose platform is ensemble"),
        (
            PLAIN + "ensemble_scheduling {}",
            "ensemble scheduling cannot be set for model 'm' whose platform is not ensemble",
        ),
        (ENSEMBLE + "ensemble_scheduling {}", "must specify 'step' for ensemble 'e'"),
        (
            ENSEMBLE + "ensemble_scheduling { step {} }",
            "must specify 'model_name' in step 0 of ensemble 'e'; must specify 'input_map' in "
            "step 0 of ensemble 'e'; must specify 'output_map' in step 0 of ensemble 'e'",
        ),
        (
            ENSEMBLE + TENSORS + f"ensemble_scheduling {{ {A_TO_B} {A_TO_B} }}",
            "ensemble tensor 'B' can appear in an output map only once for ensemble 'e' step 1",
        ),
        (
            ENSEMBLE + TENSORS + "input { name: 'X' data_type: TYPE_FP32 dims: 1 } "
            f"ensemble_scheduling {{ {A_TO_B} }}",
            "ensemble input 'X' for ensemble e' is not used",
        ),
        (
            ENSEMBLE + TENSORS + f"ensemble_scheduling {{ {A_TO_B} step {{ model_name: 't' "
            "input_map { key: 'I' value: 'B' } output_map { key: 'O' value: 'C' } } }",
            "ensemble tensor 'C' is unused in ensemble 'e'",
        ),
        (
            ENSEMBLE + TENSORS + "ensemble_scheduling { step { model_name: 's' "
            "input_map [ { key: 'I' value: 'A' }, { key: 'J' value: 'loop' } ] "
            "output_map [ { key: 'O' value: 'B' }, { key: 'P' value: 'loop' } ] } }",
            "output 'B' for ensemble 'e' is not written: at least one of its depending tensors, "
            "'loop', is not connected",
        ),
        (
            ENSEMBLE + TENSORS + f"ensemble_scheduling {{ {A_TO_B} }} instance_group {{}}",
            "instance group should not be specified for ensemble 'e'",
        ),
        (
            ENSEMBLE + TENSORS + f"ensemble_scheduling {{ {A_TO_B} }} optimization {{}}",
            "optimization should not be specified for ensemble 'e'",
        ),
        (
            ENSEMBLE + TENSORS + f"ensemble_scheduling {{ {A_TO_B} }} model_warmup {{}}",
            "model_warmup can not be specified for ensemble 'e'",
        ),
        (
            ENSEMBLE + TENSORS + f"backend: 'python' ensemble_scheduling {{ {A_TO_B} }}",
            "Ensemble model 'e' must have platform type 'ensemble' and empty backend type",
        ),
    ],
)
def test_rules_of_an_ensemble(text: str, problem: str) -> None:
    """What can be told without the composing models."""
    assert problems(text, completed=False) == problem


def test_all_problems_are_reported_at_once() -> None:
    """One edit of the file is enough."""
    message = problems(
        'name: "m" max_batch_size: -1 dynamic_batching { priority_levels: 1 } '
        "input { dims: 0 name: 'I' }"
    )
    assert [problem.split(" for ")[0] for problem in message.split("; ")] == [
        "must specify 'platform' or 'backend'",
        "'max_batch_size' must be non-negative value",
        "default priority level must be in range [1, 1]",
        "model input 'I' must specify 'data_type'",
        "model input 'I' dimension must be integer >= 1, or -1 to indicate a variable-size "
        "dimension",
    ]
