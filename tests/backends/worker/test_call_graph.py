"""Calls between models that could never be answered."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from npuserve.backends.worker.call_graph import (
    NOTHING,
    Batch,
    Call,
    CallGraph,
    Instance,
    Report,
    Wait,
)


@pytest.fixture
def graph() -> CallGraph:
    return CallGraph()


@dataclass(frozen=True)
class Called:
    """A model by its name alone."""

    name: str
    takers: tuple[tuple[Instance | None, tuple[Instance | None, ...]], ...] = ()
    expires: bool = False

    def limits(self) -> Any:
        return self.takers

    def may_expire(self, timed: bool) -> bool:
        return self.expires or timed


def instance(graph: CallGraph, name: str, places: int = 1) -> Instance:
    made = Instance(graph, Called(name))
    made.places = places
    return made


def calls(caller: Instance, call_id: int, name: str) -> Call:
    return caller.starts(call_id, Called(name))


def waits(caller: Instance, *call_ids: int, taken: int = 0) -> None:
    """The only batch of the instance waits for the first of these calls to be answered."""
    caller.report = Report({1: [Wait(call_id, taken) for call_id in call_ids]})


def test_a_model_with_one_instance_cannot_call_itself(graph: CallGraph) -> None:
    """The only instance waits for itself, and nothing is said before it reports that."""
    a = instance(graph, "a")
    call = calls(a, 1, "a")
    assert graph.suspects() == [a]
    assert graph.circle() == []
    waits(a, 1)
    assert graph.circle() == [call]


def test_a_report_is_out_of_date_after_a_response(graph: CallGraph) -> None:
    """A response that the model had not seen when it reported makes it go on."""
    a = instance(graph, "a")
    call = calls(a, 1, "a")
    waits(a, 1)
    call.responses += 1
    assert graph.circle() == []
    waits(a, 1, taken=1)
    assert graph.circle() == [call]
    a.ends(1)
    assert graph.circle() == []


def test_a_free_instance_can_answer(graph: CallGraph) -> None:
    """Of two instances the first may call its own model, the second may not as well."""
    a, b = instance(graph, "a"), instance(graph, "a")
    calls(a, 1, "a")
    waits(a, 1)
    assert graph.circle() == []
    assert graph.suspects() == []
    second = calls(b, 1, "a")
    waits(b, 1)
    assert graph.circle()[0] is second


def test_a_circle_of_models(graph: CallGraph) -> None:
    """The circle is told from the call that was made last."""
    a, b, c = (instance(graph, name) for name in "abc")
    first, last, between = calls(a, 1, "b"), None, calls(b, 1, "c")
    waits(a, 1)
    waits(b, 1)
    assert graph.suspects() == []
    last = calls(c, 1, "a")
    waits(c, 1)
    assert set(graph.suspects()) == {a, b, c}
    assert graph.circle() == [last, first, between]


def test_a_free_instance_cannot_answer_what_another_has_taken(graph: CallGraph) -> None:
    """The circle a → b → a closes at the instance of b that works for a."""
    a, b, _free = instance(graph, "a"), instance(graph, "b"), instance(graph, "b")
    first = calls(a, 1, "b")
    first.taken(Batch(b, 1))
    last = calls(b, 1, "a")
    waits(a, 1)
    waits(b, 1)
    assert graph.circle() == [last, first]
    first.taken(Batch(b, 2))  # its execution is over, or has not been reported
    assert graph.circle() == []


def test_whoever_waits_for_a_circle_is_not_refused(graph: CallGraph) -> None:
    """A call that others hold up is not at fault: it goes on once the circle is broken."""
    a, b = instance(graph, "a"), instance(graph, "b")
    own = calls(a, 1, "a")
    waits(a, 1)
    calls(b, 1, "a")
    waits(b, 1)
    assert graph.circle() == [own]


def test_a_batch_that_waits_for_several_calls(graph: CallGraph) -> None:
    """It goes on after any of them."""
    a, b = instance(graph, "a"), instance(graph, "b")
    own, _other = calls(a, 1, "a"), calls(a, 2, "b")
    waits(a, 1, 2)
    assert graph.circle() == []
    calls(b, 1, "a")
    waits(b, 1)
    assert graph.circle()
    waits(a, 1, 3)  # a call that the graph does not know of
    assert graph.circle() == []
    waits(a, 1)
    assert graph.circle() == [own]


def test_instances_with_several_places(graph: CallGraph) -> None:
    """As long as one batch can go on, or there is room for another, calls are answered."""
    a = instance(graph, "a", places=2)
    calls(a, 1, "a")
    calls(a, 2, "a")
    a.report = Report({1: [Wait(1, 0)]})
    assert graph.circle() == []
    a.report = Report({1: [Wait(1, 0)], 2: [Wait(2, 0)]})
    assert len(graph.circle()) == 1


def test_parts_of_an_ensemble(graph: CallGraph) -> None:
    """A call of an ensemble is stuck when all is that the ensemble asks its members for."""
    a, _b = instance(graph, "a"), instance(graph, "b")
    call = calls(a, 1, "ensemble")
    waits(a, 1)
    assert graph.circle() == []
    other, own = call.part(Called("b")), call.part(Called("inner ensemble")).part(Called("a"))
    assert graph.circle() == []
    other.ended()
    assert own.whole
    assert graph.circle() == [call, own.whole, own]
    own.ended()
    assert graph.circle() == []


def test_what_is_at_work_elsewhere(graph: CallGraph) -> None:
    """A cache or a gate of an ensemble may answer a call, whatever its parts do."""
    a = instance(graph, "a")
    call = calls(a, 1, "ensemble")
    call.part(Called("a"))
    waits(a, 1)
    gate = call.elsewhere()
    assert graph.circle() == []
    gate.ended()
    assert graph.circle()


def test_a_call_behind_others(graph: CallGraph) -> None:
    """It is stuck with all that are in its way, a client's request among them is not."""
    a, b = instance(graph, "a"), instance(graph, "b")
    waits(a, 1)
    waits(b, 1)
    inside = calls(a, 1, "ensemble").part(Called("b"))
    inside.taken(Batch(b, 1))
    others: list[Call | None] = [inside, None]
    call = calls(b, 1, "ensemble")
    gate = call.behind(lambda: others)
    assert graph.circle() == []
    others.remove(None)
    assert set(graph.suspects()) == {a, b}
    assert graph.circle() == [call, gate, inside]
    others.append(calls(a, 2, "c"))
    assert graph.circle() == []
    gate.ended()
    others.clear()
    assert graph.circle() == []


