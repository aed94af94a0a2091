"""instance_group: defaults, names, devices and errors as Triton has them."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from google.protobuf import text_format

from npuserve.backends.base import ExecutionBatch, LoopInstance
from npuserve.errors import InvalidArgumentError
from npuserve.model_config import ModelConfig
from npuserve.server.instance_group import fill_instance_groups, placements
from npuserve.server.instance_pool import InstancePool
from npuserve.server.statistics import ModelStatistics


def place(text: str, cards: tuple[int, ...] = ()) -> list[tuple[str, str, int, str]]:
    config = ModelConfig()
    text_format.Parse('name: "plain" ' + text, config)
    fill_instance_groups(config, cards)
    return [(p.name, p.kind, p.device_id, p.host_policy) for p in placements(config)]


@pytest.mark.parametrize(
    ("text", "cards", "expected"),
    [
        ("", (), [("plain_0", "CPU", 0, "cpu")]),
        ("instance_group { kind: KIND_CPU }", (), [("plain_0_0", "CPU", 0, "cpu")]),
        (
            'backend: "onnxruntime"',
            (),
            [("plain_0", "CPU", 0, "cpu"), ("plain_1", "CPU", 0, "cpu")],
        ),
        ('backend: "onnxruntime"', (3,), [("plain_0", "GPU", 3, "gpu_3")]),
        ("", (0, 1), [("plain_0", "GPU", 0, "gpu_0"), ("plain_1", "GPU", 1, "gpu_1")]),
        (
            'instance_group { name: "g" count: 2 kind: KIND_GPU gpus: [ 1, 0 ] }',
            (0, 1),
            [
                ("g_0", "GPU", 1, "gpu_1"),
                ("g_1", "GPU", 0, "gpu_0"),
                ("g_2", "GPU", 1, "gpu_1"),
                ("g_3", "GPU", 0, "gpu_0"),
            ],
        ),
        ("instance_group { gpus: 7 kind: KIND_GPU }", (7,), [("plain_0_0", "GPU", 7, "gpu_7")]),
        (
            "instance_group { kind: KIND_MODEL } "
            'instance_group { kind: KIND_CPU host_policy: "h" }',
            (0,),
            [("plain_0_0", "MODEL", 0, "model"), ("plain_1_0", "CPU", 0, "h")],
        ),
    ],
)
def test_names_and_devices(
    text: str, cards: tuple[int, ...], expected: list[tuple[str, str, int, str]]
) -> None:
    """Instances are named and placed as Triton does."""
    assert place(text, cards) == expected


@pytest.mark.parametrize(
    ("text", "cards", "message"),
    [
        (
            "instance_group { kind: KIND_GPU }",
            (),
            "instance group plain_0 of model plain has kind KIND_GPU but no GPUs are available",
        ),
        (
            "instance_group { kind: KIND_GPU gpus: 4 }",
            (0, 1),
            "instance group plain_0 of model plain specifies invalid or unsupported gpu id 4",
        ),
        (
            "instance_group { kind: KIND_CPU gpus: 0 }",
            (0,),
            "instance group plain_0 of model plain has kind KIND_CPU but specifies one or more",
        ),
        (
            "instance_group { kind: KIND_MODEL gpus: 0 }",
            (0,),
            "instance group plain_0 of model plain has kind KIND_MODEL but specifies one",
        ),
        ('instance_group { profile: "0" }', (), "only supported for TensorRT models"),
    ],
)
def test_groups_that_cannot_be_placed(text: str, cards: tuple[int, ...], message: str) -> None:
    """A group that does not fit this machine is refused with Triton's text."""
    with pytest.raises(InvalidArgumentError, match=message):
        place(text, cards)


def test_secondary_devices_are_ignored_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Secondary devices name hardware that is not here; the model is served all the same."""
    text = "instance_group { kind: KIND_CPU secondary_devices { kind: KIND_NVDLA device_id: 0 } }"
    assert place(text) == [("plain_0_0", "CPU", 0, "cpu")]
    assert "secondary_devices are ignored" in caplog.text


class _Holding(LoopInstance):
    """Keeps its batches until it is told."""

    def __init__(self) -> None:
        self.batches: list[ExecutionBatch] = []

    def start(self, batch: ExecutionBatch) -> None:
        self.batches.append(batch)


async def test_the_least_loaded_card_is_first_over_all_models() -> None:
    """A free instance on an idle card goes before one on a card that another model keeps busy."""
    config = ModelConfig()
    text_format.Parse('name: "m" instance_group { count: 2 kind: KIND_GPU }', config)
    fill_instance_groups(config, [0, 1])
    load: Counter[int] = Counter()
    pools = []
    for _ in range(2):
        pool = InstancePool("m", 1, asyncio.get_running_loop(), ModelStatistics(), False)
        pool.card_load = load
        for placement in placements(config):
            pool.add(placement, _Holding())
        pools.append(pool)
    cards = []
    for pool in (pools[0], pools[0], pools[0], pools[1], pools[1]):
        instance = pool.acquire()
        assert instance is not None
        instance.run([], 1)
        cards.append(instance.card)
    assert cards == [0, 1, 0, 1, 0]
    first = pools[0].instances[0]
    assert isinstance(first.backend_instance, _Holding)
    first.backend_instance.batches[0].done()
    assert load == {0: 2, 1: 2}
