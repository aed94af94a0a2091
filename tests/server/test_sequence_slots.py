"""Sequences, slots and backlog; the rules as a state machine against a simple model."""

from __future__ import annotations

import time
from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from npuserve.errors import InvalidArgumentError, UnavailableError
from npuserve.request import SEQUENCE_END, SEQUENCE_START, InferenceRequest
from npuserve.response import InferenceResponse
from npuserve.server.sequence_slots import NOWHERE, Sequence, SequenceSlots

IDLE_NS = 1_000
BOTH = SEQUENCE_START | SEQUENCE_END


def ignore(response: InferenceResponse | None, final: bool) -> None:
    pass


def request(
    correlation_id: int | str, flags: int = 0, timeout_us: int = 0, queue_ns: int = 0
) -> InferenceRequest:
    made = InferenceRequest(
        "m", {}, ignore, correlation_id=correlation_id, flags=flags, timeout_us=timeout_us
    )
    made.queue_ns = queue_ns
    return made


def make(instances: int = 1, slots: int = 2) -> SequenceSlots:
    return SequenceSlots("m", instances, slots, IDLE_NS)


def run_one(slots: SequenceSlots, sequence: Sequence, now_ns: int = 0) -> InferenceRequest:
    taken = slots.take(sequence)
    slots.done(sequence, now_ns)
    return taken


def test_new_sequences_spread_over_instances() -> None:
    """The lowest free slot number first, then the lowest instance."""
    slots = make(instances=2, slots=2)
    placed = [slots.add(request(n, SEQUENCE_START), 0) for n in (1, 2, 3, 4)]
    assert [(each.instance, each.slot) for each in placed] == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_a_first_request_needs_the_start_flag() -> None:
    """Unknown, ended and expired ids are refused with Triton's text."""
    slots = make()
    text = "inference request for sequence 7 to model 'm' must specify the START flag on the first"
    with pytest.raises(InvalidArgumentError, match=text):
        slots.add(request(7), 0)
    sequence = slots.add(request(7, BOTH), 0)
    run_one(slots, sequence)
    with pytest.raises(InvalidArgumentError, match=text):
        slots.add(request(7), 0)
    assert len(slots) == 0


def test_text_and_number_are_different_ids() -> None:
    """The text and the number name two sequences."""
    slots = make()
    assert slots.add(request(5, SEQUENCE_START), 0) is not slots.add(
        request("5", SEQUENCE_START), 0
    )


def test_a_sequence_keeps_its_slot_until_its_end_was_executed() -> None:
    """Queuing END does not free the slot, executing it does."""
    slots = make(slots=1)
    first = slots.add(request(1, SEQUENCE_START), 0)
    second = slots.add(request(2, SEQUENCE_START), 0)
    slots.add(request(1, SEQUENCE_END), 0)
    run_one(slots, first)
    assert second.instance == NOWHERE
    run_one(slots, first)
    assert (second.instance, second.slot) == (0, 0)
    assert list(slots.ready[0]) == [second]


def test_the_backlog_is_served_in_order_with_all_queued_requests() -> None:
    """A freed slot takes the oldest sequence with everything that is queued for it."""
    slots = make(slots=1)
    first = slots.add(request(1, BOTH), 0)
    waiting = [slots.add(request(n, SEQUENCE_START), 0) for n in (2, 3)]
    slots.add(request(2, SEQUENCE_END), 0)
    assert slots.backlog == 2
    run_one(slots, first)
    assert [len(each.requests) for each in waiting] == [2, 1]
    assert (waiting[0].instance, waiting[1].instance) == (0, NOWHERE)


def test_start_inside_a_live_sequence_keeps_the_slot() -> None:
    """The id goes on where it is."""
    slots = make()
    sequence = slots.add(request(1, SEQUENCE_START), 0)
    assert slots.add(request(1, SEQUENCE_START), 0) is sequence