def test_senders_may_be_used_by_others(graph: CallGraph) -> None:
    """Another thread may answer what a batch has taken, unless it waits for the same."""
    a, b = instance(graph, "a"), instance(graph, "b")
    calls(a, 1, "b").taken(Batch(b, 1))
    calls(b, 1, "a")
    waits(a, 1)
    at_work = Report({1: [Wait(1, 0)]}, senders=[1], others=None)
    b.report = at_work
    assert graph.circle() == []
    b.report = at_work._replace(others=[])
    assert graph.circle()
    calls(b, 2, "a")
    b.report = at_work._replace(others=[Wait(2, 0)])
    assert graph.circle()
    calls(b, 3, "elsewhere")
    b.report = at_work._replace(others=[Wait(3, 0)])
    assert graph.circle() == []


def test_a_call_that_leaves_its_queue(graph: CallGraph) -> None:
    """A call with a time-out for the queue is answered in any case, if nobody takes it."""
    a = instance(graph, "a")
    call = a.starts(1, Called("a"), timed=True)
    waits(a, 1)
    assert graph.circle() == []
    call.taken(Batch(a, 1))
    assert graph.circle() == [call]


def test_waiting_for_a_busy_model_is_no_circle(graph: CallGraph) -> None:
    """Any number may wait for a model that goes on, and for models outside the graph."""
    a, b, c = (instance(graph, name) for name in "abc")
    for caller, name in ((a, "c"), (b, "c"), (c, "onnx")):
        calls(caller, 1, name)
        waits(caller, 1)
    assert graph.suspects() == []
    assert graph.circle() == []


def test_the_only_instance_that_will_do(graph: CallGraph) -> None:
    """A sequence is on one instance, whatever other ones do."""
    a, other = instance(graph, "a"), instance(graph, "a")
    call = calls(a, 1, "a")
    waits(a, 1)
    call.only = lambda: other
    assert graph.circle() == []
    call.only = lambda: a
    assert graph.circle() == [call]


