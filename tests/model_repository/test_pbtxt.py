"""The text format: every spelling is read, every slip is explained."""

from __future__ import annotations

import contextlib
import math
import operator
import re
import warnings
from random import Random
from typing import Any

import pytest
from google.protobuf import text_format
from hypothesis import given, note
from hypothesis import strategies as st

from npuserve.errors import InvalidArgumentError
from npuserve.model_config import ModelConfig, config_from_json
from npuserve.model_repository.pbtxt import decode_config, parse_config
from tests.model_repository.spellings import spelled
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


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        # Triton 2.51 gives these for the texts; protobuf's Python parser refuses most of them.
        ("- 1", -1), ("-\n1", -1), ("- # comment\n 1", -1), ("- 0x10", -16),
        ("- 2147483648", -(2**31)),
        ("-\t-1", None), ("--1", None), ("- a", None), ("-", None), ("-2147483649", None),
        ("010", 8), ("08", None), ("0x", None), ("1.0", None), ("1e1", None), ("1L", None),
    ],
)  # fmt: skip
def test_integers(value: str, expected: int | None) -> None:
    """None is refused."""
    _check(f"optimization {{ graph {{ level: {value} }} }}", expected, "optimization.graph.level")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *((text, True) for text in ("true", "True", "t", "1", "0x1", "01")),
        *((text, False) for text in ("false", "False", "f", "0", "0x0", "00")),
        *((text, None) for text in ("TRUE", "T", "2", "-1", "- 1", "yes", '"true"', "1.0", "1f")),
    ],
)
def test_booleans(value: str, expected: bool | None) -> None:
    """As Triton 2.51; None is refused."""
    _check(f"response_cache {{ enable: {value} }}", expected, "response_cache.enable")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("PRIORITY_MAX", 1), ("1", 1), ("0x1", 1), ("01", 1), ("02", 2), ("- 1", -1), ("99", 99),
        ("priority_max", None), ('"PRIORITY_MAX"', None), ("1.0", None), ("2147483648", None),
        ("[PRIORITY_MAX]", None), ("PRIORITY_MAX PRIORITY_MIN", None), ("true", None),
    ],
)  # fmt: skip
def test_enumerations(value: str, expected: int | None) -> None:
    """As Triton 2.51; None is refused. Numbers without a name are for `bounds_check`."""
    _check(f"optimization {{ priority: {value} }}", expected, "optimization.priority")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (".5f", 0.5), ("0.5F", 0.5), ("1.", 1.0), ("1E-1", 0.1), ("1.f", 1.0), ("- .5", -0.5),
        ("0.25e0F", 0.25), ("1e-01", 0.1), ("0.01", 0.01), ("- inf", -math.inf), ("iNf", math.inf),
        ("1e400", math.inf), ("1e-400", 0.0), ("1e", None), ("0 .5", None), ("00.5", None),
        ("0x1p-1", None), ('"1"', None), ("0.5d", None), ("..5", None), ("1e-1.5", None),
    ],
)  # fmt: skip
def test_floats(value: str, expected: float | None) -> None:
    """As Triton 2.51; None is refused."""
    text = f"sequence_batching {{ direct {{ minimum_slot_utilization: {value} }} }}"
    _check(text, expected, "sequence_batching.direct.minimum_slot_utilization")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("'a' \"b\"", "ab"), ("\"a\"\n\n'b' # c\n 'c'", "abc"), (r'"\?"', "?"), (r'"\x41"', "A"),
        (r'"\x4"', "\4"), (r'"\1011"', "A1"), (r'"\18"', "\0018"), (r'"\u006166"', "a66"),
        (r'"\n\t\r\a\b\f\v\\\'\""', "\n\t\r\a\b\f\v\\'\""), (r'"\346\250\241"', "\u6a21"),
        (r'"\ud83d\ude00"', "\U0001f600"), (r'"\U0001F600"', "\U0001f600"), ('"\t\x01"', "\t\1"),
        (r'"\\ud83d\\ude00"', r"\ud83d\ude00"), (r'"a\x00b"', "a\0b"),
        (r'"\u005cn\U00000022\u0027"', "\\n\"'"),
        ('"a\nb"', None), ('"a\\\nb"', None), (r'"\"', None), ("'x\"", None), ("a", None),
        ('"a"+"b"', None), ('"a"b', None), ('["a"]', None), ("`a`", None), (r'"\u12"', None),
        (r'"\q"', None), (r'"\d+"', None), (r'"\X41"', None), (r'"\8"', None), (r'"\xg"', None),
        # Triton makes bytes of these that are no UTF-8.
        (r'"\ud83d"', None), (r'"\ude00\ud83d"', None), (r'"\U00110000"', None), (r'"\777"', None),
        (r'"\xff"', None),
    ],
)  # fmt: skip
def test_strings(value: str, expected: str | None) -> None:
    """As Triton 2.51; None is refused."""
    _check(f"default_model_filename: {value}", expected, "default_model_filename")