def test_a_new_sequence_of_an_id_waits_for_the_former_one() -> None:
    """Two sequences of one id never run side by side, and others are not starved by it."""
    slots = make(slots=1)
    first = slots.add(request(1, BOTH), 0)
    again = slots.add(request(1, SEQUENCE_START), 0)
    other = slots.add(request(2, BOTH), 0)
    assert again is not first
    run_one(slots, first)
    assert (other.instance, again.instance) == (0, NOWHERE)
    run_one(slots, other)
    assert again.instance == 0


def test_only_one_request_of_a_sequence_is_ready_at_a_time() -> None:
    """The next one is ready when the running one is done."""
    slots = make()
    sequence = slots.add(request(1, SEQUENCE_START), 0)
    slots.add(request(1), 0)
    slots.take(sequence)
    assert not slots.ready[0]
    slots.done(sequence, 5)
    assert list(slots.ready[0]) == [sequence]
    assert sequence.ready_ns == 5


def test_an_idle_sequence_is_forgotten_and_its_slot_reused() -> None:
    """Idle time counts from the last response; a request renews it."""
    slots = make(slots=1)
    sequence = slots.add(request(1, SEQUENCE_START), 0)
    run_one(slots, sequence, now_ns=100)
    slots.expire_idle(100 + IDLE_NS - 1)
    slots.add(request(1), 100 + IDLE_NS - 1)
    run_one(slots, sequence, now_ns=2_000)
    waiting = slots.add(request(2, SEQUENCE_START), 2_000)
    assert slots.next_event_ns() == 2_000 + IDLE_NS
    slots.expire_idle(2_000 + IDLE_NS)
    assert slots.find(1) is None
    assert waiting.instance == 0


def test_a_running_or_backlogged_sequence_is_not_idle() -> None:
    """However long it takes."""
    slots = make(slots=1)
    slots.take(slots.add(request(1, SEQUENCE_START), 0))
    slots.add(request(2, SEQUENCE_START), 0)
    slots.expire_idle(10**9)
    assert len(slots) == 2
    assert slots.next_event_ns() == 0


def test_a_backlogged_sequence_expires_as_a_whole() -> None:
    """The earliest timeout of its requests counts, and only while it has no slot."""
    slots = make(slots=1)
    slots.add(request(1, SEQUENCE_START, timeout_us=1), 0)
    late = [request(2, SEQUENCE_START, 9), request(2, 0, 5), request(2, SEQUENCE_END)]
    for each in late:
        slots.add(each, 0)
    assert slots.next_event_ns() == 5_000
    assert slots.expire_backlog(4_999) == []
    assert slots.expire_backlog(5_000) == late
    assert (len(slots), slots.queued, slots.backlog) == (1, 1, 0)


def test_any_number_of_cancelled_sequences_may_wait_for_their_id() -> None:
    """They are over as soon as the one before them is, without a call inside a call for each."""
    slots = make()
    first = slots.add(request(1, BOTH), 0)
    waiting = [request(1, BOTH) for _ in range(2_000)]
    for sequence, each in [(slots.add(each, 0), each) for each in waiting]:
        assert slots.cancel(sequence, each, 0) == [each]
    last = slots.add(request(1, BOTH), 0)
    run_one(slots, first)
    assert last.ready
    run_one(slots, last)
    assert len(slots) == slots.queued == 0


def test_a_cancelled_request_takes_its_time_out_with_it() -> None:
    """A START behind it in the backlog waits as long as it wishes itself."""
    slots = make(slots=1)
    slots.add(request(1, SEQUENCE_START), 0)
    hasty = request(2, SEQUENCE_START, timeout_us=1)
    waiting = slots.add(hasty, 0)
    patient = request(2, SEQUENCE_START, timeout_us=5)
    slots.add(patient, 0)
    assert slots.cancel(waiting, hasty, 0) == [hasty]
    assert slots.expire_backlog(4_999) == []
    assert slots.expire_backlog(5_000) == [patient]


def test_a_stopping_model_goes_on_with_live_sequences_only() -> None:
    """New sequences are refused as unavailable."""
    slots = make()
    slots.add(request(1, SEQUENCE_START), 0)
    slots.add(request(1), 0, accept_new=False)
    with pytest.raises(UnavailableError, match="Server is stopping"):
        slots.add(request(2, SEQUENCE_START), 0, accept_new=False)


