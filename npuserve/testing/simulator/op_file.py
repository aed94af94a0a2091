r"""The stand-in for the `.om` file of a single operator, as `atc --singleop` makes it.

b"NPUSERVE-OP\n"  description (JSON)
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

MAGIC = b"NPUSERVE-OP\n"


@dataclass(frozen=True)
class OpTensor:
    """One input or output of a compiled operator.

    Attributes:
        datatype: aclDataType.
        format: aclFormat.
        shape: -1 for an axis of any length.
        const: content of a constant input, as hexadecimal digits.
    """

    datatype: int
    format: int
    shape: list[int]
    const: str | None = None

    def holds(self, datatype: int, format_: int, dims: list[int], const: bytes | None) -> bool:
        """Whether it was compiled for such a tensor."""
        return (
            (self.datatype, self.format) == (datatype, format_)
            and self.const == (None if const is None else const.hex())
            and len(self.shape) == len(dims)
            and all(axis in (-1, length) for axis, length in zip(self.shape, dims, strict=True))
        )


@dataclass(frozen=True)
class OpDescription:
    """A compiled operator: what it is called with."""

    soc_version: str
    op_type: str
    inputs: list[OpTensor]
    outputs: list[OpTensor]
    attributes: dict[str, Any] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Content of the file."""
        return MAGIC + json.dumps(asdict(self)).encode()


def decode(content: bytes) -> OpDescription:
    """A file's description.

    Raises:
        ValueError: no stand-in file, or a damaged one.
    """
    if not content.startswith(MAGIC):
        raise ValueError("not an operator file of the NPU simulator")
    try:
        value = json.loads(content[len(MAGIC) :])
        for side in ("inputs", "outputs"):
            value[side] = [OpTensor(**item) for item in value[side]]
        return OpDescription(**value)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"the operator's description is damaged: {error}") from error


def files_below(directory: Path) -> list[Path]:
    """The operator files that `acl.op.set_model_dir` reads: three levels from the directory on."""
    return [
        path
        for pattern in ("*.om", "*/*.om", "*/*/*.om")
        for path in sorted(directory.glob(pattern))
    ]
