"""Answers of the core about itself and its models, as plain values without a wire format."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerMetadata:
    """Answer of the server metadata endpoint."""

    name: str
    version: str
    extensions: tuple[str, ...]


@dataclass(frozen=True)
class TensorMetadata:
    """One input or output; `shape` has a leading -1 if the model batches."""

    name: str
    datatype: str
    shape: list[int]


@dataclass(frozen=True)
class ModelMetadata:
    """Answer of the model metadata endpoint; `versions` are READY ones, ascending."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


@dataclass(frozen=True)
class ModelIndexEntry:
    """One line of the repository index; "" where Triton leaves a field out."""

    name: str
    version: str = ""
    state: str = ""
    reason: str = ""
