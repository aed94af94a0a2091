"""The tensors of an ensemble request on their way, and the sequence parameters they carry. Pure.

A request of an ensemble with decoupled members is a tree of iterations: every response of a
decoupled step opens one, in which the steps behind it run with that response's tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from npuserve.errors import InvalidArgumentError
from npuserve.request import SEQUENCE_END, SEQUENCE_START

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from npuserve.response import ParameterValue
    from npuserve.server.ensemble_graph import Plan
    from npuserve.tensor import Tensor

# Correlation id and flags, which a step hands on to the steps that take its tensors.
SequenceTag = tuple[int | str, int]


class Never:
    """Stands for a tensor that will not come: the step that writes it cannot run."""


NEVER = Never()


class Iteration:
    """The tensors of one response of a decoupled step; the outermost one is the request itself.

    Attributes:
        scope: the decoupled step, ROOT for the request.
        parent: iteration in which that step ran.
        tensors: ensemble tensors of this scope that are settled; None: the step ran, or the
            client sent its request, without this one.
        waiting: by step of this scope: tensors still to come.
        outer_missing: how many of those belong to an outer iteration.
        outputs_missing: outputs of the ensemble that are not settled.
        tags: of tensors whose tag is not the request's own.
    """

    __slots__ = (
        "outer_missing", "outputs_missing", "parent", "scope", "tags", "tensors", "waiting",
    )  # fmt: skip

    def __init__(self, scope: int, parent: Iteration | None, plan: Plan) -> None:
        self.scope = scope
        self.parent = parent
        self.tensors: dict[str, Tensor | Never | None] = {}
        self.waiting = dict(plan.waiting.get(scope, ()))
        self.outer_missing = plan.outer_tensors.get(scope, 0)
        self.outputs_missing = len(plan.output_names.get(scope, ()))
        self.tags: dict[str, SequenceTag] | None = None

    @property
    def ancestors(self) -> Iterator[Iteration]:
        """The iterations around this one, the nearest first."""
        iteration = self.parent
        while iteration is not None:
            yield iteration
            iteration = iteration.parent

    @property
    def complete(self) -> bool:
        """Whether all outputs that can be seen from here are settled."""
        return not self.outputs_missing and not any(a.outputs_missing for a in self.ancestors)

    def home(self, tensor: str) -> Iteration | None:
        """The iteration, this one or one around it, that has the tensor."""
        iteration: Iteration | None = self
        while iteration is not None and tensor not in iteration.tensors:
            iteration = iteration.parent
        return iteration


def override_tag(tag: SequenceTag, parameters: Mapping[str, ParameterValue]) -> SequenceTag:
    """The tag after a member's response parameters; either flag given replaces both.

    Raises:
        InvalidArgumentError: one of them has the wrong type.
    """
    names = ("sequence_id", "sequence_start", "sequence_end")
    if not any(name in parameters for name in names):
        return tag
    correlation_id = parameters.get("sequence_id", tag[0])
    if isinstance(correlation_id, bool) or not isinstance(correlation_id, (int, str)):
        raise InvalidArgumentError(
            "expected parameter 'sequence_id' to be TRITONSERVER_PARAMETER_INT or "
            "TRITONSERVER_PARAMETER_STRING"
        )
    flags = 0
    for name, flag in (("sequence_start", SEQUENCE_START), ("sequence_end", SEQUENCE_END)):
        value = parameters.get(name, False)
        if not isinstance(value, bool):
            raise InvalidArgumentError(
                f"expect parameter '{name}' to be TRITONSERVER_PARAMETER_BOOL"
            )
        flags |= flag * value
    return correlation_id, flags
