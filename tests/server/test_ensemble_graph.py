"""Ensembles as graphs: what a load refuses, and which steps a choice of outputs needs."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from google.protobuf import text_format

from npuserve.errors import InvalidArgumentError, NotFoundError
from npuserve.model_config import ModelConfig
from npuserve.server.ensemble_check import check_ensemble
from npuserve.server.ensemble_graph import ROOT, EnsembleGraph, convert_batch, member_models


def config(text: str) -> ModelConfig:
    parsed: ModelConfig = text_format.Parse(text, ModelConfig())
    return parsed


def member(
    name: str,
    inputs: Mapping[str, str],
    outputs: Mapping[str, str],
    max_batch_size: int = 0,
    decoupled: bool = False,
    optional: tuple[str, ...] = (),
) -> ModelConfig:
    """A configuration with tensors given as {name: "FP32 4,-1"}."""
    text = f'name: "{name}" max_batch_size: {max_batch_size}\n'
    for kind, tensors in (("input", inputs), ("output", outputs)):
        for tensor, spec in tensors.items():
            datatype, dims = spec.split()
            extra = "optional: true" if tensor in optional else ""
            text += (
                f'{kind} {{ name: "{tensor}" data_type: TYPE_{datatype} dims: [{dims}] {extra} }}\n'
            )
    if decoupled:
        text += "model_transaction_policy { decoupled: true }\n"
    return config(text)


def ensemble(
    steps: list[tuple[str, dict[str, str], dict[str, str]]],
    inputs: Mapping[str, str],
    outputs: Mapping[str, str],
    max_batch_size: int = 0,
) -> ModelConfig:
    made = member("e", inputs, outputs, max_batch_size)
    made.platform = "ensemble"
    for model, input_map, output_map in steps:
        name, _, version = model.partition(":")
        made.ensemble_scheduling.step.add(
            model_name=name,
            model_version=int(version or -1),
            input_map=input_map,
            output_map=output_map,
        )
    return made


class Members:
    """What a server would find by name."""

    def __init__(self, *configs: ModelConfig) -> None:
        self._configs = {each.name: each for each in configs}

    def __call__(self, name: str, version: int) -> ModelConfig:
        if name not in self._configs or version not in (-1, 1):
            raise NotFoundError(f"Request for unknown model: '{name}' is not found")
        return self._configs[name]


ADD = member("add", {"X": "FP32 4", "Y": "FP32 4"}, {"Z": "FP32 4"}, max_batch_size=4)


def refusal(made: ModelConfig, *members: ModelConfig) -> str:
    with pytest.raises(InvalidArgumentError) as caught:
        check_ensemble(made, Members(*members))
    return str(caught.value)


def two_inputs(step: tuple[str, dict[str, str], dict[str, str]], **kwargs: int) -> ModelConfig:
    return ensemble(
        [step], {"A": "FP32 4", "B": "FP32 4"}, {"C": "FP32 4"}, **({"max_batch_size": 4} | kwargs)
    )


GOOD_STEP = ("add", {"X": "A", "Y": "B"}, {"Z": "C"})


def test_a_fitting_ensemble_passes_and_is_not_decoupled() -> None:
    """Members that fit are accepted."""
    assert check_ensemble(two_inputs(GOOD_STEP), Members(ADD)) is False


def test_a_decoupled_member_makes_the_ensemble_decoupled() -> None:
    """The check says so, since the server has to write it into the configuration."""
    stream = member("stream", {"X": "FP32 4"}, {"Z": "FP32 4"}, decoupled=True)
    made = ensemble([("stream", {"X": "A"}, {"Z": "C"})], {"A": "FP32 4"}, {"C": "FP32 4"})
    assert check_ensemble(made, Members(stream)) is True


def test_members_are_listed_once_in_order_with_their_versions() -> None:
    """The same model and version is one member, another version another one."""
    made = ensemble([("b", {}, {}), ("a:3", {}, {}), ("b", {}, {}), ("b:2", {}, {})], {}, {})
    assert member_models(made) == [("b", -1), ("a", 3), ("b", 2)]


def test_missing_members_are_all_named() -> None:
    """Models that are not there are listed together."""
    made = ensemble(
        [("one", {"X": "A"}, {"Z": "t"}), ("two", {"X": "t"}, {"Z": "C"})],
        {"A": "FP32 4"},
        {"C": "FP32 4"},
    )
    assert refusal(made) == (
        "ensemble e contains models that are not available or ambiguous: one, two"
    )


def test_a_missing_version_is_named() -> None:
    """A pinned version that is not loaded is a different error from a missing model."""
    text = refusal(two_inputs(("add:7", {"X": "A", "Y": "B"}, {"Z": "C"})), ADD)
    assert text == "ensemble 'e' depends on 'add' whose required version 7 is not loaded."


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (
            ("add", {"X": "A", "Y": "B", "W": "B"}, {"Z": "C"}),
            "ensemble tensor B is mapping to non-existing input W in model add (step 0)",
        ),
        (
            ("add", {"X": "A", "Y": "B"}, {"Q": "C"}),
            "ensemble tensor C is mapped from non-existing output Q in model add (step 0)",
        ),
        (
            ("add", {"X": "A"}, {"Z": "C"}),
            "input Y in model add is not mapped to any ensemble tensors (step 0)",
        ),
    ],
)
def test_names_must_exist_in_the_member(
    step: tuple[str, dict[str, str], dict[str, str]], text: str
) -> None:
    """Every mapped name is one of the member's, and all required inputs are mapped."""
    assert refusal(two_inputs(step), ADD) == f"in ensemble e, {text}"


