"""The JSON form of a configuration."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npuserve._proto import model_config_pb2 as pb
from npuserve.errors import InvalidArgumentError
from npuserve.model_config import (
    ModelConfig,
    config_from_json,
    config_to_dict,
    config_to_json,
    datatype_enum,
    datatype_name,
    enum_name,
    is_decoupled,
)
from tests.model_repository.strategies import configs


def test_datatypes_have_protocol_names() -> None:
    """TYPE_STRING is BYTES, the others lose their prefix, and the way back is exact."""
    assert datatype_name(pb.TYPE_STRING) == "BYTES"
    assert datatype_name(pb.TYPE_BF16) == "BF16"
    assert datatype_name(99) == "<invalid>"
    assert all(
        datatype_enum(datatype_name(number)) == number
        for number in pb.DataType.values()
        if number != pb.TYPE_INVALID
    )


def test_unset_messages_are_left_out_and_scalars_shown_with_their_defaults() -> None:
    """A client finds every scalar and only the blocks that were configured."""
    shown = config_to_dict(ModelConfig(name="m"))
    assert shown["max_batch_size"] == 0
    assert shown["default_model_filename"] == ""
    assert shown["input"] == []
    assert not {"dynamic_batching", "optimization", "version_policy"} & shown.keys()


def test_fields_come_in_the_order_triton_shows_them() -> None:
    """Scrapers and people compare the text, so the order is part of the form."""
    keys = list(config_to_dict(ModelConfig()))
    assert keys[:6] == ["name", "platform", "backend", "runtime", "max_batch_size", "input"]


def test_64_bit_integers_are_numbers_but_for_the_ones_triton_forgot() -> None:
    """Dims are numbers; initial_state.dims stay texts, as in Triton."""
    config = config_from_json(
        '{"input": [{"dims": [3]}], "sequence_batching": {"state": [{"initial_state": '
        '[{"dims": [4]}]}], "max_sequence_idle_microseconds": "5"}}'
    )
    shown = config_to_dict(config)
    assert shown["input"][0]["dims"] == [3]
    assert shown["sequence_batching"]["max_sequence_idle_microseconds"] == 5
    assert shown["sequence_batching"]["state"][0]["initial_state"][0]["dims"] == ["4"]


def test_floats_are_shown_as_they_were_written() -> None:
    """0.1 is stored with 32 bits and still reads 0.1."""
    text = '{"sequence_batching": {"direct": {"minimum_slot_utilization": 0.1}}}'
    shown = config_to_dict(config_from_json(text))
    assert shown["sequence_batching"]["direct"]["minimum_slot_utilization"] == 0.1


@pytest.mark.parametrize("kind", ['"kind_gpu"', '"KIND_GPU"', "1"])
def test_enums_are_read_by_name_in_any_case_and_by_number(kind: str) -> None:
    """Overrides written by hand or by other JSON libraries are understood."""
    config = config_from_json(f'{{"instance_group": [{{"kind": {kind}}}]}}')
    assert enum_name(config.instance_group[0], "kind") == "KIND_GPU"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "3",
        '{"nope": 1}',
        '{"max_batch_size": "x"}',
        '{"input": {}}',
        '{"platform": "\\ud800"}',
        '{"input": [{"data_type": Infinity}]}',
        "[" * 100_000,
    ],
)
def test_json_that_is_no_configuration_is_refused(text: str) -> None:
    """Whatever is wrong with it, the error is the client's."""
    with pytest.raises(InvalidArgumentError):
        config_from_json(text)


def test_decoupled_is_read_from_the_transaction_policy() -> None:
    """A model is decoupled only if it says so."""
    assert not is_decoupled(ModelConfig())
    assert is_decoupled(config_from_json('{"model_transaction_policy": {"decoupled": true}}'))


@given(configs())
def test_json_round_trip(config: ModelConfig) -> None:
    """What /config shows can be sent back as an override and means the same."""
    assert config_from_json(config_to_json(config)) == config


@given(st.text(max_size=60))
def test_any_text_is_a_configuration_or_refused(text: str) -> None:
    """Random JSON never raises anything but InvalidArgumentError."""
    try:
        config_from_json(text)
    except InvalidArgumentError:
        return
    assert isinstance(json.loads(text), dict)
