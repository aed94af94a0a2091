"""The text format: every spelling is read, every slip is explained."""

from __future__ import annotations

import contextlib

import pytest
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st

from npuserve.errors import InvalidArgumentError
from npuserve.model_config import ModelConfig, config_from_json
from npuserve.model_repository.pbtxt import decode_config, parse_config
from tests.model_repository.strategies import configs

SOURCE = "repo/m/config.pbtxt"


def refused(text: str) -> str:
    with pytest.raises(InvalidArgumentError) as caught:
        parse_config(text, SOURCE)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "json"),
    [
        ("", "{}"),
        ("# only a comment", "{}"),
        ("name: 'm' # comment {", '{"name": "m"}'),
        ('name: "m";max_batch_size:0x4,', '{"name": "m", "max_batch_size": 4}'),
        ("max_batch_size: 010", '{"max_batch_size": 8}'),
        ("backend: \"py\" 'thon'", '{"backend": "python"}'),
        ("input < dims: [ 1, -1 ] >", '{"input": [{"dims": [1, -1]}]}'),
        ("input: { dims: 2 dims: 3 }", '{"input": [{"dims": [2, 3]}]}'),
        ("input [ {name:'a'}, {name:'b'} ]", '{"input": [{"name": "a"}, {"name": "b"}]}'),
        ("input { data_type: 11 }", '{"input": [{"data_type": "TYPE_FP32"}]}'),
        ("input { optional: t }", '{"input": [{"optional": true}]}'),
        ("input { optional: False }", '{"input": [{"optional": false}]}'),
        ("input { optional: 1 }", '{"input": [{"optional": true}]}'),
        (
            'parameters: { key: "k", value: { string_value: "\\346\\250\\241\\n" } };',
            '{"parameters": {"k": {"string_value": "\u6a21\\n"}}}',
        ),
        (
            "sequence_batching { direct { minimum_slot_utilization: 5e-1f } }",
            '{"sequence_batching": {"direct": {"minimum_slot_utilization": 0.5}}}',
        ),
        ("\ufeffname: 'm'\r\n\tmax_batch_size : 2\r\n", '{"name": "m", "max_batch_size": 2}'),
    ],
)
def test_every_spelling_is_read(text: str, json: str) -> None:
    """Configurations people post mix all of these."""
    assert parse_config(text, SOURCE) == config_from_json(json)


def test_comments_may_be_in_any_encoding() -> None:
    """An editor on a Chinese Windows saves GBK, and Triton never looks at comments."""
    text = "# \u68c0\u6d4b\u6a21\u578b \"\nname: 'a#b' # \u540d\u79f0 '\n"
    assert parse_config(decode_config(text.encode("gbk")), SOURCE).name == "a#b"
    assert decode_config(text.encode()) == text


def test_a_value_that_is_no_utf_8_is_refused() -> None:
    """It could be sent to no client."""
    with pytest.raises(UnicodeDecodeError):
        decode_config("# \u6a21\nname: '\u68c0'".encode("gbk"))


def test_kind_npu_is_kind_gpu_outside_of_strings_and_comments() -> None:
    """The alias is replaced where it is an enum value and nowhere else."""
    text = 'instance_group { kind: KIND_NPU name: "KIND_NPU" } # "KIND_NPU'
    assert parse_config(text, SOURCE) == config_from_json(
        '{"instance_group": [{"kind": "KIND_GPU", "name": "KIND_NPU"}]}'
    )


def test_max_batch_size_inside_dynamic_batching_is_sent_to_where_it_belongs() -> None:
    """The slip of a widely copied tutorial gets file, line, field and the cure."""
    message = refused("name: 'm'\ndynamic_batching {\n    max_batch_size: 32\n}")
    assert f"failed to read text proto from {SOURCE}:3:5:" in message
    assert "'max_batch_size' does not exist in 'dynamic_batching'" in message
    assert "top level" in message


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("max_batchsize: 4", "Did you mean 'max_batch_size'?"),
        ("dynamic_batching { prefered_batch_size: 1 }", "Did you mean 'preferred_batch_size'?"),
        ("max_queue_delay_microseconds: 1", "belongs into 'dynamic_batching { ... }'"),
        ("input { data_type: TYPE_FLOAT32 }", "Did you mean TYPE_FP32?"),
        ("input { data_type: BYTES }", "Did you mean TYPE_STRING?"),
        ("input { data_type: FP16 }", "Did you mean TYPE_FP16?"),
        ("instance_group { kind: GPU }", "Did you mean KIND_GPU?"),
        ("instance_group { kind: NOTHING_LIKE_IT }", "Values: KIND_AUTO, KIND_GPU"),
        ("version_policy { latest { x: 1 } }", "Fields in 'version_policy.latest': num_versions"),
        ("name: 'a' name: 'b'", "given twice"),
    ],
)
def test_a_slip_is_answered_with_what_to_write(text: str, advice: str) -> None:
    """Unknown fields and values name the nearest one or the block they belong to."""
    assert advice in refused(text)


@pytest.mark.parametrize(
    "text",
    ["input {", "}", "name = 'm'", "name: \uff02m\uff02", "max_batch_size: 99999999999", "name: 3",
     "name: '\\377'", "dynamic_batching {} sequence_batching {}", "input { " * 2000],
)  # fmt: skip
def test_broken_text_is_refused_with_the_file(text: str) -> None:
    """Whatever is wrong, the message begins with the path."""
    assert refused(text).startswith(f"failed to read text proto from {SOURCE}")


@given(configs(), st.booleans(), st.booleans())
def test_round_trip(config: ModelConfig, as_one_line: bool, pointy_brackets: bool) -> None:
    """A configuration printed in any style of the text format reads back the same."""
    text = text_format.MessageToString(
        config, as_one_line=as_one_line, pointy_brackets=pointy_brackets, as_utf8=True
    )
    assert parse_config(text, SOURCE) == config


@given(st.text(st.sampled_from("aname:{}[]<>'\"#\\0x4,; \n\tinput-1.e\u6a21"), max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    """Random text never raises anything but InvalidArgumentError."""
    with contextlib.suppress(InvalidArgumentError):
        parse_config(text, SOURCE)
