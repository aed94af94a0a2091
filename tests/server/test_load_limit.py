"""Models stay away from cards that are too full."""

from __future__ import annotations

import pytest

from npuserve.backends.base import Placement
from npuserve.errors import UnavailableError
from npuserve.server.devices import VISIBLE_DEVICES
from npuserve.server.load_limit import check_load_limit
from npuserve.server.npu_metrics import CardMetrics


def card(index: int, used: int | None) -> CardMetrics:
    return CardMetrics(
        index, f"uuid-{index}", "910B", True, memory_used_bytes=used, memory_total_bytes=100
    )


def place(device_id: int, kind: str = "GPU") -> Placement:
    return Placement(name="m_0", kind=kind, device_id=device_id, group=0, index=0)


@pytest.fixture(autouse=True)
def all_cards_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VISIBLE_DEVICES, raising=False)


def test_a_full_card_refuses_with_triton_s_words() -> None:
    """Up to the limit is fine."""
    cards = [card(0, 50), card(1, 51)]
    check_load_limit("m", [place(0)], {0: 0.5, 1: 0.5}, lambda: cards)
    with pytest.raises(UnavailableError, match="memory limit set for GPU 1 has exceeded"):
        check_load_limit("m", [place(0), place(1)], {0: 0.5, 1: 0.5}, lambda: cards)


def test_cards_are_not_asked_when_nothing_limits_them() -> None:
    """No limit, another card, or a model on the processor."""

    def never() -> list[CardMetrics]:
        raise AssertionError("npu-smi takes seconds")

    check_load_limit("m", [place(0)], {}, never)
    check_load_limit("m", [place(0)], {1: 0.5}, never)
    check_load_limit("m", [place(0, kind="CPU")], {0: 0.5}, never)


def test_logical_cards_are_those_the_environment_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Card 0 of this process is the second of the machine."""
    monkeypatch.setenv(VISIBLE_DEVICES, "1")
    cards = [card(0, 99), card(1, 1)]
    check_load_limit("m", [place(0)], {0: 0.5}, lambda: cards)


@pytest.mark.parametrize("cards", [[], [card(0, None)]])
def test_a_card_that_does_not_tell_is_not_loaded(cards: list[CardMetrics]) -> None:
    """A limit that cannot be checked is not passed over."""
    with pytest.raises(UnavailableError, match="memory of card 0 cannot be told"):
        check_load_limit("m", [place(0)], {0: 0.5}, lambda: cards)


def test_a_missing_program_is_told() -> None:
    """Limits need npu-smi."""

    def missing() -> list[CardMetrics]:
        raise FileNotFoundError("npu-smi")

    with pytest.raises(UnavailableError, match="cannot be told: npu-smi"):
        check_load_limit("m", [place(0)], {0: 0.5}, missing)
