"""Who waits for whom: finds BLS calls that could never be answered.

A model that calls itself, or one that calls it back, waits for ever when all that could answer is
itself waiting. The graph has every call that is not answered yet, with who could answer it, and
what the batches of each instance wait for as its `report` says. Whatever is not in a report goes
on, so that nothing is called stuck that may only be busy. Pure; one graph per Python backend.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from npuserve.errors import InternalError


class Wait(NamedTuple):
    """Somebody in a model waits for a response. Over once there are more than `taken`.

    Attributes:
        call_id: of the model's call; any other value is something the graph does not know of.
        taken: responses the model had when it began to wait.
    """

    call_id: Any
    taken: int


class Report(NamedTuple):
    """What an instance was found doing.

    Attributes:
        batches: what each batch waits for that does nothing else; it goes on after any of it.
        senders: of these, the ones that have given out response senders.
        others: what the model's other threads and tasks wait for, which may use the senders; None
            if one of them goes on.
    """

    batches: Mapping[int, Collection[Wait]] = {}
    senders: Collection[int] = ()
    others: Collection[Wait] | None = None

    @classmethod
    def of(cls, batches: Any, senders: Any, others: Any) -> Report:
        """What `waiting.report` gives, for which a wait is a tuple."""
        return cls(
            {number: [Wait(*wait) for wait in waits] for number, waits in batches.items()},
            senders,
            None if others is None else [Wait(*wait) for wait in others],
        )


NOTHING = Report()


class Batch(NamedTuple):
    """A batch in an instance, by the number that its reports use."""

    instance: Instance
    number: int


class Model(Protocol):
    """A model that is called, Python or not; its instances in the graph share it, no others."""

    @property
    def name(self) -> str:
        """Its name."""

    def limits(self) -> Sequence[_Taker]:
        """See `BackendModelContext.limits`."""

    def may_expire(self, timed: bool) -> bool:
        """See `BackendModelContext.may_expire`."""


class Call:
    """A request that a model makes of another, or that an ensemble makes of its member for it.

    Attributes:
        number: those made later have higher ones.
        caller: the instance whose model made it.
        call_id: the model's number of it; of a part that of the whole.
        model: the one that is called.
        batch: the one that has the call; None while it is in the model's queue.
        responses: responses so far.
        parts: what an ensemble is asking its members for this call, or is at work elsewhere.
        whole: the call this is a part of.
        timed: it has a time-out of its own.
        only: see `request.ModelCall`.
        others: one of these has to be answered first; None among them goes on.
    """

    def __init__(
        self,
        caller: Instance,
        call_id: int,
        model: Model,
        timed: bool = False,
        whole: Call | None = None,
    ) -> None:
        self.number = next(caller.graph.numbers)
        self.caller = caller
        self.call_id = call_id
        self.model = model
        self.batch: Batch | None = None
        self.responses = 0
        self.parts: set[Call] = set()
        self.whole = whole
        self.timed = timed
        self.only: Callable[[], Instance | None] = _any
        self.others: Callable[[], Collection[Call | None]] = tuple

    def taken(self, batch: Batch) -> None:
        """From now on only this batch can answer."""
        self.batch = batch

    def part(self, model: Model) -> Call:
        """An ensemble asks a member."""
        part = Call(self.caller, self.call_id, model, self.timed, self)
        self.parts.add(part)
        return part

    def elsewhere(self) -> Call:
        """See `request.ModelCall`: a part that is answered without any of the instances."""
        return self.part(_ELSEWHERE)

    def behind(self, others: Callable[[], Collection[Any]]) -> Call:
        """See `request.ModelCall`."""
        part = self.part(self.model)
        part.others = others
        return part

    def ended(self) -> None:
        """The member has answered its ensemble, or what was at work elsewhere is done."""
        assert self.whole is not None
        self.whole.parts.discard(self)


class Instance:
    """One instance of a Python model.

    Args:
        takes: whether it is ever given a request.

    Attributes:
        places: batches that it executes at a time.
        calls: of its model, by the model's number of the call.
        report: the last one; `NOTHING` if it may be out of date.
        ask: makes it report.
        refuse: answers one of its calls with an error.
    """

    ask: Callable[[], None]
    refuse: Callable[[Call, InternalError], None]

    def __init__(self, graph: CallGraph, model: Model, takes: bool = True) -> None:
        self.graph = graph
        self.model = model
        self.places = 1 if takes else 0
        self.calls: dict[Any, Call] = {}
        self.report = NOTHING
        graph.models.setdefault(model, []).append(self)

    def starts(self, call_id: int, model: Model, timed: bool = False) -> Call:
        """The model calls another."""
        call = self.calls[call_id] = Call(self, call_id, model, timed)
        return call

    def ends(self, call_id: int) -> None:
        """The call has its final response, or the model will not hear of it any more."""
        self.calls.pop(call_id, None)

    def clear(self) -> None:
        """The model is gone, and its calls with it."""
        self.calls.clear()
        self.report = NOTHING

    def leave(self) -> None:
        """The instance is gone."""
        self.clear()
        instances = self.graph.models[self.model]
        instances.remove(self)
        if not instances:
            del self.graph.models[self.model]

    def waits(self, number: int) -> list[Call] | None:
        """The calls that a batch waits for; None if it goes on."""
        waits = self.report.batches.get(number)
        return self._outstanding(waits) if waits else None

    def answers(self, number: int) -> list[Call] | None:
        """The calls, any of which has to be answered before a request of the batch can be."""
        calls = self.waits(number)
        if calls is None or number not in self.report.senders:
            return calls
        others = self.report.others
        more = None if others is None else self._outstanding(others)
        return None if more is None else calls + more

    def _outstanding(self, waits: Iterable[Wait]) -> list[Call] | None:
        """The calls waited for; None if one has got a response since."""
        calls = []
        for wait in waits:
            call = self.calls.get(wait.call_id)
            if call is None or call.responses != wait.taken:
                return None
            calls.append(call)
        return calls


# An instance and those that hold resources which it lacks; None for those outside the graph.
_Taker = tuple[Instance | None, Sequence[Instance | None]]

# Whether an instance has or gets a place for one more batch if the given calls are stuck; or
# whether requests of its batch with this number can be answered.
_Free = Callable[[Instance, int | None, set[Call]], bool]


class CallGraph:
    """The instances of all Python models of a server, by model."""

    def __init__(self) -> None:
        self.models: dict[Model, list[Instance]] = {}
        self.numbers = itertools.count()

    @property
    def instances(self) -> list[Instance]:
        """All instances."""
        return [instance for instances in self.models.values() for instance in instances]

    def suspects(self) -> list[Instance]:
        """The instances that have to report before anything can be said of their calls.

        They call each other in circles: it could be that each of their batches waits.
        """
        stuck = self._stuck(_suspected)
        return [i for i in self.instances if not stuck.isdisjoint(i.calls.values())]

    def circle(self) -> list[Call]:
        """Calls that wait for each other by what the reports say, [] if there are none.

        Each waits for the next one, the last one for the first, which was made last of all that
        wait for each other: once it is refused, the others may go on.
        """
        stuck = self._stuck(_reported)
        if not stuck:
            return []
        knot = self._knot(stuck)
        last = max((call for call in knot if call.whole is None), key=lambda call: call.number)
        came_from: dict[Call, Call] = {}
        ways = deque([last])
        while last not in came_from:
            call = ways.popleft()
            for behind in self._behind(call, stuck):
                if behind not in came_from:
                    came_from[behind] = call
                    ways.append(behind)
        circle = [came_from[last]]
        while circle[-1] is not last:
            circle.append(came_from[circle[-1]])
        return circle[::-1]

    def _stuck(self, free: _Free) -> set[Call]:
        """The calls that can never be answered.

        Starts from the assumption that all are stuck and takes out those that can be answered
        until nothing changes.
        """
        stuck = {call for instance in self.instances for call in instance.calls.values()}
        parts = list(stuck)
        while parts:
            parts = [part for call in parts for part in call.parts]
            stuck.update(parts)
        gone = stuck
        while gone:
            known: dict[Any, bool] = {}
            gone = {call for call in stuck if self._answered(call, free, stuck, known)}
            stuck -= gone
        return stuck

    def _answered(self, call: Call, free: _Free, stuck: set[Call], known: dict[Any, bool]) -> bool:
        """Whether a call can be answered if the given ones are stuck.

        Args:
            known: the same of batches and of queues.
        """
        batch = call.batch
        if waits_for := call.parts or call.others():
            return not stuck.issuperset(waits_for)
        if batch is not None:
            if batch not in known:
                known[batch] = free(batch.instance, batch.number, stuck)
            return known[batch]
        way = (call.model, call.only())
        if way not in known:
            takers = self._takers(call)
            known[way] = not takers or any(
                _gets_free(taker, free, stuck)
                and (not holders or any(_gets_free(each, free, stuck) for each in holders))
                for taker, holders in takers
            )
        return known[way] or call.model.may_expire(call.timed)

    def _takers(self, call: Call) -> list[_Taker]:
        """The instances that could take a call out of its queue."""
        limits, only = call.model.limits(), call.only()
        takers = limits or [(i, ()) for i in self.models.get(call.model, ()) if i.places]
        return [taker for taker in takers if only is None or taker[0] is only]

    def _knot(self, stuck: set[Call]) -> set[Call]:
        """Stuck calls that all wait for each other and for nothing else."""
        knot = self._reach(next(iter(stuck)), stuck)
        while True:
            within = next((reach for c in knot if (reach := self._reach(c, stuck)) < knot), None)
            if within is None:
                return knot
            knot = within

    def _behind(self, call: Call, stuck: set[Call]) -> Iterable[Call]:
        """The calls that a stuck one waits for."""
        if waits_for := call.parts or call.others():
            return [each for each in waits_for if each is not None]
        if call.batch is not None:
            return call.batch.instance.answers(call.batch.number) or ()
        waits = (
            instance.waits(number)
            for taker, holders in self._takers(call)
            for instance in (holders if _gets_free(taker, _reported, stuck) else [taker])
            if instance is not None
            for number in instance.report.batches
        )
        return [behind for calls in waits if calls for behind in calls]

    def _reach(self, call: Call, stuck: set[Call]) -> set[Call]:
        """All that a stuck call waits for, directly or not; itself only in a circle."""
        reach: set[Call] = set()
        ways = [call]
        while ways:
            for behind in self._behind(ways.pop(), stuck):
                if behind not in reach:
                    reach.add(behind)
                    ways.append(behind)
        return reach


class _Elsewhere:
    """What has no instances in the graph."""

    name = "elsewhere"

    def limits(self) -> Sequence[_Taker]:
        return ()

    def may_expire(self, timed: bool) -> bool:
        return True


_ELSEWHERE = _Elsewhere()


def _any() -> Instance | None:
    """A call that any instance of the model can take."""
    return None


def _gets_free(instance: Instance | None, free: _Free, stuck: set[Call]) -> bool:
    return instance is None or free(instance, None, stuck)


def _suspected(instance: Instance, _number: int | None, stuck: set[Call]) -> bool:
    return stuck.isdisjoint(instance.calls.values())


def _reported(instance: Instance, number: int | None, stuck: set[Call]) -> bool:
    if number is not None:
        calls = instance.answers(number)
        return calls is None or not stuck.issuperset(calls)
    waits = map(instance.waits, instance.report.batches)
    return sum(calls is not None and stuck.issuperset(calls) for calls in waits) < instance.places
