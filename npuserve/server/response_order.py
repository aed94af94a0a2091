"""`preserve_ordering`: responses leave in the order the requests came, across instances.

Works for every way a request can be answered (execution, cache hit, rejection) and for any number
of responses, since it stands in front of the request's callback.
"""

from __future__ import annotations

import logging
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from npuserve.request import InferenceRequest, ResponseCallback
    from npuserve.response import InferenceResponse

logger = logging.getLogger(__name__)


class _Turn:
    """One request in line, and what it has been answered before its turn."""

    __slots__ = ("callback", "held")

    def __init__(self, callback: ResponseCallback) -> None:
        self.callback = callback
        self.held: list[tuple[InferenceResponse | None, bool]] = []


class ResponseOrder:
    """The line of requests not finally answered yet; the first one's responses pass at once."""

    def __init__(self) -> None:
        self._line: deque[_Turn] = deque()

    def __len__(self) -> int:
        return len(self._line)

    def add(self, request: InferenceRequest) -> None:
        """Put the request in line: from now on its responses wait for those before it.

        # Differs from Triton: not what a model asks for. The one before may be the very request
        # for which it asks, and who waits for it sees no order.
        """
        if request.for_model is not None:
            return
        turn = _Turn(request.on_response)
        self._line.append(turn)
        request.on_response = partial(self._respond, turn)

    def _respond(self, turn: _Turn, response: InferenceResponse | None, final: bool) -> None:
        if turn is not self._line[0]:
            turn.held.append((response, final))
            return
        try:
            turn.callback(response, final)
        finally:
            if final:
                self._line.popleft()
                self._let_out()

    def _let_out(self) -> None:
        """Hand over what those now first in line have been answered before their turn."""
        line = self._line
        final = True
        while final and line and line[0].held:
            turn = line[0]
            held, turn.held = turn.held, []
            for response, final in held:
                try:
                    turn.callback(response, final)
                except Exception:  # as `InferenceRequest.deliver` does: it holds up nobody else
                    logger.exception("response callback of a request that was held back failed")
            if final:
                line.popleft()
