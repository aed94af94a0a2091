"""The smallest complete backend: every output is the input of the same position.

A template for authors of backends, an example in the documentation and a test double. Each
output takes the data of the input at the same position in config.pbtxt. The parameter
`execute_delay_ms` makes every batch take that long.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from npuserve.backends.base import Backend, BackendModelContext, ExecutionBatch, ModelInstance
from npuserve.errors import InvalidConfigError
from npuserve.response import InferenceResponse
from npuserve.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from npuserve.request import InferenceRequest


class IdentityInstance(ModelInstance):
    """Answers with its inputs; runs in a thread of its own.

    Args:
        outputs: output name → input name.
        delay_s: seconds a batch takes.
    """

    def __init__(self, outputs: dict[str, str], delay_s: float) -> None:
        self._outputs = outputs
        self._delay_s = delay_s
        self._stopped = threading.Event()

    def execute(self, batch: ExecutionBatch) -> None:
        """See `ModelInstance.execute`."""
        batch.input_ready()
        if self._delay_s:
            self._stopped.wait(self._delay_s)  # stands for a device at work
        batch.output_ready()
        for request in batch.requests:
            batch.send(request, self._answer(request))

    def finalize(self) -> None:
        """See `ModelInstance.finalize`."""
        self._stopped.set()

    def _answer(self, request: InferenceRequest) -> InferenceResponse:
        wanted = request.requested_outputs or self._outputs
        outputs = []
        for output in wanted:
            tensor = request.inputs.get(self._outputs[output])
            if tensor is not None:  # an optional input that was left out
                outputs.append(Tensor(output, tensor.datatype, tensor.shape, tensor.data))
        return InferenceResponse(outputs)


class IdentityBackend(Backend):
    """Backend named `identity`."""

    def load(self, context: BackendModelContext) -> Sequence[ModelInstance]:
        """See `Backend.load`.

        Raises:
            InvalidArgumentError: inputs and outputs do not pair up, or a bad delay.
        """
        config = context.config
        if len(config.input) != len(config.output):
            raise InvalidConfigError(
                f"model '{context.name}': the identity backend needs as many outputs as inputs, "
                f"got {len(config.input)} inputs and {len(config.output)} outputs",
                "output",
            )
        outputs = {
            output.name: source.name
            for source, output in zip(config.input, config.output, strict=True)
        }
        delay_s = _delay_s(context)
        return [IdentityInstance(outputs, delay_s) for _ in context.placements]


def _delay_s(context: BackendModelContext) -> float:
    text = context.parameters.get("execute_delay_ms", "0")
    try:
        return float(text) / 1e3
    except ValueError:
        raise InvalidConfigError.of_parameter(
            "execute_delay_ms",
            f"model '{context.name}': parameter execute_delay_ms must be a number, got '{text}'",
        ) from None
