"""From a folder to a complete configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from npuserve.errors import InvalidArgumentError
from npuserve.model_config import ModelConfig, config_to_dict
from npuserve.model_repository import (
    ModelDirectory,
    load_config,
    normalize,
    scan,
    select_versions,
    validate_config,
)
from npuserve.options import ServerOptions

OPTIONS = ServerOptions()


def model(path: Path, config: str | None = None, *files: str) -> ModelDirectory:
    path.mkdir()
    if config is not None:
        (path / "config.pbtxt").write_text(config, encoding="utf-8")
    for file in files:
        target = path / file
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    return ModelDirectory.from_path(path.name, path)


def triple(config: ModelConfig) -> tuple[str, str, str]:
    return config.backend, config.platform, config.default_model_filename


@pytest.mark.parametrize(
    ("config", "file", "expected"),
    [
        ("", "model.py", ("python", "", "model.py")),
        ("", "model.onnx", ("onnxruntime", "onnxruntime_onnx", "model.onnx")),
        ("", "model.pt", ("pytorch", "pytorch_libtorch", "model.pt")),
        ("", "model.om", ("om", "", "model.om")),
        ("", "model.plan", ("tensorrt", "tensorrt_plan", "model.plan")),
        ("backend: 'python'", "other.txt", ("python", "", "model.py")),
        ("backend: 'pytorch'", "other.txt", ("pytorch", "pytorch_libtorch", "model.pt")),
        (
            "platform: 'onnxruntime_onnx'",
            "x",
            ("onnxruntime", "onnxruntime_onnx", "model.onnx"),
        ),
        (
            "backend: 'onnxruntime' default_model_filename: 'net.onnx'",
            "net.onnx",
            ("onnxruntime", "onnxruntime_onnx", "net.onnx"),
        ),
        ("default_model_filename: 'model.py'", "x", ("python", "", "model.py")),
        ("backend: 'npu_ge'", "model.onnx", ("npu_ge", "", "")),
    ],
)
def test_backend_platform_and_file_complete_each_other(
    tmp_path: Path, config: str, file: str, expected: tuple[str, str, str]
) -> None:
    """Any of the three, or the file that is there, tells the others."""
    directory = model(tmp_path / "m", config, f"1/{file}")
    assert triple(load_config(directory, OPTIONS).config) == expected


def test_a_model_without_configuration_is_completed_from_its_file(tmp_path: Path) -> None:
    """config.pbtxt may be missing; the name comes from the folder."""
    config = load_config(model(tmp_path / "m", None, "1/model.py"), OPTIONS).config
    assert (config.name, config.backend) == ("m", "python")
    assert config.version_policy.latest.num_versions == 1


def test_the_name_of_a_model_may_tell_its_backend(tmp_path: Path) -> None:
    """`x.identity` without anything else is for the backend `identity`."""
    config = load_config(model(tmp_path / "x.identity", "", "1/data"), OPTIONS).config
    assert triple(config) == ("identity", "", "model.identity")


def test_nothing_that_tells_the_backend_is_an_error(tmp_path: Path) -> None:
    """Triton's words, which name the form expected."""
    with pytest.raises(InvalidArgumentError, match="Could not determine backend for model 'm'"):
        load_config(model(tmp_path / "m", "", "1/data"), OPTIONS)


def test_a_name_that_is_not_the_folder_s_is_refused_with_both(tmp_path: Path) -> None:
    """Copied models are a usual source of it."""
    with pytest.raises(InvalidArgumentError, match="'copy' for model 'original'"):
        load_config(model(tmp_path / "copy", "name: 'original'", "1/model.py"), OPTIONS)


def test_defaults_of_the_server_are_filled_in(tmp_path: Path) -> None:
    """What /config shows and nobody wrote."""
    text = (
        "backend: 'python' max_batch_size: 8 dynamic_batching {} "
        "optimization { input_pinned_memory { enable: false } }"
    )
    shown = config_to_dict(load_config(model(tmp_path / "m", text, "1/model.py"), OPTIONS).config)
    assert shown["dynamic_batching"]["preferred_batch_size"] == [8]
    assert shown["optimization"]["input_pinned_memory"] == {"enable": False}
    assert shown["optimization"]["output_pinned_memory"] == {"enable": True}
    assert shown["version_policy"] == {"latest": {"num_versions": 1}}