def _check(text: str, expected: Any, path: str) -> None:
    if expected is None:
        assert refused(text).startswith(f"failed to read text proto from {SOURCE}:")
        return
    value = operator.attrgetter(path)(parse_config(text, SOURCE))
    assert value == (pytest.approx(expected) if isinstance(expected, float) else expected)


@pytest.mark.parametrize(
    "text",
    [
        # All of these by Triton 2.51, too.
        "parameters [{key: 'k'}] parameters <>; parameters: {value: {string_value: 'w';},};",
        "parameters: []",
        "optimization: { graph: { level: 1 } }",
        "version_policy: { all: {} }",
        "max_batch_size # c\n # d\n : # e\n 1",
        "model_operations { op_library_filename: ['a' 'b'] }",
        "input: [ { name: 'Z' dims: 1 dims: [ 2, 0x3 ] dims: [] } ]",
        "parameters\t{\v}\f",
        "optimization { cuda { graph_spec [ { batch_size: 1 }, < batch_size: 2 > ] } }",
    ],
)
def test_structures_that_are_read(text: str) -> None:
    """Messages and lists in all their forms."""
    parse_config(text, SOURCE)


@pytest.mark.parametrize(
    "text",
    [
        # None of these by Triton 2.51, either.
        "parameters {} ,,",
        "parameters {} ;;",
        "; parameters {}",
        "parameters: [ {}, ]",
        "parameters: [ {} {} ]",
        "parameters { key: 'a' key: 'b' }",
        "parameters { key: 'a' >",
        "optimization {} optimization {}",
        "optimization: [ {} ]",
        "optimization { graph { level: [1] } }",
        "name 'a'",
        "name: ['a']",
        "version_policy { latest {} all {} }",
        "version_policy { all }",
        "metric_tags { key: 1 }",
        "22: 1",
        "17: 'python'",
        "[ext.name]: 1",
        "max_batch_size: 1 }",
        "[type.googleapis.com/inference.ModelInput] { name: 'q' }",
        "maxBatchSize: 1",
        "MAX_BATCH_SIZE: 1",
        "max_batch_size/*c*/: 1",
        "max_batch_size // c\n: 1",
        "max_batch_size: 1\0",
        "model_operations { op_library_filename: [ 'a', ] }",
        "input { dims: 1 2 }",
        "input { dims: 1, 2 }",
        "input { dims: 9223372036854775808 }",
        "dynamic_batching { max_queue_delay_microseconds: - 1 }",
    ],
)
def test_structures_that_are_refused(text: str) -> None:
    """With the position."""
    assert refused(text).startswith(f"failed to read text proto from {SOURCE}:")


def test_an_escape_that_is_none_is_shown() -> None:
    """Regular expressions and paths of Windows need two backslashes."""
    message = refused('name: "m"\nparameters { key: "k" value { string_value: "a\\d" } }')
    assert f"{SOURCE}:2:48: Invalid escape sequence in string literal" in message
    assert "Write two backslashes" in message


def test_a_wall_of_comment_signs_takes_no_time() -> None:
    """The parser of what lies between a minus and its number cannot be made to try it all."""
    assert refused(f"max_batch_size: - {'#' * 100_000}")


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


@given(configs(), st.randoms(use_true_random=True))
def test_any_spelling_reads_back_the_same(config: ModelConfig, random: Random) -> None:
    """Brackets, lists, numbers, strings, separators and comments in any legal form."""
    text = spelled(random, config)
    note(text)
    assert parse_config(text, SOURCE) == config


@given(configs(), st.randoms(use_true_random=True))
def test_what_protobufs_own_parser_reads_is_read_the_same(
    config: ModelConfig, random: Random
) -> None:
    """Also if the text is damaged, as long as its escapes are Triton's."""
    text = spelled(random, config)
    at = random.randint(0, len(text))
    text = text[:at] + random.choice(["", "-", "0", "x", "1", "#", '"', " "]) + text[at + 1 :]
    note(text)
    with warnings.catch_warnings(), contextlib.suppress(text_format.ParseError, ValueError):
        warnings.simplefilter("ignore")  # unknown escapes, which the parser leaves as they are
        expected = text_format.Parse(text, ModelConfig())
        if not re.search(r"\\[^abfnrtvxuU0-7'\"]", text):
            assert parse_config(text, SOURCE) == expected


@given(st.text(st.sampled_from("aname:{}[]<>'\"#\\0x4,; \n\tinput-1.e\u6a21"), max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    """Random text never raises anything but InvalidArgumentError."""
    with contextlib.suppress(InvalidArgumentError):
        parse_config(text, SOURCE)
