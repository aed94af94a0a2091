"""Random and damaged configurations, through the front door of a running server."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from google.protobuf import json_format, text_format
from google.protobuf.message import Message

from npuserve._proto.model_config_pb2 import ModelConfig
from npuserve.testing.serve import serve

PLAIN: dict[str, Any] = {
    "backend": "identity",
    "max_batch_size": 4,
    "input": [{"name": "X", "data_type": "TYPE_FP32", "dims": [2]}],
    "output": [{"name": "Y", "data_type": "TYPE_FP32", "dims": [2]}],
    "instance_group": [{"kind": "KIND_CPU"}],
}
TEXTS = ("", "X", "Y", "m", "identity", "nope", "../x", "/etc/passwd", "é中", "-1", "\0")
NUMBERS = (0, 1, 2, 3, 4, -1, 2**31 - 1, 2**32 - 1, 2**63 - 1)
VALUES: tuple[Any, ...] = (None, 1, -1, "x", 1.5, True, [], {}, [[]], 2**70, {"a": 1}, ["x"])
TOKENS = ("{", "}", "[", "]", ":", '"', "'", "-1", "1e999", "0x", "#", "<", "\\", "\0", "{" * 2000)


class Fuzzer:
    """Makes configurations; the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.choice = self._random.choice

    def config(self) -> ModelConfig:
        """A plain one with a few fields set to anything."""
        config = json_format.ParseDict(PLAIN, ModelConfig())
        self._fill(config, self.choice((1, 1, 2, 3)), depth=4)
        config.name = ""
        return config

    def as_json(self, config: ModelConfig) -> str:
        """The JSON form, perhaps with values of other kinds, perhaps cut off."""
        values = json_format.MessageToDict(config, preserving_proto_field_name=True)
        for _ in range(self.choice((0, 0, 0, 1, 2))):
            node: Any = values
            while isinstance(node, dict | list) and node:
                key = self.choice(list(node) if isinstance(node, dict) else range(len(node)))
                if not isinstance(node[key], dict | list) or self.choice((False, True)):
                    node[key] = self.choice(VALUES)
                    break
                node = node[key]
        text = json.dumps(values)
        return text if self.choice(range(10)) else text[: self.choice(range(len(text)))]

    def as_text(self, config: ModelConfig) -> bytes:
        """The text form, perhaps with tokens lost, doubled or replaced."""
        tokens = re.findall(r'"[^"]*"|\w+|\S', text_format.MessageToString(config))
        for _ in range(self.choice((0, 0, 0, 1, 2))):
            at = self.choice(range(len(tokens)))
            tokens[at : at + 1] = self.choice(
                ([], [tokens[at]] * 2, [self.choice(TOKENS)], [self.choice(tokens)])
            )
        return " ".join(tokens).encode()

    def _fill(self, message: Message, count: int, depth: int) -> None:
        fields: list[Any] = list(message.DESCRIPTOR.fields)
        for field in self._random.sample(fields, min(count, len(fields))):
            target = getattr(message, field.name)
            if not field.message_type:
                value = self._value(field)
                if field.is_repeated:
                    target.append(value)
                else:
                    setattr(message, field.name, value)
            elif field.message_type.GetOptions().map_entry:
                self._fill_map(target, field.message_type.fields_by_name, depth)
            elif depth:
                inner = target.add() if field.is_repeated else target
                inner.SetInParent()
                self._fill(inner, self.choice((1, 2, 3)), depth - 1)

    def _fill_map(self, target: Any, fields: Any, depth: int) -> None:
        key = self._value(fields["key"])
        if fields["value"].message_type:
            self._fill(target[key], self.choice((0, 1, 2)), depth - 1)
        else:
            target[key] = self._value(fields["value"])

    def _value(self, field: Any) -> Any:
        if field.enum_type:
            return self.choice([*field.enum_type.values_by_number, 99])
        if field.cpp_type == field.CPPTYPE_STRING:
            return self.choice(TEXTS)
        if field.cpp_type in (field.CPPTYPE_FLOAT, field.CPPTYPE_DOUBLE):
            return self.choice((0.0, 0.5, -1.0, 1e30, float("nan"), float("inf")))
        if field.cpp_type == field.CPPTYPE_BOOL:
            return self.choice((False, True))
        bits = 31 if "32" in str(field.cpp_type) or field.cpp_type in (1, 3) else 63
        lowest = -1 if field.cpp_type in (1, 2) else 0
        return self.choice([n for n in NUMBERS if lowest <= n < 2**bits])


@pytest.mark.parametrize("seed", [2, 4, 8])
def test_no_configuration_harms_the_server(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    """It is served or refused with a reason, which the index repeats; nothing is a bug."""
    fuzzer = Fuzzer(seed)
    (tmp_path / "m" / "1").mkdir(parents=True)
    with (
        serve(tmp_path, model_control_mode="explicit") as server,
        httpx.Client(base_url=f"http://{server.http_url}", timeout=20) as client,
    ):
        models = "/v2/repository/models/m"
        for _ in range(100):
            config = fuzzer.config()
            if fuzzer.choice((False, True)):
                body = {"parameters": {"config": fuzzer.as_json(config)}}
            else:
                (tmp_path / "m" / "config.pbtxt").write_bytes(fuzzer.as_text(config))
                body = {}
            reply = client.post(f"{models}/load", json=body)
            row = {"state": "UNLOADING"}  # the one before may still be on its way out
            while row["state"] == "UNLOADING":
                (row,) = client.post("/v2/repository/index").json()
            if reply.status_code == 200:
                assert row["state"] == "READY"
            else:
                assert row["state"] == "UNAVAILABLE"
                assert row["reason"]
                # As with Triton, what is found before the load itself is 500.
                assert reply.status_code == 400 or "failed to poll" in reply.json()["error"]
            client.post(f"{models}/unload").raise_for_status()
    assert not [record for record in caplog.records if record.exc_info]
