"""Environment variables of the workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from npuserve.backends.base import BackendModelContext, Placement
from npuserve.backends.worker.environment import device_number, worker_environment
from npuserve.model_config import ModelConfig


def _environment(placement: Placement, **parameters: str) -> dict[str, str]:
    config = ModelConfig()
    for key, value in parameters.items():
        config.parameters[key].string_value = value
    path = Path("m")
    return worker_environment(
        BackendModelContext("m", 1, config, path, path, [placement]), placement
    )


CARD = Placement("m_0_1", "GPU", 1, 0, 1)


def test_all_cards_are_visible_by_default() -> None:
    """A model picks its card by the number it is given, as on GPUs."""
    environment = _environment(CARD)
    assert environment == {}
    assert device_number(CARD, environment) == 1


@pytest.mark.parametrize(("visible", "expected"), [("", "1"), ("4, 6", "6")])
def test_only_its_own_card_on_demand(
    monkeypatch: pytest.MonkeyPatch, visible: str, expected: str
) -> None:
    """The variable holds the physical number, and the card is number 0 for the model."""
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", visible)
    environment = _environment(CARD, restrict_visible_devices="true")
    assert environment == {"ASCEND_RT_VISIBLE_DEVICES": expected}
    assert device_number(CARD, environment) == 0


def test_instances_on_the_cpu_are_left_alone() -> None:
    """KIND_CPU with NPUs in user code works as before."""
    placement = Placement("m_0_0", "CPU", 0, 0, 0)
    assert _environment(placement, restrict_visible_devices="true") == {}