def test_an_optional_input_need_not_be_mapped() -> None:
    """Optional inputs of a member may stay without a tensor."""
    loose = member("add", {"X": "FP32 4", "Y": "FP32 4"}, {"Z": "FP32 4"}, optional=("Y",))
    made = ensemble([("add", {"X": "A"}, {"Z": "C"})], {"A": "FP32 4"}, {"C": "FP32 4"})
    check_ensemble(made, Members(loose))


def test_two_outputs_cannot_write_one_tensor() -> None:
    """A tensor has one writer."""
    two = member("two", {"X": "FP32 4"}, {"P": "FP32 4", "Q": "FP32 4"})
    made = ensemble([("two", {"X": "A"}, {"P": "C", "Q": "C"})], {"A": "FP32 4"}, {"C": "FP32 4"})
    assert refusal(made, two) == (
        "in ensemble e, multiple outputs in model two are mapped to the same ensemble tensor C "
        "(step 0)"
    )


def test_datatypes_must_agree() -> None:
    """The error names both models and both types."""
    made = ensemble([GOOD_STEP], {"A": "INT32 4", "B": "FP32 4"}, {"C": "FP32 4"}, 4)
    assert refusal(made, ADD) == (
        "in ensemble e, ensemble tensor A: inconsistent data type: TYPE_INT32 is inferred from "
        "model e while TYPE_FP32 is inferred from model add (step 0)"
    )


def test_shapes_must_agree() -> None:
    """The error shows full shapes, batch dimension included."""
    made = ensemble([GOOD_STEP], {"A": "FP32 4", "B": "FP32 5"}, {"C": "FP32 4"}, 4)
    assert refusal(made, ADD) == (
        "in ensemble e, ensemble tensor B: inconsistent shape: [-1,5] is inferred from model e "
        "while [-1,4] is inferred from model add (step 0)"
    )


def test_a_variable_dimension_agrees_with_any_size() -> None:
    """-1 on either side fits."""
    made = ensemble([GOOD_STEP], {"A": "FP32 -1", "B": "FP32 4"}, {"C": "FP32 -1"}, 4)
    check_ensemble(made, Members(ADD))