def test_resources_that_a_waiting_instance_has(graph: CallGraph) -> None:
    """A free instance is of no use while who has its resources waits for it."""
    a, b = instance(graph, "a"), instance(graph, "b")
    waits(a, 1)
    a.starts(1, Called("b", takers=((b, (a, None)),)))
    assert graph.circle() == []
    call = a.starts(1, Called("b", takers=((b, (a,)),)))
    assert graph.circle() == [call]
    a.starts(1, Called("onnx", takers=((None, (a,)), (None, ()))))
    assert graph.circle() == []
    call = a.starts(1, Called("onnx", takers=((None, (a,)),)))
    assert graph.circle() == [call]


def test_an_instance_that_is_never_given_a_request(graph: CallGraph) -> None:
    """A passive instance is of no use to who waits for the others."""
    a, _passive = instance(graph, "a"), Instance(graph, Called("a"), takes=False)
    calls(a, 1, "a")
    waits(a, 1)
    assert graph.circle()


def test_instances_leave_the_graph(graph: CallGraph) -> None:
    """Nothing is kept of unloaded models, and a restarted one is free."""
    a, b = instance(graph, "a"), instance(graph, "a")
    calls(a, 1, "a")
    waits(a, 1)
    a.clear()
    assert (a.calls, a.report) == ({}, NOTHING)
    a.leave()
    b.leave()
    assert graph.models == {}


# ---------------------------------------------------------------- against a model of the world


Target = str | int | frozenset[int]


