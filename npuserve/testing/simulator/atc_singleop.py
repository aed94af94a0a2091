"""`atc --singleop`: a JSON list of operators to one operator file each.

Source of the layout: ATC user guide of CANN, "single operator model conversion".
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from npuserve.testing.simulator.om_file import NUMPY_BY_ACL
from npuserve.testing.simulator.op_file import OpDescription, OpTensor
from npuserve.testing.simulator.op_kernels import KERNELS

_DATATYPES = {
    "float": 0, "float32": 0, "float16": 1, "int8": 2, "int32": 3, "uint8": 4, "int16": 6,
    "uint16": 7, "uint32": 8, "int64": 9, "uint64": 10, "double": 11, "bool": 12,
}  # fmt: skip
_FORMATS = {"NCHW": 0, "NHWC": 1, "ND": 2}
_GEMM_TYPES = {(1, 1, 1), (1, 1, 0), (2, 2, 0), (2, 2, 3)}  # of A, B and C


def compile_operators(json_path: Path, output: Path, soc_version: str) -> list[Path]:
    """Compile every operator of the list into the directory `output`.

    Raises:
        ValueError: with atc's code, why it cannot.
    """
    try:
        entries = json.loads(json_path.read_text())
    except OSError as error:
        raise ValueError(f"E10410: Cannot open file [{json_path}]. Reason: {error}") from error
    except ValueError as error:
        raise ValueError(f"E10025: Failed to parse JSON file [{json_path}]: {error}") from error
    if not isinstance(entries, list):
        raise ValueError(f"E10025: [{json_path}] must be a list of operators.")
    output.mkdir(parents=True, exist_ok=True)
    paths = []
    for index, entry in enumerate(entries):
        description = _operator(entry, soc_version)
        path = output / f"{index}_{_file_name(description)}.om"
        path.write_bytes(description.encode())
        paths.append(path)
    return paths


def _operator(entry: dict[str, Any], soc_version: str) -> OpDescription:
    op_type = entry.get("op", "")
    if op_type not in KERNELS:
        raise ValueError(
            f"EZ3003: No supported Ops kernel and engine are found for [{op_type}], the simulator "
            f"has {', '.join(sorted(KERNELS))}."
        )
    inputs = [_tensor(op_type, item) for item in entry.get("input_desc", [])]
    outputs = [_tensor(op_type, item) for item in entry.get("output_desc", [])]
    if not outputs:
        raise ValueError(f"E10403: operator [{op_type}] has no output_desc.")
    if op_type == "GEMM" and tuple(t.datatype for t in inputs[:3]) not in _GEMM_TYPES:
        raise ValueError("EZ3003: GEMM does not support these data types of A, B and C.")
    attributes = {item["name"]: item["value"] for item in entry.get("attr", [])}
    return OpDescription(soc_version, op_type, inputs, outputs, attributes)


def _tensor(op_type: str, item: dict[str, Any]) -> OpTensor:
    try:
        datatype = _DATATYPES[item["type"]]
        format_ = _FORMATS[item["format"]]
        shape = [int(axis) for axis in item["shape"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"E10405: operator [{op_type}] has an invalid tensor description {item}: {error!r}"
        ) from error
    const = None
    if item.get("is_const"):
        const = np.array(item["const_value"], NUMPY_BY_ACL[datatype]).tobytes().hex()
    return OpTensor(datatype, format_, shape, const)


def _file_name(description: OpDescription) -> str:
    tensors: Iterable[OpTensor] = (*description.inputs, *description.outputs)
    parts = [description.op_type]
    for tensor in tensors:
        parts += map(str, (tensor.datatype, tensor.format, *tensor.shape))
    return "_".join(parts)