def test_cancellation_takes_what_depends_on_the_request_with_it() -> None:
    """Requests before it and a new START behind it stay."""
    slots = make()
    requests = [request(1, flags) for flags in (SEQUENCE_START, 0, 0, SEQUENCE_START, 0)]
    sequence, *_ = (slots.add(each, 0) for each in requests)
    assert slots.cancel(sequence, requests[1], 0) == requests[1:3]
    assert list(sequence.requests) == [requests[0], *requests[3:]]
    assert not sequence.ended


def test_a_sequence_with_a_hole_ends_and_frees_its_slot() -> None:
    """A later request of it must begin with START."""
    slots = make(slots=1)
    first = slots.add(request(1, SEQUENCE_START), 0)
    hole = request(1)
    slots.add(hole, 0)
    waiting = slots.add(request(2, SEQUENCE_START), 0)
    slots.cancel(first, hole, 0)
    run_one(slots, first)
    assert slots.find(1) is None
    assert waiting.instance == 0


def test_a_lost_instance_drops_what_needs_its_memory() -> None:
    """Only requests from a START on stay; sequences of other instances are not touched."""
    slots = make(instances=2, slots=2)
    lost = slots.add(request(1, SEQUENCE_START), 0)
    other = slots.add(request(2, SEQUENCE_START), 0)
    run_one(slots, lost)
    needs_memory, fresh = request(1), request(1, SEQUENCE_START)
    slots.add(needs_memory, 0)
    slots.add(fresh, 0)
    assert slots.lose(0, 0) == [needs_memory]
    assert list(lost.requests) == [fresh]
    assert len(other.requests) == 1


def test_an_unusable_instance_gets_no_new_sequence() -> None:
    """They wait until an instance is usable again."""
    usable = {0: False, 1: True}
    slots = SequenceSlots("m", 2, 1, IDLE_NS, usable.__getitem__)
    first, second = (slots.add(request(n, SEQUENCE_START), 0) for n in (1, 2))
    assert (first.instance, second.instance) == (1, NOWHERE)
    usable[0] = True
    slots.fill(0)
    assert second.instance == 0


def test_a_rescheduled_request_comes_before_the_others() -> None:
    """It is the head of its sequence again."""
    slots = make()
    first = request(1, SEQUENCE_START)
    sequence = slots.add(first, 0)
    slots.add(request(1), 0)
    slots.take(sequence)
    slots.put_back(sequence, 0)
    assert slots.take(sequence) is first


def test_ten_thousand_sequences_cost_linear_time_and_leave_nothing() -> None:
    """Twice the sequences take about twice the time, and all tables are empty afterwards."""

    def measure(count: int) -> float:
        slots = make(instances=2, slots=count)
        begin = time.process_time()
        sequences = [slots.add(request(n, SEQUENCE_START), n) for n in range(1, count + 1)]
        for _ in range(2):
            for sequence in sequences:
                run_one(slots, sequence, 0)
                slots.add(request(sequence.id), 0)
        for sequence in sequences:
            run_one(slots, sequence, 0)
        for sequence in sequences[::2]:
            slots.add(request(sequence.id, SEQUENCE_END), 0)
            run_one(slots, sequence, 0)
        slots.expire_idle(IDLE_NS * 10)
        took = time.process_time() - begin
        assert len(slots) == slots.queued == slots.backlog == slots.next_event_ns() == 0
        assert all(each is None for row in slots.table for each in row)
        assert not any(slots.ready)
        return took

    measure(100)
    small = min(measure(2_500) for _ in range(3))
    large = min(measure(10_000) for _ in range(2))
    assert large < 12 * small  # 4 is linear, 16 would be quadratic


