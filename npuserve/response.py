"""InferenceResponse: one answer to a request, on its way from a backend to a front end."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from npuserve.errors import NpuserveError
    from npuserve.tensor import Tensor

ParameterValue = bool | int | float | str


class InferenceResponse:
    """Outputs or an error, with optional response parameters.

    Whether it is the last response of its request travels beside it (see
    `InferenceRequest.on_response`), since a decoupled model may end a request without one.

    Attributes:
        outputs: in the order the model produced them; empty when `error` is set.
        parameters: response parameters set by the model; None means none.
        error: why there are no outputs.
    """

    __slots__ = ("error", "model_name", "model_version", "outputs", "parameters")

    def __init__(
        self,
        outputs: list[Tensor],
        *,
        parameters: dict[str, ParameterValue] | None = None,
        error: NpuserveError | None = None,
        model_name: str = "",
        model_version: str = "",
    ) -> None:
        self.outputs = outputs
        self.parameters = parameters
        self.error = error
        self.model_name = model_name
        self.model_version = model_version

    def __repr__(self) -> str:
        what = f"error={self.error!r}" if self.error else f"outputs={self.outputs!r}"
        return f"InferenceResponse({self.model_name}:{self.model_version}, {what})"

    @classmethod
    def from_error(cls, error: NpuserveError) -> InferenceResponse:
        """A response that carries only an error."""
        return cls([], error=error)
