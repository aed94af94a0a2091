"""Random ensembles give what evaluating the graph directly gives."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.server.schedulers.ensemble_driver import ADD, STREAM, Ensemble, io, step, steps, values


@given(st.data())
def test_random_graphs_give_what_direct_evaluation_gives(data: st.DataObject) -> None:
    """Whatever the graph, the outputs asked for and the order in which members answer."""
    count = data.draw(st.integers(1, 8), label="steps")
    tensors = ["A", "B"]
    entries, expected = [], {"A": 1.0, "B": 2.0}
    for number in range(count):
        left, right = (data.draw(st.sampled_from(tensors)) for _ in range(2))
        entries.append(step("add", f"X={left} Y={right}", f"Z=t{number}"))
        tensors.append(f"t{number}")
        expected[f"t{number}"] = expected[left] + 2 * expected[right]
    order = data.draw(st.permutations(entries), label="order in the configuration")
    names = [f"t{number}" for number in range(count)]
    text = io("input", "A B") + io("output", " ".join(names)) + steps(*order)
    ensemble = Ensemble(text, ADD)
    wanted = data.draw(st.lists(st.sampled_from(names), unique=True), label="outputs")
    _, answers = ensemble.infer({"A": 1, "B": 2}, tuple(wanted))
    members = ensemble.members
    while members.waiting:
        request = members.waiting.pop(data.draw(st.integers(0, len(members.waiting) - 1)))
        given = values(list(request.inputs.values()))
        members.answer(request, {"Z": given["X"] + 2 * given["Y"]})
    assert answers.outputs == [{name: expected[name] for name in wanted or names}]
    assert len(members.seen) <= count


@given(st.data())
def test_random_streaming_graphs_give_one_response_per_iteration_in_order(
    data: st.DataObject,
) -> None:
    """Steps before, behind and beside a decoupled one, answering in any order."""
    tensors = ["A", "B"]
    entries: list[str] = []
    formulas: list[tuple[str, str, str]] = []
    streaming = data.draw(st.integers(0, 3), label="position of the decoupled step")
    for number in range(5):
        name = f"t{number}"
        if number == streaming:
            source = data.draw(st.sampled_from(tensors))
            entries.append(step("stream", f"X={source}", f"Y={name}"))
            formulas.append(("stream", source, name))
            tensors.append(name)
            continue
        left, right = (data.draw(st.sampled_from(tensors)) for _ in range(2))
        entries.append(step("add", f"X={left} Y={right}", f"Z={name}"))
        formulas.append((left, right, name))
        tensors.append(name)
    names = [f"t{number}" for number in range(5)]
    wanted = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    wanted = sorted({*wanted, f"t{streaming}"})
    ensemble = Ensemble(
        io("input", "A B") + io("output", " ".join(names)) + steps(*entries), ADD, STREAM
    )
    _, answers = ensemble.infer({"A": 1, "B": 2}, tuple(wanted))
    iterations = data.draw(st.integers(0, 4), label="iterations")
    members = ensemble.members
    sent: dict[int, int] = {}
    while members.waiting:
        request = members.waiting[data.draw(st.integers(0, len(members.waiting) - 1))]
        given_values = values(list(request.inputs.values()))
        if request.model_name == "add":
            members.waiting.remove(request)
            members.answer(request, {"Z": given_values["X"] + 2 * given_values["Y"]})
            continue
        count = sent.get(id(request), 0)
        if count == iterations:
            members.waiting.remove(request)
            members.answer(request, None)
        else:
            sent[id(request)] = count + 1
            members.answer(request, {"Y": given_values["X"] + 100 * (count + 1)}, final=False)
    assert answers.final == 1
    expected = []
    for iteration in range(1, iterations + 1):
        known = {"A": 1.0, "B": 2.0}
        for left, right, name in formulas:
            streamed = left == "stream"
            known[name] = (
                known[right] + 100 * iteration if streamed else (known[left] + 2 * known[right])
            )
        expected.append({name: known[name] for name in wanted})
    assert answers.outputs == expected
