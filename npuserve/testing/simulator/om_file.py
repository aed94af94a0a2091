r"""The stand-in for an `.om` file: a description and an ONNX model that computes the result.

b"NPUSERVE-OM\\n"  uint32 length of the description  description (JSON)  ONNX bytes
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass, field
from pathlib import Path

MAGIC = b"NPUSERVE-OM\n"
_LENGTH = struct.Struct("<I")

# aclDataType by onnx.TensorProto.DataType, and by the names onnxruntime uses.
ACL_BY_ONNX = {
    1: 0, 2: 4, 3: 2, 4: 7, 5: 6, 6: 3, 7: 9, 9: 12, 10: 1, 11: 11, 12: 8, 13: 10, 16: 27,
}  # fmt: skip
NUMPY_BY_ACL = {
    0: "<f4", 1: "<f2", 2: "<i1", 3: "<i4", 4: "<u1", 6: "<i2", 7: "<u2", 8: "<u4", 9: "<i8",
    10: "<u8", 11: "<f8", 12: "?", 27: "<u2",
}  # fmt: skip


@dataclass
class OmInput:
    """One data input.

    Attributes:
        name: as in the ONNX model.
        datatype: aclDataType of what the caller gives (UINT8 with AIPP).
        shape: -1 for axes that vary.
        format: aclFormat.
        ranges: [lowest, highest] of every axis of a dynamic-shape model; -1: no limit.
        aipp: image preprocessing before the model, as in atc's configuration file; {} for none.
        model_shape: of the ONNX model's own input, `[n, c, h, w]`, when AIPP is before it.
    """

    name: str
    datatype: int
    shape: list[int]
    format: int = 2
    ranges: list[list[int]] = field(default_factory=list)
    aipp: dict[str, str] = field(default_factory=dict)
    model_shape: list[int] = field(default_factory=list)

    @property
    def has_dynamic_aipp(self) -> bool:
        """Whether its preprocessing is set before each execution."""
        return self.aipp.get("aipp_mode") == "dynamic"


@dataclass
class OmOutput:
    """One output; `name` reads `node:0:tensor`."""

    name: str
    datatype: int


@dataclass
class OmGear:
    """One compiled shape: what the runtime is told, and the dims that follow from it."""

    key: list[int]
    inputs: list[list[int]]
    outputs: list[list[int]]


@dataclass
class OmDescription:
    """Everything about a compiled model but its weights.

    Attributes:
        kind: static, batch, hw, dims or range.
        gears: one for static, none for range. With dynamic AIPP the dims of an input are those of
            the model behind it.
        output_shapes: of a range model, -1 for axes that vary.
        device_ms: modelled time of one execution; None: as the simulator is set.
    """

    soc_version: str
    kind: str
    inputs: list[OmInput]
    outputs: list[OmOutput]
    gears: list[OmGear] = field(default_factory=list)
    output_shapes: list[list[int]] = field(default_factory=list)
    device_ms: float | None = None
    work_bytes: int = 1 << 16
    weight_bytes: int = 1 << 12

    @classmethod
    def from_json(cls, text: bytes) -> OmDescription:
        """Raises ValueError, KeyError or TypeError when it is none."""
        value = json.loads(text)
        value["inputs"] = [OmInput(**item) for item in value["inputs"]]
        value["outputs"] = [OmOutput(**item) for item in value["outputs"]]
        value["gears"] = [OmGear(**item) for item in value["gears"]]
        return cls(**value)


def encode(description: OmDescription, onnx: bytes) -> bytes:
    """Content of the file."""
    header = json.dumps(asdict(description)).encode()
    return MAGIC + _LENGTH.pack(len(header)) + header + onnx


def write(path: Path, description: OmDescription, onnx: bytes) -> None:
    """Write the file."""
    path.write_bytes(encode(description, onnx))


def decode(content: bytes) -> tuple[OmDescription, bytes]:
    """(description, ONNX bytes).

    Raises:
        ValueError: no stand-in file, or a damaged one.
    """
    start = len(MAGIC)
    if not content.startswith(MAGIC) or len(content) < start + _LENGTH.size:
        raise ValueError(
            "not a model file of the NPU simulator: it runs what its own atc made "
            "(python -m npuserve.testing.simulator atc …), and model.onnx with the backend ge"
        )
    (length,) = _LENGTH.unpack_from(content, start)
    start += _LENGTH.size
    try:
        description = OmDescription.from_json(content[start : start + length])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"the description is damaged: {error}") from error
    return description, content[start + length :]
