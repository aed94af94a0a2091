"""One request on its way through an ensemble's graph.

Steps run as requests of their member models. A step starts as soon as its tensors are there; only
steps that the requested outputs depend on run at all. Tensors go from step to step by reference.
All of it happens in the response callbacks of the members: no task, no queue.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING

from npuserve.errors import (
    InternalError,
    InvalidArgumentError,
    NpuserveError,
    RequestCancelledError,
    error_from_code,
)
from npuserve.request import SEQUENCE_END, SEQUENCE_START, InferenceRequest, ModelCall
from npuserve.response import InferenceResponse
from npuserve.server.ensemble_graph import ROOT
from npuserve.server.ensemble_iteration import NEVER, Iteration, Never, override_tag
from npuserve.server.ensemble_members import Members
from npuserve.server.statistics import FailureReason
from npuserve.server.validation import request_prefix

if TYPE_CHECKING:
    from npuserve.server.ensemble_graph import Step
    from npuserve.server.ensemble_iteration import SequenceTag
    from npuserve.server.ensemble_members import EnsembleParts
    from npuserve.tensor import Tensor

logger = logging.getLogger(__name__)


class StepCall:
    """One execution of a step: a request of its member."""

    __slots__ = ("at_gate", "iteration", "run", "step")

    def __init__(self, run: EnsembleRun, step: Step, iteration: Iteration) -> None:
        self.run = run
        self.step = step
        self.iteration = iteration
        self.at_gate: ModelCall | None = None  # while it waits there for a model

    def answered(self, response: InferenceResponse | None, final: bool) -> None:
        """The member's response callback."""
        self.run.answered(self, response, final)


