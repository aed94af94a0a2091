"""Random configurations, for the round trips of text format and JSON."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from npuserve.model_config import ModelConfig

_TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=8)
_NUMBERS = {
    "CPPTYPE_INT32": st.integers(-(2**31), 2**31 - 1),
    "CPPTYPE_INT64": st.integers(-(2**63), 2**63 - 1),
    "CPPTYPE_UINT32": st.integers(0, 2**32 - 1),
    "CPPTYPE_UINT64": st.integers(0, 2**64 - 1),
    "CPPTYPE_BOOL": st.booleans(),
    "CPPTYPE_STRING": _TEXTS,
    "CPPTYPE_FLOAT": st.floats(width=32, allow_nan=False, allow_infinity=False).map(abs),
    "CPPTYPE_DOUBLE": st.floats(allow_nan=False, allow_infinity=False).map(abs),
}


def configs(depth: int = 4) -> st.SearchStrategy[ModelConfig]:
    """Messages with a handful of fields set on every level down to `depth`."""

    @st.composite
    def build(draw: st.DrawFn) -> ModelConfig:
        config = ModelConfig()
        _fill(draw, config, depth)
        return config

    return build()


def _fill(draw: st.DrawFn, message: Any, depth: int) -> None:
    fields = list(message.DESCRIPTOR.fields)
    if not fields:
        return
    for field in draw(st.lists(st.sampled_from(fields), max_size=4, unique_by=lambda f: f.name)):
        if field.message_type and depth == 0:
            continue
        if field.message_type and field.message_type.GetOptions().map_entry:
            _fill_map(draw, field, getattr(message, field.name), depth)
        elif field.is_repeated:
            _fill_list(draw, field, getattr(message, field.name), depth)
        elif field.message_type:
            child = getattr(message, field.name)
            child.SetInParent()
            _fill(draw, child, depth - 1)
        else:
            setattr(message, field.name, draw(_scalars(field)))


def _fill_map(draw: st.DrawFn, field: Any, target: Any, depth: int) -> None:
    key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
    for each in draw(st.lists(_scalars(key), max_size=2, unique=True)):
        if value.message_type:
            _fill(draw, target[each], depth - 1)
        else:
            target[each] = draw(_scalars(value))


def _fill_list(draw: st.DrawFn, field: Any, target: Any, depth: int) -> None:
    for _ in range(draw(st.integers(0, 2))):
        if field.message_type:
            _fill(draw, target.add(), depth - 1)
        else:
            target.append(draw(_scalars(field)))


def _scalars(field: Any) -> st.SearchStrategy[Any]:
    if field.enum_type:
        return st.sampled_from([value.number for value in field.enum_type.values])
    names = {getattr(field, name): strategy for name, strategy in _NUMBERS.items()}
    return names[field.cpp_type]
