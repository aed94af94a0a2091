"""Who waits for whom: finds BLS calls that could never be answered.

A model that calls itself, or one that calls it back, waits for ever when every instance that could
answer is itself waiting. The graph knows, for each instance that runs one batch at a time, which
models it waits for, and which instances of them once those have taken the requests. Pure; one graph
per Python backend.
"""

from __future__ import annotations

from typing import Any

from npuserve.errors import InternalError


class Caller:
    """One instance in the graph.

    Attributes:
        overlaps: waiting does not occupy it: its batches overlap (`async def execute`), or its
            threads may wait after `execute` returned (decoupled).
        limit: batches that overlap, for those of `async def execute`: when as many wait, it is
            occupied as well. 0 for no limit.
    """

    def __init__(self, graph: CallGraph, model: str) -> None:
        self._graph = graph
        self._model = model
        self._waits_for: dict[int, str | Caller] = {}
        self._blocked_by: dict[int, str | Caller] = {}  # of an instance that overlaps, see `blocks`
        self._batches: dict[int, Any] = {}  # the batch each call was made for, where it counts
        self.overlaps = False
        self.limit = 0
        graph.models.setdefault(model, []).append(self)

    def starts(self, call_id: int, target: str, batch: Any = None) -> None:
        """The instance is about to call `target` and to wait.

        Args:
            batch: the one the call is made for, if `async def execute` makes it.

        Raises:
            InternalError: the answer could never come.
        """
        self._waits_for[call_id] = target
        if not self.overlaps:
            self._check(call_id, self._waits_for)
        elif self.limit and batch is not None:
            self._batches[call_id] = batch
            self._check(call_id, self._waits_for, self._batches)

    def taken(self, call_id: int, instance: Caller) -> None:
        """From now on only this instance can answer the call."""
        for calls in (self._waits_for, self._blocked_by):
            if call_id in calls:
                calls[call_id] = instance

    def blocks(self, call_id: int) -> None:
        """An instance that overlaps waits within `execute`, so that nothing else goes on there.

        Raises:
            InternalError: the answer could never come.
        """
        if self.overlaps and call_id in self._waits_for:
            self._blocked_by[call_id] = self._waits_for[call_id]
            self._check(call_id, self._blocked_by)

    def _check(self, call_id: int, *notes: dict[int, Any]) -> None:
        target = self._waits_for[call_id]
        if self._graph.is_stuck(target):
            for note in notes:
                del note[call_id]
            name = target._model if isinstance(target, Caller) else target
            # Differs from Triton: there both requests hang for ever.
            raise InternalError(
                f"Model {self._model} calls model {name}, all instances of which wait for each "
                "other: the call could never be answered. Raise the count in instance_group, or "
                f"{self._advice}."
            )

    @property
    def _advice(self) -> str:
        if self.limit:
            return "the parameter async_batches, and await async_exec instead of calling exec"
        return "make execute a coroutine (async def) that awaits async_exec"

    def responded(self, call_id: int) -> None:
        """A response came: whoever is waited for is at work."""
        self._blocked_by.pop(call_id, None)

    def ended(self, call_id: int) -> None:
        """The call was answered."""
        self._waits_for.pop(call_id, None)
        self._blocked_by.pop(call_id, None)
        self._batches.pop(call_id, None)

    def finished(self, batch: Any) -> None:
        """`execute` is through with a batch, whatever became of the calls it made."""
        for call_id in [key for key, value in self._batches.items() if value == batch]:
            del self._batches[call_id]

    def clear(self) -> None:
        """The instance ended all its calls."""
        self._waits_for.clear()
        self._blocked_by.clear()
        self._batches.clear()

    def leave(self) -> None:
        """The instance is gone."""
        self.clear()
        callers = self._graph.models[self._model]
        callers.remove(self)
        if not callers:
            del self._graph.models[self._model]

    def can_go_on(self, stuck: set[str | Caller]) -> bool:
        """Whether it is free, or waits only for models and instances outside `stuck`."""
        if not self.overlaps:
            return stuck.isdisjoint(self._waits_for.values())
        if not stuck.isdisjoint(self._blocked_by.values()):
            return False
        if len(self._batches) < self.limit or not self.limit:
            return True
        waiting = {
            batch for call_id, batch in self._batches.items() if self._waits_for[call_id] in stuck
        }
        return len(waiting) < self.limit


class CallGraph:
    """The instances of all Python models of a server, by model name."""

    def __init__(self) -> None:
        self.models: dict[str, list[Caller]] = {}

    def is_stuck(self, target: str | Caller) -> bool:
        """Whether no instance of a model, or not this one, can ever be free again.

        Starts from the assumption that all instances are stuck and takes out those that can go on,
        until nothing changes. A model is stuck when all its instances are.
        """
        waiting = {caller for callers in self.models.values() for caller in callers}
        while True:
            stuck: set[str | Caller] = {*waiting}
            stuck.update(name for name, own in self.models.items() if waiting.issuperset(own))
            if target not in stuck:
                return False
            free = {caller for caller in waiting if caller.can_go_on(stuck)}
            if not free:
                return True
            waiting -= free
