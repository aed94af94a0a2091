"""Signatures of ONNX files against the onnx package."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from npuserve.backends.model_signature import ModelTensor
from npuserve.backends.onnx_graph import read_signature
from npuserve.errors import InvalidArgumentError
from tests.backends import onnx_models
from tests.backends.onnx_models import value


def test_free_dimensions_and_datatypes(tmp_path: Path) -> None:
    """Named and unnamed dimensions are -1; scalars have none."""
    onnx_models.save(
        tmp_path, [helper.make_node("Identity", ["a"], ["b"])],
        [value("a", TensorProto.FLOAT16, ["n", None, 3]), value("s", TensorProto.INT64, [])],
        [value("b", TensorProto.FLOAT16, ["n", None, 3])],
    )  # fmt: skip
    signature = read_signature(tmp_path / "1" / "model.onnx")
    assert signature.inputs == (
        ModelTensor("a", "FP16", (-1, -1, 3)), ModelTensor("s", "INT64", ())
    )  # fmt: skip
    assert signature.outputs == (ModelTensor("b", "FP16", (-1, -1, 3)),)


def test_weights_are_no_inputs(tmp_path: Path) -> None:
    """Old exporters list them as such."""
    weight = numpy_helper.from_array(np.ones(300_000, np.float32), "w")
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "w"], ["y"])], "g",
        [value("x", 1, [300_000]), value("w", 1, [300_000])], [value("y", 1, [300_000])],
        initializer=[weight],
    )  # fmt: skip
    onnx.save(helper.make_model(graph), tmp_path / "m.onnx")
    assert [t.name for t in read_signature(tmp_path / "m.onnx").inputs] == ["x"]


@given(content=st.binary(min_size=1, max_size=200))
def test_rubbish_is_refused(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Only InvalidArgumentError, whatever the bytes are."""
    path = tmp_path_factory.getbasetemp() / "rubbish.onnx"
    path.write_bytes(content)
    with pytest.raises(InvalidArgumentError):
        read_signature(path)


def test_a_cut_file_is_refused(tmp_path: Path) -> None:
    """At every length."""
    path = onnx_models.identity(tmp_path) / "1" / "model.onnx"
    content = path.read_bytes()
    for length in range(1, len(content) - 30, 7):
        path.write_bytes(content[:length])
        with pytest.raises(InvalidArgumentError):
            read_signature(path)
