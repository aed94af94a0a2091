"""Where in config.pbtxt a broken rule is reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from npuserve.errors import InvalidArgumentError
from npuserve.model_repository import ModelDirectory, load_config
from npuserve.model_repository.problems import FieldLines
from npuserve.options import ServerOptions

TEXT = """# a: { comment }
max_batch_size: 4
input [
  { name: "a { b" dims: [ 1,
      2 ] },
  {
    name: 'c'
      'd'
    dims: -1
  }
]
input { name: "e" };
dynamic_batching <
  preferred_batch_size: [ 2, 3 ],
  priority_queue_policy { key: 1 value: { max_queue_size: 5 } }
  priority_queue_policy { key: 2
                          value { max_queue_size: 6 } }
>
parameters { key: "x" value { string_value: "#" } }
cc_model_filenames [ ]
backend: "python"
parameters { key: 'a.b' value { string_value: "" } }
"""


@pytest.mark.parametrize(
    ("field", "line"),
    [
        ("max_batch_size", 2),
        ("input", 4),
        ("input[0].dims", 4),
        ("input[1]", 6),
        ("input[1].name", 7),
        ("input[1].dims", 9),
        ("input[2].name", 12),
        ("dynamic_batching.preferred_batch_size", 14),
        ("dynamic_batching.priority_queue_policy[1].value.max_queue_size", 17),
        ("dynamic_batching.default_queue_policy.timeout_action", 13),  # the block around it
        ('parameters["x"].value', 19),
        ('parameters["a.b"]', 22),
        ('parameters["y"]', 0),
        ("backend", 21),
        ("output[0]", 0),
    ],
)
def test_every_spelling_has_its_line(field: str, line: int) -> None:
    """Lists, angle brackets, separators, split texts and comments."""
    assert FieldLines(TEXT).find(field) == line


TENSORS = """backend: "python"
max_batch_size: 8
input { name: "X" data_type: TYPE_FP32 dims: 1 }
output { name: "Y" data_type: TYPE_FP32 dims: 1 }
"""


@pytest.mark.parametrize(
    ("more", "line", "field", "rule"),
    [
        (
            "dynamic_batching {\n  preferred_batch_size: [ 16 ]\n}",
            6,
            "dynamic_batching.preferred_batch_size",
            "must be <= max batch size",
        ),
        (
            "instance_group { kind: KIND_CPU\n gpus: 0 }",
            6,
            "instance_group[0].gpus",
            "specifies one or more GPUs",
        ),
        (
            'input { name: "X" data_type: TYPE_FP32 dims: 2 }',
            5,
            "input[1]",
            "input 'X' is specified more than once",
        ),
        (
            'output { name: "Y" data_type: TYPE_FP32 dims: 9 }',
            5,
            "output[1]",
            "output 'Y' is specified more than once",
        ),
        (
            "sequence_batching { control_input {\n name: 'X'\n control { "
            "kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } } }",
            5,
            "sequence_batching.control_input[0]",
            "'X' is an input already",
        ),
        (
            "sequence_batching { state {\n input_name: 'X' output_name: 'O' } }",
            6,
            "sequence_batching.state[0].input_name",
            "'X' is an input already",
        ),
        ("input { name: 'Z' data_type: TYPE_FP32 dims: 0 }", 5, "input[1]", "integer >= 1"),
        ("response_cache { enable: true }\nsequence_batching { }", 5, "response_cache", "sequence"),
    ],
)
def test_a_contradiction_names_file_line_field_and_rule(
    tmp_path: Path, more: str, line: int, field: str, rule: str
) -> None:
    """All that is needed to correct it."""
    (tmp_path / "m/1").mkdir(parents=True)
    file = tmp_path / "m/config.pbtxt"
    file.write_text(TENSORS + more)
    directory = ModelDirectory.from_path("m", tmp_path / "m")
    with pytest.raises(InvalidArgumentError) as caught:
        load_config(directory, ServerOptions(model_repository=(str(tmp_path),)))
    assert rule in str(caught.value)
    assert str(caught.value).endswith(f" ({file}:{line}: {field})")
