"""The simulator refuses each misuse with the return code of the real runtime."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npuserve.testing.simulator.faults import Fault
from npuserve.testing.simulator.runtime import Runtime
from tests.testing.simulator.conftest import Loaded

H2D, D2H, H2H = 1, 2, 0


def in_thread(function: Callable[..., Any], *args: Any) -> Any:
    """Call in a fresh thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args).result()


# Arguments.


def test_arguments_are_positional_only(acl: Any) -> None:
    """A keyword argument is a TypeError."""
    with pytest.raises(TypeError):
        acl.rt.malloc(size=64, policy=0)


@pytest.mark.parametrize("value", [np.int64(64), 64.0, "64"])
def test_sizes_and_handles_are_real_ints(acl: Any, value: Any) -> None:
    """Numpy integers and floats are refused, as by the C format `k`."""
    with pytest.raises(TypeError, match=r"acl.rt.malloc args parse failed"):
        acl.rt.malloc(value, 0)


def test_ids_take_anything_with_an_index(acl: Any) -> None:
    """The C format `i` takes numpy integers, but no floats."""
    assert acl.rt.set_device(np.int32(1)) == 0
    with pytest.raises(TypeError):
        acl.rt.set_device(1.0)


def test_paths_are_str(acl: Any, static_om: str) -> None:
    """Bytes and Path objects are refused."""
    for path in (Path(static_om), static_om.encode()):
        with pytest.raises(TypeError):
            acl.mdl.load_from_file(path)


def test_dims_are_a_list(acl: Any) -> None:
    """A tuple is a TypeError."""
    with pytest.raises(TypeError):
        acl.create_tensor_desc(0, (1, 2), 2)


def test_a_wrong_number_of_arguments_is_a_type_error(acl: Any) -> None:
    """The text is the binding's."""
    with pytest.raises(TypeError, match="args parse failed"):
        acl.rt.malloc(64)


# Process, device, context.


def test_nothing_works_before_init(machine: Runtime) -> None:
    """100001; only the run mode is known, as the runtime's source has it."""
    import acl

    assert acl.rt.set_device(0) == 100001
    assert "acl.init" in acl.get_recent_err_msg()
    assert acl.rt.get_run_mode() == (1, 0)


def test_a_second_init_says_so(acl: Any) -> None:
    """100002, harmless."""
    assert acl.init() == 100002


def test_a_second_finalize_says_so(acl: Any) -> None:
    """100037; and init works again."""
    assert acl.finalize() == 0
    assert acl.finalize() == 100037
    assert acl.init() == 0


def test_an_unreadable_configuration_is_refused(acl: Any, tmp_path: Path) -> None:
    """100003, also for JSON that is nested too deep."""
    deep = tmp_path / "acl.json"
    deep.write_text('{"a":' * 11 + "{}" + "}" * 11)
    acl.finalize()
    assert acl.init(str(tmp_path / "absent.json")) == 100003
    assert acl.init(str(deep)) == 100003


def test_an_absent_card_is_refused(acl: Any) -> None:
    """107001."""
    assert acl.rt.set_device(2) == 107001
    assert acl.rt.create_context(2) == (0, 107001)


def test_a_new_thread_has_no_context(acl: Any) -> None:
    """107002 until set_device or set_context."""
    assert in_thread(acl.rt.malloc, 64, 0) == (0, 107002)
    assert in_thread(acl.rt.get_device) == (0, 107002)
    context, _ = acl.rt.create_context(0)

    def work() -> Any:
        assert acl.rt.set_context(context) == 0
        return acl.rt.get_device()

    assert in_thread(work) == (0, 0)


def test_a_destroyed_context_is_no_context(acl: Any) -> None:
    """107002 in the thread, 107000 for the handle."""
    context, _ = acl.rt.create_context(0)
    assert acl.rt.destroy_context(context) == 0
    assert acl.rt.malloc(64, 0) == (0, 107002)
    assert acl.rt.set_context(context) == 107000


def test_reset_counts_set(acl: Any) -> None:
    """The default context ends with the last reset; one more is refused."""
    assert acl.rt.set_device(0) == 0
    assert acl.rt.reset_device(0) == 0
    assert acl.rt.get_device() == (0, 0)
    assert acl.rt.reset_device(0) == 0
    assert acl.rt.get_device() == (0, 107002)
    assert acl.rt.reset_device(0) != 0


def test_a_forked_child_is_refused(acl: Any, machine: Runtime) -> None:
    """507033: the runtime does not survive a fork."""
    machine._pid -= 1  # what the child would see
    try:
        assert acl.rt.malloc(64, 0) == (0, 507033)
    finally:
        machine._pid += 1


