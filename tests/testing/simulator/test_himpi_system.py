"""The system, the channels and the memory of the simulated acl.himpi."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest

from npuserve.testing.simulator import simulate
from npuserve.testing.simulator.runtime import Runtime
from tests.testing.simulator.himpi import (
    EXIST,
    ILLEGAL_PARAM,
    INVALID_CHN_ID,
    NO_MEM,
    NOT_READY,
    PNGD,
    SYS,
    UNEXIST,
    VDEC,
    VENC,
    VPC,
    Himpi,
    opened,
)
from tests.testing.simulator.test_misuse import in_thread


@pytest.fixture
def media(acl: Any, machine: Runtime) -> Iterator[Himpi]:
    """Nothing is left at the end."""
    yield from opened(acl, machine)


def test_the_system_comes_first(acl: Any) -> None:
    """And a context."""
    assert in_thread(acl.himpi.sys_init) == 107002
    assert acl.himpi.vpc_create_chn(0, {}) == VPC + NOT_READY
    assert acl.himpi.vdec_create_chn(0, {}) == VDEC + NOT_READY
    assert acl.himpi.venc_create_chn(0, {}) == VENC + NOT_READY
    assert acl.himpi.pngd_create_chn(0, {}) == PNGD + NOT_READY
    assert acl.himpi.sys_create_epoll(1) == (0, SYS + NOT_READY)
    assert acl.himpi.sys_init() == 0
    assert acl.himpi.sys_init() == 0
    assert acl.himpi.sys_exit() == 0
    assert acl.himpi.vpc_create_chn(0, {}) == VPC + NOT_READY
    assert acl.himpi.dvpp_get_version()[-1] == 0


def test_channels_are_numbered(media: Himpi, machine: Runtime) -> None:
    """Once each, within a range, on their card; forgotten ones are leaks."""
    create, destroy = media.himpi.vpc_create_chn, media.himpi.vpc_destroy_chn
    assert create(3, {}) == 0
    assert create(3, {}) == VPC + EXIST
    assert create(512, {}) == VPC + INVALID_CHN_ID
    assert destroy(4) == VPC + UNEXIST
    assert destroy(-1) == VPC + INVALID_CHN_ID
    assert media.himpi.vpc_sys_create_chn({}) == (0, 0)
    assert any("channel 3 of acl.himpi.vpc_create_chn" in line for line in machine.leaks())
    own, _ = media.acl.rt.get_context()
    other, _ = media.acl.rt.create_context(1)
    assert destroy(3) == VPC + UNEXIST
    assert media.acl.rt.destroy_context(other) == 0
    assert media.acl.rt.set_context(own) == 0
    assert destroy(3) == 0
    assert destroy(3) == VPC + UNEXIST
    assert destroy(0) == 0
    with pytest.raises(TypeError):
        create(1, [])


def test_memory(media: Himpi) -> None:
    """Sizes, devices, double free, memory of others."""
    malloc, free = media.himpi.dvpp_malloc, media.himpi.dvpp_free
    assert malloc(0, 0) == (0, SYS + ILLEGAL_PARAM)
    assert malloc(1, 64) == (0, SYS + ILLEGAL_PARAM)
    assert malloc(0, 8 << 20) == (0, SYS + NO_MEM)
    address, ret = malloc(0, 64)
    assert ret == 0
    assert media.acl.rt.free(address) == 107000
    assert free(address) == 0
    assert free(address) == SYS + ILLEGAL_PARAM
    theirs, _ = media.acl.rt.malloc(64, 0)
    assert free(theirs) == SYS + ILLEGAL_PARAM
    assert media.acl.rt.free(theirs) == 0


@pytest.mark.parametrize(("soc", "expected"), [("Ascend910B3", 0), ("Ascend310P3", 0xA0078011)])
def test_whose_memory_is_reached(soc: str, expected: int) -> None:
    """910B takes memory of acl.rt.malloc, 310P does not."""
    with simulate(soc_name=soc, time="modelled") as machine:
        acl: Any = importlib.import_module("acl")
        assert (acl.init(), acl.rt.set_device(0)) == (0, 0)
        media = Himpi(acl)
        assert media.himpi.vpc_create_chn(0, {}) == 0
        source, target = media.empty(64, 40), media.empty(32, 20)
        other, _ = acl.rt.malloc(source["picture_buffer_size"], 0)
        media.vpc("resize", source | {"picture_address": other}, target, 0, 0, 0, expect=expected)
        assert acl.rt.free(other) == 0
        assert media.himpi.vpc_destroy_chn(0) == 0
        media.close()
        assert machine.leaks() == []