@dataclass(frozen=True)
class World:
    """Instances, batches in them and calls that are made by instances.

    Attributes:
        instances: model and places of each.
        batches: instance of each, and the calls it waits for; it goes on after any of them.
        calls: the instance that makes it, and its targets: models ("a"), batches (0..) that have
            taken it, or the calls that it is behind; several if an ensemble asks several members.
            Any of them will do.
        held: idle instances of model "a" are held back until one of these instances, all of whose
            places are taken, has a free one.
    """

    instances: tuple[tuple[str, int], ...]
    batches: tuple[tuple[int, frozenset[int]], ...]
    calls: tuple[tuple[int, tuple[Target, ...]], ...]
    held: frozenset[int] = frozenset()

    def answered_ever(self, refused: frozenset[int] = frozenset()) -> set[int]:
        """The calls that some sequence of steps answers, found by trying all sequences."""
        begin = (frozenset[int](), refused)
        seen, ways = {begin}, [begin]
        while ways:
            for state in self._steps(*ways.pop()):
                if state not in seen:
                    seen.add(state)
                    ways.append(state)
        return {call for _, answered in seen for call in answered}

    def _steps(
        self, ended: frozenset[int], answered: frozenset[int]
    ) -> Iterable[tuple[frozenset[int], frozenset[int]]]:
        """A batch ends, or a call is executed and answered."""
        for number, (_, waits) in enumerate(self.batches):
            if number not in ended and (not waits or waits & answered):
                yield ended | {number}, answered
        for number, (_, targets) in enumerate(self.calls):
            if number not in answered and any(
                self._does(target, ended, answered) for target in targets
            ):
                yield ended, answered | {number}

    def _does(self, target: Target, ended: frozenset[int], answered: frozenset[int]) -> bool:
        if isinstance(target, frozenset):
            return bool(target & answered)
        if isinstance(target, int):
            return target in ended
        running = [i for number, (i, _) in enumerate(self.batches) if number not in ended]
        free = {i for i, (_, places) in enumerate(self.instances) if running.count(i) < places}
        if target == "a" and self.held and not self.held & free:
            free -= self._idle
        return any(self.instances[index][0] == target for index in free)

    @property
    def _idle(self) -> set[int]:
        return set(range(len(self.instances))) - {owner for owner, _ in self.batches}

    def graph(self) -> tuple[CallGraph, list[Call]]:
        """The same as a graph with reports."""
        graph = CallGraph()
        instances = [instance(graph, name, places) for name, places in self.instances]
        holders = tuple(instances[index] for index in self.held)
        takers = tuple(
            (each, holders if index in self._idle else ())
            for index, each in enumerate(instances)
            if self.held and each.model.name == "a"
        )
        made: list[Call] = []
        for number, (caller, targets) in enumerate(self.calls):
            call = calls(instances[caller], number, "ensemble")
            for target in targets:
                if isinstance(target, frozenset):
                    call.behind(partial(list, [made[each] for each in target]))
                    continue
                part = call if len(targets) == 1 else call.part(Called("member"))
                if isinstance(target, str):
                    part.model = Called(target, takers if target == "a" else ())
                else:
                    part.taken(Batch(instances[self.batches[target][0]], target))
            made.append(call)
        for index, each in enumerate(instances):
            each.report = Report(
                {
                    number: [Wait(call, 0) for call in waits]
                    for number, (owner, waits) in enumerate(self.batches)
                    if owner == index and waits
                }
            )
        return graph, made


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Small ones: up to four instances of three models, with up to six batches and calls."""
    names = st.sampled_from("abc")
    instances = draw(st.lists(st.tuples(names, st.sampled_from([1, 1, 2])), min_size=1, max_size=4))
    places = [index for index, (_, count) in enumerate(instances) for _ in range(count)]
    callers = draw(st.lists(st.integers(0, len(instances) - 1), min_size=1, max_size=6))
    batches = []
    for owner in draw(st.permutations(places))[:6]:
        own = [number for number, caller in enumerate(callers) if caller == owner]
        least = draw(st.integers(0, min(1, len(own))))
        waits = st.frozensets(st.sampled_from(own or [0]), min_size=least, max_size=2)
        batches.append((owner, draw(waits) if own else frozenset[int]()))
    made = []
    for number, caller in enumerate(callers):
        targets: st.SearchStrategy[Target] = st.one_of(names, st.integers(0, len(batches) - 1))
        if number:
            others = st.frozensets(st.integers(0, number - 1), min_size=1, max_size=2)
            targets = st.one_of(targets, others)
        some = st.one_of(st.tuples(names), st.tuples(targets), st.tuples(targets, targets))
        made.append((caller, draw(some)))
    held = st.frozensets(st.integers(0, len(instances) - 1), max_size=2)
    return World(tuple(instances), tuple(batches), tuple(made), draw(held))


def _resolves(world: World, target: Target) -> bool:
    return not isinstance(target, str) or any(name == target for name, _ in world.instances)


@given(worlds())
def test_exactly_what_can_never_be_answered_is_stuck(world: World) -> None:
    """A circle is found if and only if some call is answered by no sequence of steps."""
    assume(all(_resolves(world, target) for _, targets in world.calls for target in targets))
    possible = world.answered_ever()
    graph, made = world.graph()
    circle = graph.circle()
    wanted = {call for _, waits in world.batches for call in waits}
    stuck = {made[number] for number in range(len(made)) if number not in possible}
    assert bool(circle) == bool(stuck)
    for call in circle:
        assert (call.whole or call) in stuck
    if circle:
        assert made.index(circle[0]) in wanted
        assert set(graph.suspects()) >= {call.caller for call in circle}


@given(worlds())
def test_the_innocent_are_not_refused(world: World) -> None:
    """If refusing another call would have helped as well, the two wait for each other."""
    assume(all(_resolves(world, target) for _, targets in world.calls for target in targets))
    graph, made = world.graph()
    circle = graph.circle()
    if circle:
        refused = made.index(circle[0])
        freed = world.answered_ever(frozenset([refused]))
        for other in range(len(made)):
            if refused in world.answered_ever(frozenset([other])):
                assert other in freed


@given(worlds())
def test_refusing_calls_one_by_one_frees_all_others(world: World) -> None:
    """After each refusal more is possible, until every call is refused or answered."""
    assume(all(_resolves(world, target) for _, targets in world.calls for target in targets))
    refused: frozenset[int] = frozenset()
    graph, made = world.graph()
    while circle := graph.circle():
        number = made.index(circle[0])
        before = world.answered_ever(refused)
        assert number not in before
        refused |= {number}
        assert world.answered_ever(refused) > before
        circle[0].caller.ends(number)
    assert world.answered_ever(refused) == set(range(len(made)))
