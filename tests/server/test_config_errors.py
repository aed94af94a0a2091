"""Rules that only a load finds: the text says where in config.pbtxt the field is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from npuserve.errors import InvalidArgumentError
from npuserve.options import RateLimitResource
from tests.backends.npu_models import affine
from tests.server.models import serve

HEAD = """backend: "identity"
input { name: "X" data_type: TYPE_FP32 dims: 2 }
output { name: "Y" data_type: TYPE_FP32 dims: 2 }
"""
STATE = """sequence_batching {
  state { input_name: "A" output_name: "B" data_type: TYPE_FP32 dims: 1 }
  state {
    input_name: "I" output_name: "O" data_type: TYPE_FP32 dims: 1
    initial_state { name: "i" data_type: TYPE_FP32 dims: 1 data_file: "none" }
  }
}
"""
STEP = """
    input_map { key: "%s" value: "A" }
    output_map { key: "%s" value: "B" }
  } }
"""
ENSEMBLE = """platform: "ensemble"
input { name: "A" data_type: TYPE_FP32 dims: 2 }
output { name: "B" data_type: TYPE_FP32 dims: 2 }
ensemble_scheduling { step {
    model_name: "member" model_version: -1"""


async def failure(root: Path, name: str = "m", config: str | None = None, **options: Any) -> str:
    """What a load of the model says."""
    async with serve(root, load_model=(), **options) as server:
        with pytest.raises(InvalidArgumentError) as caught:
            await server.load_model(name, config)
    return str(caught.value)


def write(root: Path, name: str, text: str) -> Path:
    """A model of this configuration; returns the file."""
    (root / name / "1").mkdir(parents=True)
    file = root / name / "config.pbtxt"
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("more", "line", "field", "rule"),
    [
        ("\ninstance_group {\n kind: KIND_GPU }", 6, "instance_group[0].kind", "no GPUs"),
        (
            "dynamic_batching {\n  preferred_batch_size: [ 4 ] }",
            5,
            "dynamic_batching.preferred_batch_size",
            "must be <= max batch size",
        ),
        ('output { name: "Z" data_type: TYPE_FP32 dims: 1 }', 3, "output", "as many outputs"),
        (
            'parameters { key: "a" }\nparameters { key: "execute_delay_ms" value {\n'
            'string_value: "x" } }',
            5,
            'parameters["execute_delay_ms"]',
            "must be a number",
        ),
        (
            'model_warmup { name: "one" }\nmodel_warmup { name: "two" batch_size: 1 inputs { '
            'key: "X" value { data_type: TYPE_FP32 dims: 2 input_data_file: "none" } } }',
            5,
            "model_warmup[1]",
            "failed to read the data of warmup sample 'two'",
        ),
        (STATE, 8, "sequence_batching.state[1].initial_state", "failed to read initial_state"),
        (
            'instance_group { kind: KIND_CPU\n rate_limiter { resources { name: "R" count: 9 } } }',
            5,
            "instance_group[0].rate_limiter",
            'Resource count for "R" is limited to 2',
        ),
    ],
)
async def test_the_field_is_located(
    tmp_path: Path, more: str, line: int, field: str, rule: str
) -> None:
    """File, line and field follow the rule."""
    file = write(tmp_path, "m", HEAD + more)
    limit = RateLimitResource("R", 2)
    text = await failure(tmp_path, rate_limit="execution_count", rate_limit_resource=(limit,))
    assert rule in text
    assert f" ({file}:{line}: {field})" in text


@pytest.mark.parametrize(
    ("step", "line", "field", "rule"),
    [
        (STEP % ("none", "Y"), 6, 'input_map["none"]', "non-existing input none"),
        (STEP % ("X", "none"), 7, 'output_map["none"]', "non-existing output none"),
    ],
)
async def test_a_step_that_does_not_fit_is_located(
    tmp_path: Path, step: str, line: int, field: str, rule: str
) -> None:
    """In the file of the ensemble."""
    write(tmp_path, "member", HEAD)
    file = write(tmp_path, "e", ENSEMBLE + step)
    text = await failure(tmp_path, "e")
    assert rule in text
    assert f" ({file}:{line}: ensemble_scheduling.step[0].{field})" in text


async def test_what_contradicts_the_models_file_is_located(tmp_path: Path) -> None:
    """Found by the backend, which knows no config.pbtxt."""
    affine(tmp_path / "m", ["n", 3])
    file = tmp_path / "m" / "config.pbtxt"
    file.write_text(
        'backend: "onnxruntime"\nmax_batch_size: 4\n'
        'input { name: "x"\n data_type: TYPE_FP32\n dims: 5 }\n'
    )
    text = await failure(tmp_path)
    assert "the model expects 2 dimensions" in text
    assert f" ({file}:5: input[0].dims)" in text


async def test_a_configuration_that_came_with_the_load_has_no_file(tmp_path: Path) -> None:
    """Nothing is said of the file, which is not used."""
    write(tmp_path, "m", HEAD)
    text = await failure(tmp_path, "m", '{"backend": "none"}')
    assert "none" in text
    assert "config.pbtxt" not in text
