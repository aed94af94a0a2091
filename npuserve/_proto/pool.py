"""The private descriptor pool and the message classes made from it.

`descriptor_set.binpb` is what protoc compiled from the `.proto` files of this folder
(`generate.py` renews it); reading it takes about a millisecond.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.internal import enum_type_wrapper

DESCRIPTOR_SET = Path(__file__).with_name("descriptor_set.binpb")


def _load_pool() -> descriptor_pool.DescriptorPool:
    """A pool holding the committed descriptor set; files come in dependency order."""
    pool = descriptor_pool.DescriptorPool()
    descriptors = descriptor_pb2.FileDescriptorSet.FromString(DESCRIPTOR_SET.read_bytes())
    for file in descriptors.file:
        pool.AddSerializedFile(file.SerializeToString())
    return pool


_POOL = _load_pool()


def symbols(proto: str) -> dict[str, Any]:
    """The names a generated module for `npuserve/_proto/<proto>` would define.

    Top-level message classes, enum wrappers, the values of top-level enums and DESCRIPTOR.
    """
    file = _POOL.FindFileByName(f"npuserve/_proto/{proto}")
    names: dict[str, Any] = {"DESCRIPTOR": file}
    for name, message in file.message_types_by_name.items():
        names[name] = message_factory.GetMessageClass(message)
    for name, enum in file.enum_types_by_name.items():
        names[name] = enum_type_wrapper.EnumTypeWrapper(enum)
        names.update({value.name: value.number for value in enum.values})
    return names