def test_defaults_of_sequences(tmp_path: Path) -> None:
    """A second of idleness, and the whole batch preferred with the oldest strategy."""
    text = "backend: 'python' max_batch_size: 8 sequence_batching { oldest {} }"
    batching = load_config(
        model(tmp_path / "m", text, "1/model.py"), OPTIONS
    ).config.sequence_batching
    assert batching.max_sequence_idle_microseconds == 1_000_000
    assert list(batching.oldest.preferred_batch_size) == [8]


def test_an_ensemble_has_a_transaction_policy_and_no_optimization(tmp_path: Path) -> None:
    """As Triton shows it."""
    text = """
    platform: "ensemble"
    input { name: "A" data_type: TYPE_FP32 dims: 1 }
    output { name: "B" data_type: TYPE_FP32 dims: 1 }
    ensemble_scheduling { step { model_name: "s" model_version: -1
      input_map { key: "I" value: "A" } output_map { key: "O" value: "B" } } }
    """
    shown = config_to_dict(load_config(model(tmp_path / "e", text, "1/.keep"), OPTIONS).config)
    assert shown["model_transaction_policy"] == {"decoupled": False}
    assert "optimization" not in shown
    assert "max_inflight_requests" not in shown["ensemble_scheduling"]


def test_normalizing_twice_changes_nothing(tmp_path: Path) -> None:
    """It runs again after a backend completed the configuration."""
    text = "backend: 'python' max_batch_size: 8 dynamic_batching {}"
    config = load_config(model(tmp_path / "m", text, "1/model.py"), OPTIONS).config
    again = ModelConfig()
    again.CopyFrom(config)
    normalize(again)
    assert again == config


def test_model_config_name_takes_the_named_file_where_there_is_one(tmp_path: Path) -> None:
    """The others keep their config.pbtxt."""
    directory = model(tmp_path / "m", "backend: 'python' max_batch_size: 1", "1/model.py")
    (directory.path / "configs").mkdir()
    (directory.path / "configs" / "alt.pbtxt").write_text("backend: 'python' max_batch_size: 2")
    for name, size in (("alt", 2), ("other", 1), ("", 1)):
        options = ServerOptions(model_config_name=name)
        assert load_config(directory, options).config.max_batch_size == size


def test_an_override_replaces_the_whole_configuration(tmp_path: Path) -> None:
    """Nothing of the file is left, and the defaults are filled in again."""
    directory = model(tmp_path / "m", "backend: 'python' max_batch_size: 3", "1/model.py")
    config = load_config(directory, OPTIONS, '{"parameters": {"k": {"string_value": "v"}}}').config
    assert (config.max_batch_size, config.backend) == (0, "python")
    assert config.parameters["k"].string_value == "v"
    with pytest.raises(InvalidArgumentError, match="Invalid config override: "):
        load_config(directory, OPTIONS, "{")


def test_without_auto_complete_the_file_must_be_there_and_complete(tmp_path: Path) -> None:
    """--disable-auto-complete-config moves the checks of tensors to the first reading."""
    options = ServerOptions(disable_auto_complete_config=True)
    with pytest.raises(InvalidArgumentError, match="is missing"):
        load_config(model(tmp_path / "a", None, "1/model.py"), options)
    text = "backend: 'python' input { name: 'I' }"
    with pytest.raises(InvalidArgumentError, match="must specify 'data_type'"):
        load_config(model(tmp_path / "b", text, "1/model.py"), options)
    load_config(model(tmp_path / "c", text, "1/model.py"), OPTIONS)


@pytest.mark.parametrize("content", [b"name: '\xff\xfe'", b"\x00\x01\x02"])
def test_a_file_that_is_no_text_is_an_error_with_its_path(tmp_path: Path, content: bytes) -> None:
    """Half-copied and binary files fail their model alone."""
    directory = model(tmp_path / "m", "", "1/model.py")
    directory.config_path.write_bytes(content)
    with pytest.raises(InvalidArgumentError, match=r"failed to read text proto from .*config\.pb"):
        load_config(directory, OPTIONS)


def test_the_door_scans_selects_and_validates(tmp_path: Path) -> None:
    """The calls the server makes, in its order."""
    model(tmp_path / "m", "backend: 'python'", "1/model.py", "2/model.py")
    directory = scan([str(tmp_path)], OPTIONS).models["m"]
    config, where = load_config(directory, OPTIONS)
    validate_config(config, directory, where)
    assert select_versions(config, directory) == [2]