class EnsembleRun:
    """One request on its way through the graph."""

    __slots__ = (
        "_advancing", "_calls", "_compute_ns", "_held", "_leaves", "_members", "_outbox",
        "_owns_members", "_partial", "_parts", "_plan", "_ready", "_request", "_tag", "_tagged",
    )  # fmt: skip

    def __init__(self, parts: EnsembleParts, request: InferenceRequest) -> None:
        self._parts = parts
        self._request = request
        self._plan = parts.graph.plan(request.requested_outputs)
        self._tag: SequenceTag = (request.correlation_id, request.flags)
        self._tagged = False
        self._ready: deque[StepCall] = deque()
        # In flight. Taken out at the end, or call and request would keep each other (and the
        # buffers of their tensors) until the garbage collector comes.
        self._calls: dict[StepCall, InferenceRequest] = {}
        self._held: dict[int, int] = {}  # by scope: calls that wait at a gate
        self._members: Members | None = None
        self._owns_members = False  # else those of the ensemble around this one, which holds them
        self._advancing = False
        # Iterations still to be answered, in order, by leaf scope.
        self._leaves: dict[int, deque[Iteration]] = {
            scope: deque() for scope in self._plan.leaf_scopes
        }
        # By scope: iterations that still need a tensor of an outer one.
        self._partial: dict[int, list[Iteration]] = {}
        self._outbox: deque[InferenceResponse] = deque()
        self._compute_ns = (0, 0, 0)  # summed over the steps

    def start(self) -> None:
        """Set the request's inputs and start what can start."""
        self._request.on_cancel = self._cancelled
        if self._parts.graph.decoupled:
            self._request.on_hold = self._pace
        self._members, self._request.scheduling = self._request.scheduling, None
        if self._members is None:
            self._owns_members = True
            try:
                self._members = Members(self._parts, self._request.requested_outputs)
            except NpuserveError as error:
                self._fail(error)
                return
        root = Iteration(ROOT, None, self._plan)
        if ROOT in self._leaves:
            self._leaves[ROOT].append(root)
        given = self._request.inputs
        for name in self._parts.graph.inputs:
            self._settle(root, name, given.get(name))
        self._advance()

    def _finish(self, response: InferenceResponse | None) -> None:
        """Answer for the last time; no step starts any more."""
        self._request.deliver(response, True)
        members, self._members = self._members, None
        if members is not None and self._owns_members:
            members.let_go()

    # ---------------------------------------------------------------- tensors

    def _settle(self, iteration: Iteration, name: str, value: Tensor | Never | None) -> None:
        """A tensor has come, or it is known that it will not."""
        iteration.tensors[name] = value
        scope = iteration.scope
        if name in self._plan.output_names.get(scope, ()):
            iteration.outputs_missing -= 1
        for step in self._plan.consumers.get(name, ()):
            if step.scope == scope:
                self._arrived(step, iteration)
            else:
                self._arrived_from_outside(step, iteration)

    def _arrived(self, step: Step, iteration: Iteration) -> None:
        left = iteration.waiting[step.index] - 1
        iteration.waiting[step.index] = left
        if not left:
            self._ready.append(StepCall(self, step, iteration))

    def _arrived_from_outside(self, step: Step, outer: Iteration) -> None:
        """Iterations that were opened before a tensor of the iteration around them came."""
        still_partial = []
        for iteration in self._partial.get(step.scope, ()):
            if outer in iteration.ancestors:
                iteration.outer_missing -= 1
                self._arrived(step, iteration)
            if iteration.outer_missing:
                still_partial.append(iteration)
        self._partial[step.scope] = still_partial

    def _open(self, scope: int, parent: Iteration) -> Iteration:
        """A new iteration for a response of the decoupled step `scope`."""
        iteration = Iteration(scope, parent, self._plan)
        if scope in self._leaves:
            self._leaves[scope].append(iteration)
        for outer in iteration.ancestors:
            for name in outer.tensors:
                for step in self._plan.consumers.get(name, ()):
                    if step.scope == scope:
                        iteration.outer_missing -= 1
                        self._arrived(step, iteration)
        if iteration.outer_missing:
            self._partial.setdefault(scope, []).append(iteration)
        return iteration

    # ---------------------------------------------------------------- steps

    def _advance(self) -> None:
        """Start every step that is ready; then answer what can be answered.

        A member may answer while its request is being submitted (a cache hit), and so come back
        here; the loop that already runs goes on with what that made ready.
        """
        if self._advancing:
            return
        if self._request.cancelled:
            self._ready.clear()
        self._advancing = True
        while self._ready:
            call = self._ready.popleft()
            inputs = self._inputs(call)
            if inputs is None:
                self._skip(call)
                continue
            member = self._member_request(call, inputs)
            gate = self._parts.gates.get(call.step.index)
            if gate is None or gate.enter(call, member):
                self._submit(call, member)
            else:
                scope = call.step.scope
                self._held[scope] = self._held.get(scope, 0) + 1
                if self._request.for_model is not None:
                    call.at_gate = self._request.for_model.behind(gate.inside)
                self._pace()
        self._advancing = False
        if not self._request.finished:
            self._answer()

    def wants_held_call(self, call: StepCall) -> bool:
        """A call leaves its gate: whether it is still of use."""
        self._held[call.step.scope] -= 1
        if call.at_gate is not None:
            call.at_gate.ended()
        self._pace()
        return not self._request.finished and not self._request.cancelled

    def released(self, call: StepCall, member: InferenceRequest) -> None:
        """A gate lets the call through."""
        self._submit(call, member)
        self._advance()

    def _inputs(self, call: StepCall) -> dict[str, Tensor] | None:
        """Inputs of the member's request; None if one is missing that it cannot do without."""
        inputs: dict[str, Tensor] = {}
        for each in call.step.inputs:
            home = call.iteration.home(each.tensor)
            value = home.tensors[each.tensor] if home is not None else NEVER
            if value is None and each.may_be_absent:
                continue
            if value is None or isinstance(value, Never):
                return None
            inputs[each.name] = each.adapt(value)
        return inputs

    def _skip(self, call: StepCall) -> None:
        if not call.step.decoupled:
            for tensor in call.step.outputs.values():
                self._settle(call.iteration, tensor, NEVER)

    def _member_request(self, call: StepCall, inputs: dict[str, Tensor]) -> InferenceRequest:
        request, step = self._request, call.step
        correlation_id, flags = self._tag
        if self._tagged:
            tensors = [each.tensor for each in step.inputs]
            correlation_id, flags = self._find_tag(call.iteration, tensors)
        member = InferenceRequest(
            step.model_name,
            inputs,
            call.answered,
            model_version=step.model_version,
            id=request.id,
            requested_outputs=step.requested_outputs,
            parameters=request.parameters,
            correlation_id=correlation_id,
            flags=flags,
            priority=request.priority,
            timeout_us=request.timeout_us,
        )
        member.parent = request
        member.inputs_shared = step.index in self._plan.shared or (
            request.inputs_shared and step.index in self._plan.entries
        )
        return member

    def _submit(self, call: StepCall, member: InferenceRequest) -> None:
        self._calls[call] = member
        assert self._members is not None
        try:
            self._members.accept(call.step, member)
        except NpuserveError as error:
            self._ended(call)
            self._fail(error)
            self._leave_gate(call, member)
        else:
            self._pace()

    def _pace(self, _held: bool = False) -> None:
        """Hold a stream of responses back while its reader, the client or a gate, is behind."""
        if not self._parts.graph.decoupled:
            return
        for call, member in tuple(self._calls.items()):
            step = call.step
            if step.decoupled:
                gate_is_full = step.may_pause and self._held.get(step.index, 0) > 0
                member.hold(self._request.held or gate_is_full)

    def _ended(self, call: StepCall) -> None:
        member = self._calls.pop(call)
        if member.for_model is not None:
            member.for_model.ended()

    def _leave_gate(self, call: StepCall, member: InferenceRequest) -> None:
        """Let others through. Last of all: they may be answered, or refused, at once."""
        gate = self._parts.gates.get(call.step.index)
        if gate is not None:
            gate.leave(member)

    def answered(self, call: StepCall, response: InferenceResponse | None, final: bool) -> None:
        """A member answered."""
        member = self._calls[call]
        if final:
            input_ns, infer_ns, output_ns = self._compute_ns
            more = member.compute_ns
            self._compute_ns = (input_ns + more[0], infer_ns + more[1], output_ns + more[2])
            self._ended(call)
        if not self._request.finished:
            try:
                self._go_on(call, member, response)
            except Exception:  # a fault of ours: the client must not wait for ever
                logger.exception("ensemble '%s': step %d", self._parts.name, call.step.index)
                self._fail(InternalError("internal error, see the server's log"))
        if final:
            self._leave_gate(call, member)

    def _go_on(
        self, call: StepCall, member: InferenceRequest, response: InferenceResponse | None
    ) -> None:
        """Do what a member's answer makes possible."""
        if response is not None and response.error is not None:
            self._fail(response.error)
            return
        if response is None and not member.response_count and not call.step.decoupled:
            response = InferenceResponse([])
        if response is not None:
            try:
                self._take(call, member, response)
            except InvalidArgumentError as error:
                self._fail(error)
                return
        self._advance()

    def _take(self, call: StepCall, member: InferenceRequest, response: InferenceResponse) -> None:
        """Settle the tensors a step wrote."""
        step, iteration = call.step, call.iteration
        tag = (member.correlation_id, member.flags)
        if response.parameters:
            tag = override_tag(tag, response.parameters)
        if step.decoupled:
            iteration = self._open(step.index, iteration)
        if tag != self._tag:
            self._tagged = True
            iteration.tags = (iteration.tags or {}) | dict.fromkeys(step.outputs.values(), tag)
        written: set[str] = set()
        for tensor in response.outputs:
            name = step.outputs.get(tensor.name)
            if name is not None and name not in written:
                written.add(name)
                self._settle(iteration, name, tensor)
        if len(written) < len(step.outputs):
            for name in step.outputs.values():
                if name not in written:
                    self._settle(iteration, name, None)

    def _find_tag(self, iteration: Iteration, tensors: list[str]) -> SequenceTag:
        """The tag that comes with these tensors, the request's own if none has another one."""
        found: SequenceTag | None = None
        for tensor in tensors:
            home = iteration.home(tensor)
            tag = home.tags.get(tensor) if home is not None and home.tags else None
            if tag is None:
                continue
            if found is not None and tag != found:
                logger.warning(
                    "%sdifferent sequence parameters reach one step of ensemble '%s'; "
                    "correlation ID %s, flags %d are used",
                    request_prefix(self._request.id), self._parts.name, *found,
                )  # fmt: skip
                break
            found = tag
        return found or self._tag

    # ---------------------------------------------------------------- answers

    def _answer(self) -> None:
        """Send what is complete; end the request when nothing is left to do."""
        request, outbox = self._request, self._outbox
        over = not self._calls and (request.cancelled or not any(self._held.values()))
        decoupled = self._parts.graph.decoupled
        if not over and not decoupled:
            return
        self._collect()
        if not over:
            while outbox:
                request.deliver(outbox.popleft(), False)
            return
        if not outbox and request.cancelled:
            self._fail(RequestCancelledError(""))
        elif not outbox and not decoupled:
            text = "unexpected deadlock, at least one output is not set while no more ensemble "
            self._fail(InvalidArgumentError(f"{request_prefix(request.id)}{text}steps can be made"))
        else:
            self._count_success()
            while len(outbox) > 1:
                request.deliver(outbox.popleft(), False)
            self._finish(outbox.popleft() if outbox else None)

    def _collect(self) -> None:
        """Turn complete iterations into responses, in the order in which they were opened.

        # Differs from Triton: with several instances behind a decoupled step it answers in the
        # order in which iterations end, which reorders a stream of tokens.
        """
        queues = tuple(self._leaves.values())
        while all(queue and queue[0].complete for queue in queues):
            response = self._make_response([queue.popleft() for queue in queues])
            if response is not None:
                self._outbox.append(response)

    def _make_response(self, leaves: list[Iteration]) -> InferenceResponse | None:
        """The response of one iteration (of each leaf scope); None if an output cannot come."""
        outputs = []
        tag = self._tag
        for output in self._plan.outputs:
            homes = (leaf.home(output.name) for leaf in leaves)
            home = next((home for home in homes if home is not None), None)
            value = home.tensors[output.name] if home is not None else NEVER
            if isinstance(value, Never):
                return None
            if value is None:
                continue  # the model left it out
            outputs.append(output.adapt(value))
            if home is not None and home.tags:
                tag = home.tags.get(output.name, tag)
        return InferenceResponse(
            outputs,
            parameters={
                "sequence_id": tag[0],
                "sequence_start": bool(tag[1] & SEQUENCE_START),
                "sequence_end": bool(tag[1] & SEQUENCE_END),
            },
            model_name=self._parts.name,
            model_version=self._parts.version,
        )

    def _fail(self, error: NpuserveError) -> None:
        """Answer with the error of a step; what other steps still do is of no use any more."""
        request = self._request
        if request.finished:
            return
        if request.cancelled:
            error, reason = RequestCancelledError(""), FailureReason.CANCELED
        else:
            text = f"in ensemble '{self._parts.name}', {error}"
            error, reason = error_from_code(error.code, text), FailureReason.OTHER
        self._ready.clear()
        now = self._parts.now_ns()
        self._parts.statistics.own.request_failure(reason, now - request.start_ns)
        self._finish(InferenceResponse.from_error(error))
        self._cancel_calls()

    def _cancelled(self, request: InferenceRequest) -> None:
        """The client is gone: no further step starts, running ones are told."""
        self._cancel_calls()
        if not request.finished:
            self._advance()

    def _cancel_calls(self) -> None:
        for member in tuple(self._calls.values()):
            member.cancel()

    def _count_success(self) -> None:
        counters, request = self._parts.statistics.own, self._request
        compute_ns = request.compute_ns = self._compute_ns
        total_ns = self._parts.now_ns() - request.start_ns
        queue_ns = max(0, request.compute_start_ns - request.queue_ns)
        counters.execution(request.batch_size or 1, *compute_ns)
        counters.request_success(request.batch_size, total_ns, queue_ns, *compute_ns)