class SlotsMachine(RuleBasedStateMachine):
    """Random arrivals, executions, cancels, losses and time; every request leaves exactly once."""

    @initialize(instances=st.integers(1, 3), slots=st.integers(1, 3))
    def start(self, instances: int, slots: int) -> None:
        self.slots = SequenceSlots("m", instances, slots, IDLE_NS)
        self.now = 1
        self.number = 0
        self.waiting: dict[InferenceRequest, int] = {}  # → order of arrival
        self.running: dict[InferenceRequest, Sequence] = {}
        self.executed: dict[int | str, deque[int]] = {}
        self.home: dict[Sequence, tuple[int, int]] = {}
        self.sequences: dict[Sequence, None] = {}

    def gone(self, requests: list[InferenceRequest]) -> None:
        for each in requests:
            del self.waiting[each]

    @rule(
        correlation_id=st.sampled_from([1, 2, 3, 4, "1", "a"]),
        flags=st.sampled_from([0, 0, SEQUENCE_START, SEQUENCE_END, BOTH]),
        timeout_us=st.sampled_from([0, 0, 1, 3]),
    )
    def arrive(self, correlation_id: int | str, flags: int, timeout_us: int) -> None:
        made = request(correlation_id, flags, timeout_us, self.now)
        before = self.slots.find(correlation_id)
        try:
            self.sequences[self.slots.add(made, self.now)] = None
        except InvalidArgumentError:
            assert not flags & SEQUENCE_START
            assert before is None or before.ended
            return
        self.number += 1
        self.waiting[made] = self.number

    @rule(data=st.data())
    def execute(self, data: st.DataObject) -> None:
        ready = [sequence for each in self.slots.ready for sequence in each]
        if not ready:
            return
        sequence = data.draw(st.sampled_from(ready))
        taken = self.slots.take(sequence)
        assert taken.correlation_id == sequence.id
        assert all(
            self.waiting[taken] < order
            for other, order in self.waiting.items()
            if other is not taken and other.correlation_id == taken.correlation_id
        ), "a request overtook an earlier one of its id"
        assert all(each.correlation_id != taken.correlation_id for each in self.running)
        place = (sequence.instance, sequence.slot)
        assert self.home.setdefault(sequence, place) == place, "a sequence left its slot"
        del self.waiting[taken]
        self.running[taken] = sequence

    @precondition(lambda self: self.running)
    @rule(data=st.data(), again=st.booleans())
    def finish(self, data: st.DataObject, again: bool) -> None:
        done = data.draw(st.sampled_from(list(self.running)))
        sequence = self.running.pop(done)
        if again:
            self.slots.put_back(sequence, self.now)
            self.waiting[done] = 0  # before all others
        else:
            self.slots.done(sequence, self.now)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sampled_from(list(self.waiting)))
        holder = next(each for each in self.sequences if chosen in each.requests)
        out = self.slots.cancel(holder, chosen, self.now)
        assert chosen in out
        assert all(each.correlation_id == chosen.correlation_id for each in out)
        self.gone(out)

    @rule(instance=st.integers(0, 2))
    def lose(self, instance: int) -> None:
        if instance < len(self.slots.table):
            self.gone(self.slots.lose(instance, self.now))

    @rule(ns=st.sampled_from([1, 500, IDLE_NS, 5_000]))
    def advance(self, ns: int) -> None:
        self.now += ns
        self.slots.expire_idle(self.now)
        self.gone(self.slots.expire_backlog(self.now))

    @invariant()
    def nothing_is_lost(self) -> None:
        if not hasattr(self, "slots"):
            return
        held = [each for sequence in self.sequences for each in sequence.requests]
        assert len(held) == len(set(held)) == self.slots.queued
        assert set(held) == set(self.waiting)
        free_slot = any(None in row for row in self.slots.table)
        assert not (free_slot and self.slots.backlog), "a slot is free while sequences wait"

    def teardown(self) -> None:
        """Whatever happened, everything ends once what waits is executed and time passes."""
        if not hasattr(self, "slots"):
            return
        for done, sequence in list(self.running.items()):
            del self.running[done]
            self.slots.done(sequence, self.now)
        for _ in range(10_000):
            ready = [sequence for each in self.slots.ready for sequence in each]
            for sequence in ready:
                self.gone([self.slots.take(sequence)])
                self.slots.done(sequence, self.now)
            self.advance(IDLE_NS)
            if not len(self.slots):
                break
        assert not self.waiting
        assert len(self.slots) == 0


SlotsMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestSlots = SlotsMachine.TestCase
