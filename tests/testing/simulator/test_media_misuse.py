"""The simulated acl.media refuses wrong memory, descriptions and channels, each with a code."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from npuserve.testing.simulator.runtime import Runtime
from tests.testing.simulator.media import (
    Media,
    jpeg,
    photo,
    resize,
)
from tests.testing.simulator.test_misuse import in_thread

# Memory.


def test_memory_is_freed_where_it_is_from(acl: Any) -> None:
    """Neither free takes the other's memory; nothing is freed twice."""
    ours, _ = acl.media.dvpp_malloc(64)
    theirs, _ = acl.rt.malloc(64, 0)
    assert acl.rt.free(ours) == 107000
    assert acl.media.dvpp_free(theirs) == 107000
    assert acl.media.dvpp_free(ours + 8) == 107000
    assert acl.media.dvpp_free(ours) == 0
    assert acl.media.dvpp_free(ours) == 107000
    assert acl.media.dvpp_free(0) == 107000
    assert acl.rt.free(theirs) == 0


def test_memory_that_cannot_be_had(acl: Any) -> None:
    """Nothing, more than there is, without a context, with a size that is no int."""
    assert acl.media.dvpp_malloc(0) == (0, 107000)
    assert acl.media.dvpp_malloc(8 << 20) == (0, 207001)
    assert in_thread(acl.media.dvpp_malloc, 64) == (0, 107002)
    with pytest.raises(TypeError):
        acl.media.dvpp_malloc(np.int64(64))
    with pytest.raises(TypeError):
        acl.media.dvpp_malloc_with_cfg(64, 0, [])
    address, ret = acl.media.dvpp_malloc_with_cfg(64, 0, {})
    assert ret == 0
    assert acl.media.dvpp_free(address) == 0


def test_memory_outlives_nobody(acl: Any, machine: Runtime) -> None:
    """What is not freed is a leak of the call that made it."""
    acl.media.dvpp_malloc(64)
    acl.media.dvpp_create_roi_config(0, 1, 0, 1)
    leaks = "\n".join(machine.leaks())
    assert "64 bytes of device 0" in leaks
    assert "acl.media.dvpp_malloc" in leaks
    assert "ROI configuration of acl.media.dvpp_create_roi_config" in leaks


# Descriptions and channels.

KINDS = ["pic_desc", "stream_desc", "resize_config", "jpege_config", "border_config"]


@pytest.mark.parametrize("kind", KINDS)
def test_descriptions_are_destroyed_once(acl: Any, machine: Runtime, kind: str) -> None:
    """Null is taken, a dead handle and one of another kind are not."""
    create = getattr(acl.media, f"dvpp_create_{kind}")
    destroy = getattr(acl.media, f"dvpp_destroy_{kind}")
    handle = create()
    assert handle
    other = acl.media.dvpp_create_roi_config(0, 1, 0, 1)
    assert destroy(other) == 100000
    assert destroy(0) == 0
    assert destroy(handle) == 0
    assert destroy(handle) == 100000
    assert acl.media.dvpp_destroy_roi_config(other) == 0
    acl.rt.reset_device(0)
    assert machine.leaks() == []


def test_dead_descriptions_have_no_fields(acl: Any) -> None:
    """Setters refuse, getters give nothing."""
    desc = acl.media.dvpp_create_pic_desc()
    acl.media.dvpp_destroy_pic_desc(desc)
    assert acl.media.dvpp_set_pic_desc_width(desc, 64) == 100000
    assert acl.media.dvpp_get_pic_desc_width(desc) == 0
    assert acl.media.dvpp_set_pic_desc_width(0, 64) == 100000
    with pytest.raises(TypeError):
        acl.media.dvpp_set_pic_desc_width(desc, 64.0)
    with pytest.raises(TypeError):
        acl.media.dvpp_set_pic_desc_data(desc, np.int64(64))


@pytest.mark.parametrize(
    ("call", "value"),
    [("resize_config_interpolation", 5), ("jpege_config_level", 101),
     ("border_config_border_type", 4)],
)  # fmt: skip
def test_settings_are_checked_at_once(acl: Any, call: str, value: int) -> None:
    """Values there are none of."""
    kind = "_".join(call.split("_")[:2])
    handle = getattr(acl.media, f"dvpp_create_{kind}")()
    assert getattr(acl.media, f"dvpp_set_{call}")(handle, value) == 100000
    assert getattr(acl.media, f"dvpp_destroy_{kind}")(handle) == 0


def test_channels_open_once_and_close_once(acl: Any) -> None:
    """And are closed before their descriptions go."""
    media = acl.media
    channel = media.dvpp_create_channel_desc()
    assert media.dvpp_destroy_channel(channel) == 100000
    assert media.dvpp_set_channel_desc_mode(channel, 16) == 100000
    assert media.dvpp_set_channel_desc_param(channel, 0, 6) == (0, 100000)
    assert media.dvpp_set_channel_desc_param(channel, 1, 0) == (0, 100000)
    assert media.dvpp_get_channel_desc_param(channel, 1) == (0, 0, 100000)
    assert media.dvpp_create_channel(channel) == 0
    assert media.dvpp_create_channel(channel) == 100000
    assert media.dvpp_set_channel_desc_mode(channel, 1) == 100000
    assert media.dvpp_destroy_channel_desc(channel) == 100000
    assert media.dvpp_destroy_channel(channel) == 0
    assert media.dvpp_destroy_channel_desc(channel) == 0
    assert media.dvpp_create_channel(channel) == 100000
    assert in_thread(media.dvpp_create_channel_desc) == 0


def test_a_channel_is_for_what_its_mode_says(media: Media) -> None:
    """One for image processing decodes nothing; a closed one does nothing."""
    acl = media.media
    channel = acl.dvpp_create_channel_desc()
    source, target = media.empty(64, 40), media.empty(32, 20)
    assert resize(media, source, target, channel) == 100000
    assert acl.dvpp_set_channel_desc_mode(channel, 1) == 0
    assert acl.dvpp_create_channel(channel) == 0
    assert resize(media, source, target, channel) == 0
    file = jpeg(photo(64, 64))
    output, block = media.empty(64, 64, unit=(128, 16)), media.upload(file)
    ret = acl.dvpp_jpeg_decode_async(channel, block, len(file), output.desc, media.stream)
    assert ret == 100000
    assert acl.dvpp_destroy_channel(channel) == 0
    assert acl.dvpp_destroy_channel_desc(channel) == 0


def test_streams_and_channels_belong_to_contexts(media: Media) -> None:
    """A stream of another context, a channel of another card."""
    acl = media.acl
    source, target = media.empty(64, 40), media.empty(32, 20)
    own, _ = acl.rt.get_context()
    same_card, _ = acl.rt.create_context(0)
    assert resize(media, source, target) == 107003
    other_card, _ = acl.rt.create_context(1)
    assert resize(media, source, target) == 100000
    for context in (same_card, other_card):
        assert acl.rt.destroy_context(context) == 0
    assert acl.rt.set_context(own) == 0
    assert resize(media, source, target) == 0
