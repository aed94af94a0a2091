"""Who waits for whom: finds BLS calls that could never be answered.

A model that calls itself, or one that calls it back, waits for ever when every instance that could
answer is itself waiting. The graph knows, for each instance that runs one batch at a time, which
models it waits for. Pure; one graph per Python backend.
"""

from __future__ import annotations

from npuserve.errors import InternalError


class Caller:
    """One instance in the graph.

    Attributes:
        overlaps: waiting does not occupy it: its batches overlap (`async def execute`), or its
            threads may wait after `execute` returned (decoupled).
    """

    def __init__(self, graph: CallGraph, model: str) -> None:
        self._graph = graph
        self._model = model
        self._waits_for: dict[int, str] = {}
        self._blocked_by: dict[int, str] = {}  # of an instance that overlaps, see `blocks`
        self.overlaps = False
        graph.models.setdefault(model, []).append(self)

    def starts(self, call_id: int, target: str) -> None:
        """The instance is about to call `target` and to wait.

        Raises:
            InternalError: the answer could never come.
        """
        self._waits_for[call_id] = target
        if not self.overlaps:
            self._check(self._waits_for, call_id)

    def blocks(self, call_id: int) -> None:
        """An instance that overlaps waits within `execute`, so that nothing else goes on there.

        Raises:
            InternalError: the answer could never come.
        """
        if self.overlaps and call_id in self._waits_for:
            self._blocked_by[call_id] = self._waits_for[call_id]
            self._check(self._blocked_by, call_id)

    def _check(self, calls: dict[int, str], call_id: int) -> None:
        target = calls[call_id]
        if self._graph.is_stuck(target):
            del calls[call_id]
            # Differs from Triton: there both requests hang for ever.
            raise InternalError(
                f"Model {self._model} calls model {target}, all instances of which wait for each "
                "other: the call could never be answered. Raise the count in instance_group, or "
                "make execute a coroutine (async def) that awaits async_exec."
            )

    def responded(self, call_id: int) -> None:
        """A response came: whoever is waited for is at work."""
        self._blocked_by.pop(call_id, None)

    def ended(self, call_id: int) -> None:
        """The call was answered."""
        self._waits_for.pop(call_id, None)
        self._blocked_by.pop(call_id, None)

    def clear(self) -> None:
        """The instance ended all its calls."""
        self._waits_for.clear()
        self._blocked_by.clear()

    def leave(self) -> None:
        """The instance is gone."""
        self.clear()
        callers = self._graph.models[self._model]
        callers.remove(self)
        if not callers:
            del self._graph.models[self._model]

    def can_go_on(self, stuck: set[str]) -> bool:
        """Whether it is free, or waits only for models outside `stuck`."""
        calls = self._blocked_by if self.overlaps else self._waits_for
        return stuck.isdisjoint(calls.values())


class CallGraph:
    """The instances of all Python models of a server, by model name."""

    def __init__(self) -> None:
        self.models: dict[str, list[Caller]] = {}

    def is_stuck(self, model: str) -> bool:
        """Whether no instance of `model` can ever be free again.

        Starts from the assumption that all models are stuck and takes out those with an instance
        that can go on, until nothing changes.
        """
        stuck = set(self.models)
        while model in stuck:
            free = {
                name
                for name in stuck
                if any(caller.can_go_on(stuck) for caller in self.models[name])
            }
            if not free:
                return True
            stuck -= free
        return False
