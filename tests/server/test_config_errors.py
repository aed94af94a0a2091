"""Rules that only a load finds: the text says where in config.pbtxt the field is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from npuserve.errors import InvalidArgumentError
from npuserve.options import RateLimitResource
from npuserve.testing.simulator import simulate
from tests.backends.npu_models import affine, aipp_om, compile_om, parameters
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


def make_files(directory: Path, backend: str) -> None:
    """What the backend loads, in so far as it looks at it before the parameters."""
    if backend in ("om", "ge"):
        affine(directory, ["n", 3])
        if backend == "om":
            compile_om(directory, "--input_shape=x:-1,3", "--dynamic_batch_size=1,4")
        return
    (directory / "1").mkdir(parents=True)
    file = "model.py" if backend == "python" else "model.pt"
    (directory / "1" / file).write_text("class TritonPythonModel: pass")


TENSORS = """
max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: 3 }
output { name: "y" data_type: TYPE_FP32 dims: 3 }
instance_group { count: 1 %s }
"""


@pytest.mark.parametrize(
    ("backend", "key", "value", "others", "rule"),
    [
        ("om", "engine", "other", {}, "acl and ais_bench exist"),
        ("om", "pipeline_depth", "many", {}, "a number above 0"),
        ("om", "aicore_num", "all", {}, "no core limit"),
        ("om", "aipp_colour", "red", {}, "'aipp_colour' is unknown"),
        ("om", "aipp_mean", "1", {}, "the model has no dynamic AIPP"),
        ("om", "aipp_mean.x", "1", {"engine": "ais_bench"}, "needs engine 'acl'"),
        ("om", "mode", "fast", {"engine": "ais_bench"}, "ais_bench has static"),
        ("om", "gears", "few", {"engine": "ais_bench"}, "batch sizes are expected"),
        ("om", "custom_sizes", "large", {"engine": "ais_bench"}, "numbers of bytes"),
        ("ge", "device_ids", "first", {}, "write card numbers"),
        ("ge", "device_exec_blocks", "0", {"device_ids": "0"}, "a number above 0"),
        ("ge", "dynamic_batch_size", "few", {}, "write batch sizes"),
        ("ge", "static_model", "1", {}, "leave max_batch_size out"),
        ("ge", "aipp_colour", "red", {}, "'aipp_colour' is unknown"),
        ("pytorch", "INTRA_OP_THREAD_COUNT", "0", {}, "'0' is no thread count"),
        ("pytorch", "INTER_OP_THREAD_COUNT", "all", {}, "'all' is no thread count"),
        ("pytorch", "ENABLE_WEIGHT_SHARING", "true", {"torchair": "x"}, "exclude each other"),
        ("python", "execution", "fiber", {}, "must be 'process' or 'thread'"),
        ("python", "execute-timeout-seconds", "soon", {}, "at least 0"),
        ("python", "EXECUTION_ENV_PATH", "/nowhere", {}, "an environment with bin/python"),
        ("onnxruntime", "intra_op_thread_count", "few", {}, "must be a whole number"),
    ],
)
async def test_a_parameter_of_a_backend_is_located(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    backend: str, key: str, value: str, others: dict[str, str], rule: str,
) -> None:  # fmt: skip
    """Whether the load or an instance finds it, alone or with another one."""
    if backend == "pytorch":
        pytest.importorskip("torch")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with simulate(cards=1):
        make_files(tmp_path / "models" / "m", "ge" if backend == "onnxruntime" else backend)
        file = tmp_path / "models" / "m" / "config.pbtxt"
        kind = "" if backend in ("om", "ge") else "kind: KIND_CPU"
        entries = "\n".join(parameters(**{each: others[each]}) for each in others)
        own = parameters(**{key: value})
        file.write_text(f'backend: "{backend}"\n{entries}{TENSORS % kind}{own}')
        text = await failure(tmp_path / "models")
    assert rule in text
    line = file.read_text().count("\n") + 1
    assert f' ({file}:{line}: parameters["{key}"])' in text


async def test_a_missing_parameter_names_the_file(tmp_path: Path) -> None:
    """There is no line to point at."""
    with simulate(cards=1):
        aipp_om(tmp_path / "m")
        file = tmp_path / "m" / "config.pbtxt"
        file.write_text('backend: "om"')
        text = await failure(tmp_path)
    assert "dynamic AIPP, whose settings the configuration must give" in text
    assert f' ({file}: parameters["aipp_input_format"])' in text


async def test_a_parameter_of_the_command_line_is_not_looked_for_in_the_file(
    tmp_path: Path,
) -> None:
    """Unless the model has its own, which counts."""
    options = {"execution": "fiber", "stub-timeout-seconds": "soon"}
    given: dict[str, Any] = {"backend_config": {"python": options}}
    make_files(tmp_path / "m", "python")
    file = tmp_path / "m" / "config.pbtxt"
    file.write_text('backend: "python"')
    text = await failure(tmp_path, **given)
    assert "not 'fiber' (--backend-config: execution);" in text
    file.write_text('backend: "python"\n' + parameters(execution="thread"))
    text = await failure(tmp_path, **given)
    assert "not 'soon' (--backend-config: stub-timeout-seconds);" in text
    file.write_text('backend: "python"\n' + parameters(execution="fibre"))
    text = await failure(tmp_path, **given)
    assert f"not 'fibre' ({file}:2: parameters[\"execution\"]);" in text


async def test_a_configuration_that_came_with_the_load_has_no_file(tmp_path: Path) -> None:
    """Nothing is said of the file, which is not used."""
    write(tmp_path, "m", HEAD)
    text = await failure(tmp_path, "m", '{"backend": "none"}')
    assert "none" in text
    assert "config.pbtxt" not in text
