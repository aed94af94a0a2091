"""JSON text, small and large."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npuserve.errors import InvalidArgumentError
from npuserve.protocol.http import json_text, large_json
from npuserve.protocol.http.json_text import dump_json, json_data, json_scalar, parse_json
from npuserve.protocol.http.large_json import parse_large_json
from npuserve.protocol.tensor_codec import flatten


@pytest.mark.parametrize(
    "text",
    [
        b"{", b"", b"nonsense", b"{]}", b"{}}", b"\0\1", b'"\xff"', b"[" * 100_000, b"[1 2]",
        # All of these as Triton 2.51; the first four are numbers that no double holds.
        b"1e400", b"[NaN, -1e309]", b"1" * 400, b"[NaN, %b]" % (b"1" * 5000),
        b"nan", b"inf", b"infinity", b"-nan", b"+1", b".5", b"5.", b"01", b"0x10", b"1_000",
        b"NaN1", b"-", b"1.0e", b"tru", b"-Infx", b"InfInf", b"--Inf", b"- Inf",
        b'"\\ud800"', b'["\\udc00", NaN]', "[1]".encode("utf-16"),
    ],
)  # fmt: skip
def test_malformed_text_is_the_clients_fault(text: bytes) -> None:
    """Any malformed text gives one kind of error, however deep it is nested."""
    with pytest.raises(InvalidArgumentError, match="failed to parse the request JSON buffer"):
        parse_json(text)


def test_a_byte_order_mark_is_skipped() -> None:
    """As Triton does; editors and .NET write it."""
    assert parse_json(b'\xef\xbb\xbf{"a":[1]}') == {"a": [1]}


def test_nan_and_infinity_are_read() -> None:
    """As Triton reads them."""
    assert parse_json(b"[Infinity, -Infinity]") == [float("inf"), float("-inf")]
    assert np.isnan(parse_json(memoryview(b"[NaN]"))[0])
    text = b'["-NaN Inf", "\\\\", -NaN, Inf, -Inf, "\\"Inf"]'
    value = parse_json(text)
    assert np.isnan(value.pop(2))
    assert value == ["-NaN Inf", "\\", float("inf"), float("-inf"), '"Inf']


@given(st.lists(st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)))
def test_a_nan_does_not_change_how_others_are_read(values: list[float]) -> None:
    """Documents with NaN go through another parser, which has to give the same."""
    text = json.dumps(values)
    other = parse_json(f"{text[:-1]}{', ' if values else ''}NaN]".encode())[:-1]
    assert list(map(repr, other)) == list(map(repr, parse_json(text.encode())))


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists))
def test_values_come_back(value: Any) -> None:
    """Also integers beyond 64 bits; lone surrogates only lose themselves."""
    text = dump_json(value)
    if not any(0xD800 <= ord(c) < 0xE000 for c in repr(value)):
        assert json.loads(text) == value


def large(data: str) -> bytes:
    filler = "x" * 10
    return (
        f'{{"id":"\\"data\\": [1]{filler}","inputs":[{{"name":"a","data" : {data},"shape":[1]}},'
        f'{{"name":"b","data":["text"]}}],"outputs":[]}}'
    ).encode()


def plain(value: Any) -> Any:
    """With the arrays of inputs as flat lists."""
    for each in value["inputs"]:
        data = each["data"]
        each["data"] = data.tolist() if isinstance(data, np.ndarray) else flatten(data)
    return value


numbers = st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
arrays = st.recursive(
    st.lists(numbers, min_size=1, max_size=8),
    lambda inner: st.lists(inner, min_size=1, max_size=4),
    max_leaves=10,
)


@given(arrays, st.integers(1, 40), st.sampled_from([None, 1]))
def test_pieces_give_what_the_whole_gives(array: Any, piece_bytes: int, indent: int | None) -> None:
    """Numbers, nested in any way and cut anywhere, are those of the ordinary parser."""
    document = large(json.dumps(array, indent=indent))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large_json, "_MIN_ARRAY_BYTES", 1)
        patch.setattr(large_json, "_PIECE_BYTES", piece_bytes)
        expected = plain(parse_json(document))
        for form in (bytes, bytearray, memoryview):  # as bodies come; unpacked ones are bytearrays
            assert plain(parse_large_json(form(document))) == expected


@given(st.text("[],-1. e", max_size=30), st.integers(1, 20))
def test_broken_arrays_are_judged_by_the_ordinary_parser(text: str, piece_bytes: int) -> None:
    """Piecewise parsing accepts nothing that is not JSON."""
    document = large("[" + text + "]")
    try:
        expected = plain(parse_json(document))
    except InvalidArgumentError:
        expected = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large_json, "_MIN_ARRAY_BYTES", 1)
        patch.setattr(large_json, "_PIECE_BYTES", piece_bytes)
        try:
            assert plain(parse_large_json(document)) == expected
        except InvalidArgumentError:
            assert expected is None


def test_large_arrays_become_numpy_arrays() -> None:
    """Integers stay integers, also unsigned ones of 64 bits."""
    values = [1] * 40_000 + [2**64 - 1]
    value = parse_large_json(large(json.dumps(values)))
    assert value["inputs"][0]["data"].dtype == np.uint64
    assert value["inputs"][0]["data"].tolist() == values


def test_a_place_holder_cannot_be_sent() -> None:
    """An object as data is no way to another input's numbers."""
    document = json.dumps(
        {"inputs": [{"data": {}}, {"data": list(range(20_000))}]}, separators=(",", ":")
    )
    assert parse_large_json(document.encode())["inputs"][0]["data"] == {}


@given(
    st.lists(st.floats(), max_size=60) | st.lists(st.integers(-(2**63), 2**63 - 1), max_size=60),
    st.integers(1, 20),
)
def test_arrays_written_in_pieces_come_back(values: list[Any], piece: int) -> None:
    """NaN and infinities included, wherever they are."""
    array = np.array(values)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_text, "_PIECE_ELEMENTS", piece)
        text = dump_json({"data": json_data(array)})
    np.testing.assert_array_equal(np.array(json.loads(text)["data"]), array)


def test_scalars_that_are_not_finite() -> None:
    """Also beside what orjson cannot write."""
    value = {"a": json_scalar(float("nan")), "b": json_data(np.array([np.inf])), "c": 2**70}
    assert dump_json(value) == b'{"a":NaN,"b":[Infinity],"c":%d}' % 2**70