def test_visible_devices_renumber(machine: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only listed cards count; parsing stops at the first bad entry."""
    for text, visible in (("1", [1]), ("1,0", [1]), ("0,x,1", [0]), ("7", []), ("0,1", [0, 1])):
        monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", text)
        assert machine.options.visible_cards == visible


# Memory.


def test_use_after_free_and_double_free(acl: Any) -> None:
    """A freed device address is dead for ever."""
    pointer, _ = acl.rt.malloc(64, 0)
    assert acl.rt.free(pointer) == 0
    assert acl.rt.free(pointer) == 107000
    assert acl.rt.memset(pointer, 64, 0, 64) == 107000
    host, _ = acl.rt.malloc_host(64)
    assert acl.rt.free_host(host) == 0
    assert acl.rt.free_host(host) == 107000
    device, _ = acl.rt.malloc(64, 0)
    assert acl.rt.memcpy(device, 64, host, 64, H2D) == 107000


def test_the_two_kinds_of_memory_do_not_mix(acl: Any) -> None:
    """free_host of device memory, free of host memory, copies in the wrong direction."""
    device, _ = acl.rt.malloc(64, 0)
    host, _ = acl.rt.malloc_host(64)
    assert acl.rt.free_host(device) == 107000
    assert acl.rt.free(host) == 107000
    assert acl.rt.memcpy(host, 64, device, 64, H2D) == 107000
    assert acl.rt.memcpy(device, 64, host, 64, D2H) == 107000
    assert acl.rt.memcpy(device, 64, host, 64, 9) == 107000


def test_sizes_are_checked(acl: Any) -> None:
    """Past the destination's size, past the block, nothing at all."""
    device, _ = acl.rt.malloc(64, 0)
    host, _ = acl.rt.malloc_host(128)
    assert acl.rt.memcpy(device, 64, host, 65, H2D) == 107000
    assert acl.rt.memcpy(device, 128, host, 128, H2D) == 107000
    assert acl.rt.memcpy(device, 64, host, 0, H2D) == 107000
    assert acl.rt.malloc(0, 0) == (0, 107000)
    assert "past the block of 64 bytes" in _error_of(acl, acl.rt.memset, device, 65, 0, 65)


def _error_of(acl: Any, function: Callable[..., Any], *args: Any) -> str:
    function(*args)
    return str(acl.get_recent_err_msg())


def test_reading_the_error_clears_it(acl: Any) -> None:
    """It belongs to the thread that failed."""
    acl.rt.free(1)
    assert in_thread(acl.get_recent_err_msg) is None
    assert acl.get_recent_err_msg()
    assert acl.get_recent_err_msg() is None


def test_an_asynchronous_copy_needs_alignment(acl: Any) -> None:
    """107008 for addresses that are no multiple of 64; 107000 from host to host."""
    device, _ = acl.rt.malloc(256, 0)
    host, _ = acl.rt.malloc_host(256)
    stream, _ = acl.rt.create_stream()
    assert acl.rt.memcpy_async(device, 64, host + 8, 64, H2D, stream) == 107008
    assert acl.rt.memcpy_async(host, 64, host + 64, 64, H2H, stream) == 107000


def test_device_memory_is_limited(acl: Any, machine: Runtime) -> None:
    """207001 beyond what the card has; freeing makes room."""
    free, total = acl.rt.get_mem_info(1)[:2]
    assert free == total == machine.options.memory_bytes
    pointer, ret = acl.rt.malloc(total - 100, 0)
    assert ret == 0
    assert acl.rt.malloc(200, 0) == (0, 207001)
    assert acl.rt.free(pointer) == 0
    assert acl.rt.malloc(200, 0)[1] == 0


def test_a_changed_source_of_a_copy_in_flight_is_seen(acl: Any, machine: Runtime) -> None:
    """Writing into staging memory before the synchronisation is an error there."""
    device, _ = acl.rt.malloc(64, 0)
    host, _ = acl.rt.malloc_host(64)
    stream, _ = acl.rt.create_stream()
    assert acl.rt.memcpy_async(device, 64, host, 64, H2D, stream) == 0
    assert acl.rt.memset(host, 64, 7, 64) == 0
    assert acl.rt.synchronize_stream(stream) == 507015
    assert "changed while its copy was in flight" in machine.violations[0]


def test_memory_freed_under_a_copy_is_seen(acl: Any, machine: Runtime) -> None:
    """`free` does not wait for streams."""
    device, _ = acl.rt.malloc(64, 0)
    host, _ = acl.rt.malloc_host(64)
    stream, _ = acl.rt.create_stream()
    assert acl.rt.memcpy_async(host, 64, device, 64, D2H, stream) == 0
    assert acl.rt.free(device) == 0
    assert acl.rt.synchronize_stream(stream) == 507015
    # The exception poisons the context.
    assert acl.rt.stream_query(stream) == (0, 507015)
    assert machine.violations


# Streams and events.


def test_streams_belong_to_their_context(acl: Any) -> None:
    """107003 in another context, 107017 when destroyed."""
    stream, _ = acl.rt.create_stream()
    other, _ = acl.rt.create_context(0)
    assert acl.rt.synchronize_stream(stream) == 107003
    assert acl.rt.destroy_stream(stream) == 107003
    own, _ = acl.rt.create_stream()
    assert acl.rt.destroy_stream(own) == 0
    assert acl.rt.destroy_stream(own) == 107017
    assert acl.rt.destroy_context(other) == 0


def test_events_are_checked(acl: Any) -> None:
    """107017 for handles that are none, or no longer."""
    event, _ = acl.rt.create_event()
    stream, _ = acl.rt.create_stream()
    assert acl.rt.record_event(stream, stream) == 107017
    assert acl.rt.destroy_event(event) == 0
    assert acl.rt.destroy_event(event) == 107017
    assert acl.rt.stream_wait_event(stream, event) == 107017


def test_kinds_of_events_differ_in_being_recorded_again(acl: Any) -> None:
    """With ACL_EVENT_SYNC a reset is needed; the other kinds cannot be reset."""
    stream, _ = acl.rt.create_stream()
    plain, _ = acl.rt.create_event()
    extended, _ = acl.rt.create_event_ex_with_flag(1)
    for event in (plain, extended):
        assert acl.rt.record_event(event, stream) == 0
        assert acl.rt.record_event(event, stream) == 0
        assert acl.rt.reset_event(event, stream) == 107000
    flagged, _ = acl.rt.create_event_with_flag(1)
    assert acl.rt.record_event(flagged, stream) == 0
    assert acl.rt.record_event(flagged, stream) == 107000
    assert acl.rt.reset_event(flagged, stream) == 0
    assert acl.rt.record_event(flagged, stream) == 0


def test_waiting_may_time_out(acl: Any, static_om: str) -> None:
    """507046 for a stream, 507047 for an event."""
    model = Loaded(acl, static_om)
    stream, _ = acl.rt.create_stream()
    event, _ = acl.rt.create_event()
    for _ in range(10):
        assert acl.mdl.execute_async(model.id, model.inputs, model.outputs, stream) == 0
    assert acl.rt.record_event(event, stream) == 0
    assert acl.rt.query_event_status(event) == (0, 0)
    assert acl.rt.query_event(event) == (1, 0)
    assert acl.rt.synchronize_stream_with_timeout(stream, 1) == 507046
    assert acl.rt.synchronize_event_with_timeout(event, 1) == 507047
    assert acl.rt.synchronize_event_with_timeout(event, -1) == 0
    assert acl.rt.query_event_status(event) == (1, 0)


def test_callbacks_need_a_subscription(acl: Any) -> None:
    """107015."""
    stream, _ = acl.rt.create_stream()
    assert acl.rt.launch_callback(print, None, 0, stream) == 107015
    assert acl.rt.unsubscribe_report(threading.get_ident(), stream) == 107015
    assert acl.rt.process_report(0) == 107015


def test_core_limits_are_checked(acl: Any) -> None:
    """More cores than there are."""
    assert acl.rt.set_device_res_limit(0, 0, 25) == 107000
    assert acl.rt.set_device_res_limit(0, 0, 12) == 0
    assert acl.rt.get_device_res_limit(0, 0) == (12, 0)


# Models.


def test_unreadable_and_foreign_files(acl: Any, static_om: str, tmp_path: Path) -> None:
    """A missing file, rubbish, damaged weights, another chip."""
    assert acl.mdl.load_from_file(str(tmp_path / "no.om")) == (0, 145002)
    rubbish = tmp_path / "rubbish.om"
    rubbish.write_bytes(b"x" * 100)
    assert acl.mdl.load_from_file(str(rubbish)) == (0, 545005)
    content = Path(static_om).read_bytes()
    rubbish.write_bytes(content[:-100])
    assert acl.mdl.load_from_file(str(rubbish)) == (0, 545003)
    rubbish.write_bytes(content.replace(b"Ascend910B3", b"Ascend310P3"))
    assert acl.mdl.load_from_file(str(rubbish)) == (0, 507008)
    assert "model socVersion=Ascend310P3" in acl.get_recent_err_msg()


def test_a_failed_load_takes_no_memory(acl: Any, machine: Runtime, static_om: str) -> None:
    """Work memory is given back when the weights do not fit."""
    _, total = acl.rt.get_mem_info(1)[:2]
    acl.rt.malloc(total - (1 << 16) - 200, 0)
    used = machine.cards[0].memory.used
    assert acl.mdl.load_from_file(static_om) == (0, 207001)
    assert machine.cards[0].memory.used == used


def test_a_model_belongs_to_its_context(acl: Any, static_om: str) -> None:
    """107004 for execute and unload in another one."""
    model = Loaded(acl, static_om)
    acl.rt.create_context(0)
    assert acl.mdl.execute(model.id, model.inputs, model.outputs) == 107004
    assert acl.mdl.unload(model.id) == 107004


def test_an_unloaded_model_is_gone(acl: Any, static_om: str) -> None:
    """145003 for execute, 100011 for everything else."""
    model = Loaded(acl, static_om)
    assert acl.mdl.unload(model.id) == 0
    assert acl.mdl.unload(model.id) == 100011
    assert acl.mdl.execute(model.id, model.inputs, model.outputs) == 145003
    assert acl.mdl.get_desc(model.desc, model.id) == 100011


def test_a_model_in_flight_is_not_unloaded_nor_run_elsewhere(acl: Any, static_om: str) -> None:
    """545009; 507011 for a second stream."""
    model = Loaded(acl, static_om)
    one, two = acl.rt.create_stream()[0], acl.rt.create_stream()[0]
    assert acl.mdl.execute_async(model.id, model.inputs, model.outputs, one) == 0
    assert acl.mdl.execute_async(model.id, model.inputs, model.outputs, two) == 507011
    assert acl.mdl.unload(model.id) == 545009
    assert acl.rt.synchronize_stream(one) == 0
    assert acl.mdl.execute_async(model.id, model.inputs, model.outputs, two) == 0


def test_datasets_must_fit_the_model(acl: Any, static_om: str) -> None:
    """100017 and 100018 for counts and sizes; a dead buffer, a host address."""
    model = Loaded(acl, static_om)
    run = acl.mdl.execute
    empty = acl.mdl.create_dataset()
    assert run(model.id, empty, model.outputs) == 100017
    assert run(model.id, model.inputs, empty) == 100018
    pointer, buffer = model.input_buffers[0]
    acl.update_data_buffer(buffer, pointer, 23)
    assert run(model.id, model.inputs, model.outputs) == 100017
    acl.update_data_buffer(buffer, pointer, 24)
    out_pointer, out_buffer = model.output_buffers[0]
    acl.update_data_buffer(out_buffer, out_pointer, 8)
    assert run(model.id, model.inputs, model.outputs) == 100018
    acl.update_data_buffer(out_buffer, acl.rt.malloc_host(64)[0], 24)
    assert run(model.id, model.inputs, model.outputs) == 107000
    acl.destroy_data_buffer(out_buffer)
    assert run(model.id, model.inputs, model.outputs) == 100000


def test_add_dataset_buffer_returns_a_tuple(acl: Any) -> None:
    """(dataset, code), not a bare code."""
    dataset = acl.mdl.create_dataset()
    assert acl.mdl.add_dataset_buffer(dataset, 12345) == (0, 100000)
    buffer = acl.create_data_buffer(0, 0)
    assert acl.mdl.add_dataset_buffer(dataset, buffer) == (dataset, 0)


def test_memory_freed_under_an_execution_is_seen(
    acl: Any, machine: Runtime, static_om: str
) -> None:
    """507015 at the synchronisation; nothing works in the context afterwards."""
    model = Loaded(acl, static_om)
    stream, _ = acl.rt.create_stream()
    assert acl.mdl.execute_async(model.id, model.inputs, model.outputs, stream) == 0
    assert acl.rt.free(model.output_buffers[0][0]) == 0
    assert acl.rt.synchronize_stream(stream) == 507015
    assert "illegal address" in machine.violations[0]
    assert acl.rt.synchronize_stream(stream) == 507015


def test_only_listed_gears(acl: Any, gear_om: str) -> None:
    """145013 for a batch that is no gear; kinds exclude each other."""
    model = Loaded(acl, gear_om)
    set_batch = acl.mdl.set_dynamic_batch_size
    assert set_batch(model.id, model.inputs, 1, 3) == 145013
    assert set_batch(model.id, model.inputs, 0, 2) == 145011
    assert acl.mdl.set_dynamic_hw_size(model.id, model.inputs, 1, 8, 8) == 100000
    assert set_batch(model.id, model.inputs, 1, 2) == 0
    assert acl.mdl.get_cur_output_dims(model.desc, 0)[0]["dims"] == [2, 3]


def test_static_models_have_no_gears(acl: Any, static_om: str) -> None:
    """100019."""
    model = Loaded(acl, static_om)
    assert acl.mdl.set_dynamic_batch_size(model.id, model.inputs, 1, 2) == 100019


def test_without_a_gear_the_largest_runs(acl: Any, machine: Runtime, gear_om: str) -> None:
    """Nothing pads and nothing complains: results of what was in the buffers."""
    model = Loaded(acl, gear_om)
    assert acl.mdl.execute(model.id, model.inputs, model.outputs) == 0
    assert acl.mdl.get_cur_output_dims(model.desc, 0)[0]["dims"] == [4, 3]


def test_dims_of_dynamic_shapes(acl: Any, range_om: str) -> None:
    """Sizes are 0, get_cur_output_dims is refused, the shape must be told and fit."""
    model = Loaded(acl, range_om, 96, 96)
    assert acl.mdl.get_output_size_by_index(model.desc, 0) == 0
    assert acl.mdl.get_cur_output_dims(model.desc, 0) == ({}, 145000)
    run = acl.mdl.execute
    assert run(model.id, model.inputs, model.outputs) == 145021
    wrong = acl.create_tensor_desc(0, [2], 2)
    acl.mdl.set_dataset_tensor_desc(model.inputs, wrong, 0)
    assert run(model.id, model.inputs, model.outputs) == 145021
    right = acl.create_tensor_desc(0, [2, 3], 2)
    assert acl.mdl.set_dataset_tensor_desc(model.inputs, right, 0) == (model.inputs, 0)
    assert run(model.id, model.inputs, model.outputs) == 0
    large = acl.create_tensor_desc(0, [20, 30], 2)
    acl.mdl.set_dataset_tensor_desc(model.inputs, large, 0)
    assert run(model.id, model.inputs, model.outputs) == 100017


def test_failures_have_empty_values(acl: Any, static_om: str) -> None:
    """{} for dims, 0 for sizes and handles, None for AIPP, and the code last."""
    model = Loaded(acl, static_om)
    assert acl.mdl.get_input_dims(model.desc, 7) == ({}, 100000)
    assert acl.mdl.get_input_size_by_index(model.desc, 7) == 0
    assert acl.mdl.get_input_name_by_index(model.desc, 7) == ""
    assert acl.mdl.get_first_aipp_info(model.id, 0) == (None, 145015)
    assert acl.mdl.get_aipp_type(model.id, 0) == (0, 0xFFFFFFFF, 0)
    assert acl.mdl.get_input_dims_range(model.desc, 7)[1] == 100000


def test_handles_are_typed(acl: Any, static_om: str) -> None:
    """A dataset is no description, a destroyed one is nothing."""
    dataset = acl.mdl.create_dataset()
    assert acl.mdl.destroy_desc(dataset) == 100000
    assert acl.mdl.destroy_dataset(dataset) == 0
    assert acl.mdl.destroy_dataset(dataset) == 100000
    assert "was destroyed" in acl.get_recent_err_msg()


# Faults, leaks.


def test_faults_strike_the_chosen_call(acl: Any, machine: Runtime) -> None:
    """The third malloc, with the code asked for, once."""
    machine.faults.append(Fault("acl.rt.malloc", skip=2, code=207018))
    codes = [acl.rt.malloc(64, 0)[1] for _ in range(4)]
    assert codes == [0, 0, 207018, 0]


def test_what_is_left_is_named(acl: Any, machine: Runtime, static_om: str) -> None:
    """Everything that has a create and a destroy, with the call that made it."""
    model = Loaded(acl, static_om)
    acl.rt.create_stream()
    acl.rt.create_event()
    acl.rt.malloc_host(64)
    text = "\n".join(machine.leaks())
    for what in (
        "model of acl.mdl.load_from_file", "data buffer of acl.create_data_buffer",
        "model description of", "dataset of", "stream of", "event of", "64 page-locked bytes",
        "24 bytes of device 0", "set_device without reset_device",
    ):  # fmt: skip
        assert what in text
    model.close()
    assert "model of" not in "\n".join(machine.leaks())


def test_a_clean_program_leaves_nothing(acl: Any, machine: Runtime, static_om: str) -> None:
    """Load, run, close, reset, finalize."""
    model = Loaded(acl, static_om)
    assert acl.mdl.execute(model.id, model.inputs, model.outputs) == 0
    model.close()
    assert acl.rt.reset_device(0) == 0
    assert acl.finalize() == 0
    assert machine.leaks() == []
    assert machine.violations == []
