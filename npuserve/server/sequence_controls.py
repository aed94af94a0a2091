"""Control inputs of a sequence batcher: START, END, READY and the correlation id. Pure.

The batcher adds them to a request's inputs; clients neither see nor send them.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from npuserve.errors import InvalidArgumentError
from npuserve.model_config import datatype_name, enum_name
from npuserve.request import SEQUENCE_END, SEQUENCE_START
from npuserve.tensor import ITEM_SIZE, Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from npuserve._proto.model_config_pb2 import ModelSequenceBatching
    from npuserve.model_config import ModelConfig

_READY = 4  # beside SEQUENCE_START and SEQUENCE_END in the index of prepared tensors
_BIT = {
    "CONTROL_SEQUENCE_START": SEQUENCE_START,
    "CONTROL_SEQUENCE_END": SEQUENCE_END,
    "CONTROL_SEQUENCE_READY": _READY,
}


@dataclass(frozen=True)
class _CorrelationIdInput:
    name: str
    datatype: str


class SequenceControls:
    """Makes the control tensors of one model; shape `[1]`, `[1, 1]` if the model batches."""

    def __init__(self, config: ModelConfig) -> None:
        self._model_name = config.name
        self._shape = (1, 1) if config.max_batch_size > 0 else (1,)
        self._correlation_id: _CorrelationIdInput | None = None
        # By SEQUENCE_START | SEQUENCE_END | _READY: there are only eight of them.
        self._flag_tensors: list[dict[str, Tensor]] = [{} for _ in range(8)]
        for entry in config.sequence_batching.control_input:
            for control in entry.control:
                if enum_name(control, "kind") == "CONTROL_SEQUENCE_CORRID":
                    datatype = datatype_name(control.data_type)
                    self._correlation_id = _CorrelationIdInput(entry.name, datatype)
                else:
                    self._add_flag(entry.name, control)

    def _add_flag(self, name: str, control: ModelSequenceBatching.Control) -> None:
        if control.int32_false_true:
            pair = np.array(control.int32_false_true, np.int32)
        elif control.fp32_false_true:
            pair = np.array(control.fp32_false_true, np.float32)
        else:
            pair = np.array(control.bool_false_true, np.bool_)
        false, true = (
            Tensor.from_numpy(name, pair[index : index + 1].copy().reshape(self._shape))
            for index in (0, 1)
        )
        bit = _BIT[enum_name(control, "kind")]
        for index, tensors in enumerate(self._flag_tensors):
            tensors[name] = true if index & bit else false

    @property
    def filler(self) -> Mapping[str, Tensor]:
        """Controls of a request that stands in an empty slot: nothing is set, the id is 0."""
        return self._flag_tensors[0] | self.correlation_id_tensor(0, filler=True)

    def flags(self, flags: int) -> Mapping[str, Tensor]:
        """START, END and READY of a request with these flags."""
        return self._flag_tensors[flags & (SEQUENCE_START | SEQUENCE_END) | _READY]

    def check(self, correlation_id: int | str) -> None:
        """Refuse an id that the model's control input cannot take.

        Raises:
            InvalidArgumentError: a text for a numeric control input.
        """
        control = self._correlation_id
        if control is None or control.datatype == "BYTES" or isinstance(correlation_id, int):
            return
        raise InvalidArgumentError(
            f"sequence batching control '{control.name}' data-type is 'BYTES', but model "
            f"'{self._model_name}' expects '{control.datatype}'"
        )

    def correlation_id_tensor(
        self, correlation_id: int | str, filler: bool = False
    ) -> dict[str, Tensor]:
        """The id under the control input's name and in its datatype; {} without such an input.

        A number is cut to the width of the type. For TYPE_STRING it is written in decimal.
        """
        control = self._correlation_id
        if control is None:
            return {}
        if control.datatype == "BYTES":
            text = b"" if filler else str(correlation_id).encode()
            data = struct.pack("<I", len(text)) + text
        else:
            size = ITEM_SIZE[control.datatype]
            data = (int(correlation_id) % (1 << 8 * size)).to_bytes(size, "little")
        return {control.name: Tensor(control.name, control.datatype, self._shape, data)}
