"""Looks at calls between models that take long, and refuses what could never be answered.

Calls cost nothing but a note until one is still there after a moment. Then the instances that call
each other in circles are asked what they wait for (`CallGraph.suspects`), and what they say is
judged a moment later.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from npuserve.backends.worker.call_graph import NOTHING
from npuserve.errors import InternalError

if TYPE_CHECKING:
    import asyncio

    from npuserve.backends.worker.call_graph import Call, CallGraph

logger = logging.getLogger(__name__)

# Until the first look, and from a question to the judgement.
_PAUSE_S = 0.05
# Each look that finds nothing doubles the pause before the next one.
_LONGEST_PAUSE_S = 1.0


class CallWatch:
    """Watches a graph as long as there are calls in it. Loop thread only."""

    def __init__(self, graph: CallGraph) -> None:
        self._graph = graph
        self._loop: asyncio.AbstractEventLoop | None = None  # while it watches
        self._pause_s = _PAUSE_S

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """There is a call."""
        if self._loop is not loop:
            self._loop = loop
            self._pause_s = _PAUSE_S
            loop.call_later(_PAUSE_S, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        instances = self._graph.instances
        if not any(instance.calls for instance in instances):
            self._loop = None
            return
        suspects = self._graph.suspects()
        for instance in instances:
            instance.report = NOTHING
        for instance in suspects:
            try:
                instance.ask()
            except Exception:  # it looks at objects of the model, which may be of any kind
                logger.exception("cannot tell what model %s waits for", instance.model.name)
        if suspects:
            loop.call_later(_PAUSE_S, self._judge, loop)
        else:
            self._rest(loop)

    def _judge(self, loop: asyncio.AbstractEventLoop) -> None:
        circle = self._graph.circle()
        if circle:
            self._pause_s = _PAUSE_S
            call = circle[0]
            call.caller.refuse(call, InternalError(_text(circle)))
        self._rest(loop)

    def _rest(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.call_later(self._pause_s, self._look, loop)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)


def _text(circle: list[Call]) -> str:
    call = circle[0]
    names = [call.caller.model.name, *(each.model.name for each in circle if not each.others())]
    if names[-1] != names[0]:  # which has resources that the last one needs
        names.append(names[0])
    way = " -> ".join(names)
    # Differs from Triton: there all of these requests hang for ever.
    return (
        f"Model {names[0]} calls model {names[1]}, and all that could answer wait for "
        f"each other ({way}): the call could never be answered. Raise the count in "
        "instance_group (for models with async def execute the parameter async_batches, and await "
        "async_exec instead of calling exec), or the resources of the rate limiter."
    )