@pytest.mark.parametrize("dims", ["4", "-1,4"])
def test_a_member_without_batch_dimension_fits_a_batching_ensemble(dims: str) -> None:
    """Its shape may be the one with or without the batch dimension."""
    plain = member("add", {"X": f"FP32 {dims}", "Y": f"FP32 {dims}"}, {"Z": f"FP32 {dims}"})
    check_ensemble(two_inputs(GOOD_STEP), Members(plain))


def test_a_member_must_take_the_ensemble_s_largest_batch() -> None:
    """A smaller maximum of a batching member is refused."""
    assert refusal(two_inputs(GOOD_STEP, max_batch_size=16), ADD) == (
        "ensemble e allows maximum batch size 16, but it contains model add which only allows "
        "maximum batch size to be 4 (step 0)"
    )


def test_steps_that_wait_for_each_other_are_refused() -> None:
    """A loop of tensors never runs."""
    made = ensemble(
        [
            ("add", {"X": "A", "Y": "back"}, {"Z": "forth"}),
            ("add", {"X": "A", "Y": "forth"}, {"Z": "back"}),
        ],
        {"A": "FP32 4"},
        {"back": "FP32 4"},
        4,
    )
    assert refusal(made, ADD) == (
        "in ensemble e, ensemble tensor back is not connected, so that model add can never run "
        "(step 0)"
    )


def test_one_step_cannot_mix_two_decoupled_models() -> None:
    """Their responses do not belong together."""
    stream = member("stream", {"X": "FP32 4"}, {"Z": "FP32 4"}, decoupled=True)
    plain_add = member("add", {"X": "FP32 4", "Y": "FP32 4"}, {"Z": "FP32 4"})
    made = ensemble(
        [
            ("stream", {"X": "A"}, {"Z": "p"}),
            ("stream", {"X": "A"}, {"Z": "q"}),
            ("add", {"X": "p", "Y": "q"}, {"Z": "C"}),
        ],
        {"A": "FP32 4"},
        {"C": "FP32 4"},
    )
    assert refusal(made, stream, plain_add) == (
        "in ensemble e, step of model 'add' receives inputs originated from different decoupled "
        "models (step 2)"
    )


def chain() -> EnsembleGraph:
    one = member("one", {"X": "FP32 4"}, {"Z": "FP32 4"})
    made = ensemble(
        [
            ("one", {"X": "mid"}, {"Z": "end"}),
            ("one", {"X": "A"}, {"Z": "mid"}),
            ("one", {"X": "A"}, {"Z": "side"}),
        ],
        {"A": "FP32 4"},
        {"mid": "FP32 4", "end": "FP32 4", "side": "FP32 4"},
    )
    return EnsembleGraph(made, Members(one))


@pytest.mark.parametrize(
    ("requested", "steps"),
    [
        ((), {0, 1, 2}),
        (("mid",), {1}),
        (("end",), {0, 1}),
        (("side",), {2}),
        (("side", "mid"), {1, 2}),
    ],
)
def test_a_plan_has_only_the_steps_its_outputs_need(
    requested: tuple[str, ...], steps: set[int]
) -> None:
    """Steps that nothing asked for depends on are left out."""
    plan = chain().plan(requested)
    assert set(plan.waiting[ROOT]) == steps
    assert [each.name for each in plan.outputs] == [
        name for name in ("mid", "end", "side") if not requested or name in requested
    ]


def test_plans_are_made_once() -> None:
    """A repeated choice costs a look-up."""
    graph = chain()
    assert graph.plan(("end",)) is graph.plan(("end",))


@pytest.mark.parametrize(
    ("shape", "dims", "add", "expected"),
    [
        ([4], [4], True, [1, 4]),
        ([2, 4], [4], True, [2, 4]),
        ([1, 4], [4], False, [4]),
        ([2, 4], [4], False, [2, 4]),
        ([1, 4], [-1, 4], False, [1, 4]),
    ],
)
def test_batch_conversion(
    shape: list[int], dims: list[int], add: bool, expected: list[int]
) -> None:
    """A batch dimension of 1 is added or taken away only where the dims show the need."""
    assert list(convert_batch(shape, dims, add)) == expected
