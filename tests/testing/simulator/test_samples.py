"""Programs written as the public pyACL samples are, and every call that those use."""

from __future__ import annotations

import importlib
import itertools
import json
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npuserve.testing.simulator import simulate
from npuserve.testing.simulator.module import function_names
from npuserve.testing.simulator.runtime import Runtime
from tests.testing.simulator.conftest import Loaded

# The 75 files of Ascend/samples that call pyACL, in groups with the same calls ("acl." left out).
SAMPLE_FILES: list[dict[str, list[str]]] = json.loads(
    Path(__file__).with_name("public_samples.json").read_text()
)

# Calls of the tools built on pyACL (msit, ais_bench) and of the API reference's examples.
TOOL_CALLS = [
    "acl.init",
    "acl.finalize",
    "acl.get_soc_name",
    "acl.get_recent_err_msg",
    "acl.get_version",
    "acl.app_log",
    "acl.create_data_buffer",
    "acl.destroy_data_buffer",
    "acl.get_data_buffer_addr",
    "acl.get_data_buffer_size",
    "acl.get_data_buffer_size_v2",
    "acl.update_data_buffer",
    "acl.data_type_size",
    "acl.create_tensor_desc",
    "acl.destroy_tensor_desc",
    "acl.get_tensor_desc_size",
    "acl.get_tensor_desc_num_dims",
    "acl.get_tensor_desc_dim",
    "acl.get_tensor_desc_dim_v2",
    "acl.get_tensor_desc_type",
    "acl.get_tensor_desc_format",
    "acl.get_tensor_desc_element_count",
    "acl.get_tensor_desc_name",
    "acl.rt.set_device",
    "acl.rt.reset_device",
    "acl.rt.get_device",
    "acl.rt.get_device_count",
    "acl.rt.get_run_mode",
    "acl.rt.create_context",
    "acl.rt.set_context",
    "acl.rt.get_context",
    "acl.rt.destroy_context",
    "acl.rt.create_stream",
    "acl.rt.destroy_stream",
    "acl.rt.synchronize_stream",
    "acl.rt.synchronize_device",
    "acl.rt.create_event",
    "acl.rt.create_event_with_flag",
    "acl.rt.create_event_ex_with_flag",
    "acl.rt.destroy_event",
    "acl.rt.record_event",
    "acl.rt.reset_event",
    "acl.rt.query_event",
    "acl.rt.query_event_status",
    "acl.rt.synchronize_event",
    "acl.rt.event_elapsed_time",
    "acl.rt.stream_wait_event",
    "acl.rt.subscribe_report",
    "acl.rt.unsubscribe_report",
    "acl.rt.launch_callback",
    "acl.rt.process_report",
    "acl.rt.malloc",
    "acl.rt.free",
    "acl.rt.malloc_host",
    "acl.rt.free_host",
    "acl.rt.memcpy",
    "acl.rt.memcpy_async",
    "acl.rt.memset",
    "acl.rt.memset_async",
    "acl.rt.get_mem_info",
    "acl.rt.set_exception_info_callback",
    "acl.rt.set_op_wait_timeout",
    "acl.mdl.load_from_file",
    "acl.mdl.load_from_mem",
    "acl.mdl.load_from_file_with_mem",
    "acl.mdl.load_from_mem_with_mem",
    "acl.mdl.create_config_handle",
    "acl.mdl.set_config_opt",
    "acl.mdl.load_with_config",
    "acl.mdl.destroy_config_handle",
    "acl.mdl.unload",
    "acl.mdl.query_size",
    "acl.mdl.query_size_from_mem",
    "acl.mdl.create_desc",
    "acl.mdl.get_desc",
    "acl.mdl.get_desc_from_file",
    "acl.mdl.destroy_desc",
    "acl.mdl.get_num_inputs",
    "acl.mdl.get_num_outputs",
    "acl.mdl.get_input_size_by_index",
    "acl.mdl.get_output_size_by_index",
    "acl.mdl.get_input_name_by_index",
    "acl.mdl.get_output_name_by_index",
    "acl.mdl.get_input_index_by_name",
    "acl.mdl.get_output_index_by_name",
    "acl.mdl.get_input_format",
    "acl.mdl.get_output_format",
    "acl.mdl.get_input_data_type",
    "acl.mdl.get_output_data_type",
    "acl.mdl.get_input_dims",
    "acl.mdl.get_input_dims_v2",
    "acl.mdl.get_output_dims",
    "acl.mdl.get_cur_output_dims",
    "acl.mdl.get_tensor_real_name",
    "acl.mdl.get_dynamic_batch",
    "acl.mdl.get_dynamic_hw",
    "acl.mdl.get_input_dynamic_gear_count",
    "acl.mdl.get_input_dynamic_dims",
    "acl.mdl.set_dynamic_batch_size",
    "acl.mdl.set_dynamic_hw_size",
    "acl.mdl.set_input_dynamic_dims",
    "acl.mdl.set_dataset_tensor_desc",
    "acl.mdl.get_dataset_tensor_desc",
    "acl.mdl.create_dataset",
    "acl.mdl.add_dataset_buffer",
    "acl.mdl.get_dataset_num_buffers",
    "acl.mdl.get_dataset_buffer",
    "acl.mdl.destroy_dataset",
    "acl.mdl.execute",
    "acl.mdl.execute_async",
    "acl.mdl.execute_v2",
    "acl.mdl.create_exec_config_handle",
    "acl.mdl.set_exec_config_opt",
    "acl.mdl.destroy_exec_config_handle",
    "acl.mdl.get_aipp_type",
    "acl.mdl.get_first_aipp_info",
    "acl.mdl.create_aipp",
    "acl.mdl.destroy_aipp",
    "acl.mdl.set_aipp_input_format",
    "acl.mdl.set_aipp_src_image_size",
    "acl.mdl.set_aipp_csc_params",
    "acl.mdl.set_aipp_rbuv_swap_switch",
    "acl.mdl.set_aipp_crop_params",
    "acl.mdl.set_aipp_padding_params",
    "acl.mdl.set_aipp_dtc_pixel_mean",
    "acl.mdl.set_aipp_dtc_pixel_min",
    "acl.mdl.set_aipp_pixel_var_reci",
    "acl.mdl.set_input_aipp",
    "acl.op.set_model_dir",
    "acl.op.create_attr",
    "acl.op.set_attr_bool",
    "acl.op.destroy_attr",
    "acl.op.create_handle",
    "acl.op.execute_with_handle",
    "acl.op.destroy_handle",
    "acl.op.execute_v2",
    "acl.op.cast",
    "acl.set_tensor_const",
    "acl.blas.gemm_ex",
    "acl.blas.hgemm",
    "acl.util.bytes_to_ptr",
    "acl.util.ptr_to_bytes",
    "acl.util.numpy_to_ptr",
    "acl.util.numpy_contiguous_to_ptr",
    "acl.util.ptr_to_numpy",
    "acl.util.start_thread",
    "acl.util.stop_thread",
]

X = np.arange(6, dtype=np.float32).reshape(2, 3)


def assert_is_there(acl: Any, name: str) -> None:
    """Registered, and reachable as an attribute of the module."""
    assert name in function_names()
    target = acl
    for part in name.split(".")[1:]:
        target = getattr(target, part)
    assert callable(target)


@pytest.mark.parametrize("name", TOOL_CALLS)
def test_calls_of_the_tools_are_there(acl: Any, name: str) -> None:
    """One name each."""
    assert_is_there(acl, name)


@pytest.mark.parametrize(
    ("file", "calls"),
    [(file, group["calls"]) for group in SAMPLE_FILES for file in group["files"]],
)
def test_calls_of_a_public_sample_are_there(acl: Any, file: str, calls: list[str]) -> None:
    """All that one file calls."""
    assert calls
    for name in calls:
        assert_is_there(acl, f"acl.{name}")


def test_all_public_samples_are_listed() -> None:
    """As many as the README says."""
    files = [file for group in SAMPLE_FILES for file in group["files"]]
    assert len(files) == len(set(files)) == 75
    readme = Path(__file__).parents[3] / "README.md"
    assert "all calls of the 75 files" in readme.read_text()


def test_synchronous_sample_with_bytes(acl: Any, machine: Runtime, static_om: str) -> None:
    """bytes_to_ptr, memcpy, execute, memcpy, ptr_to_bytes."""
    model = Loaded(acl, static_om)
    data = X.tobytes()
    device = model.input_buffers[0][0]
    ret = acl.rt.memcpy(device, len(data), acl.util.bytes_to_ptr(data), len(data), 1)
    assert ret == 0
    assert acl.mdl.execute(model.id, model.inputs, model.outputs) == 0
    buffer = acl.mdl.get_dataset_buffer(model.outputs, 0)
    size = acl.get_data_buffer_size_v2(buffer)
    host, ret = acl.rt.malloc_host(size)
    assert ret == 0
    assert acl.rt.memcpy(host, size, acl.get_data_buffer_addr(buffer), size, 2) == 0
    result = np.frombuffer(acl.util.ptr_to_bytes(host, size), np.float32).reshape(2, 3)
    np.testing.assert_array_equal(result, 2 * X + 1)
    assert acl.rt.free_host(host) == 0
    model.close()


def test_synchronous_sample_with_numpy(acl: Any, static_om: str) -> None:
    """The deprecated way: numpy_to_ptr and ptr_to_numpy, which warn at every call."""
    model = Loaded(acl, static_om)
    with pytest.warns(Warning, match="deprecated"):
        pointer = acl.util.numpy_to_ptr(X)
    assert acl.rt.memcpy(model.input_buffers[0][0], 24, pointer, 24, 1) == 0
    assert acl.mdl.execute(model.id, model.inputs, model.outputs) == 0
    host, _ = acl.rt.malloc_host(24)
    assert acl.rt.memcpy(host, 24, model.output_buffers[0][0], 24, 2) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = acl.util.ptr_to_numpy(host, (2, 3), 11)
    np.testing.assert_array_equal(result, 2 * X + 1)


def test_asynchronous_sample_with_callbacks(acl: Any, static_om: str) -> None:
    """Several executions on one stream, results taken by a thread that processes reports."""
    context, _ = acl.rt.get_context()
    model = Loaded(acl, static_om)
    stream, _ = acl.rt.create_stream()
    seen: list[int] = []
    stop = threading.Event()

    def reports(_: Any) -> None:
        acl.rt.set_context(context)
        while not stop.is_set():
            acl.rt.process_report(20)

    thread_id, ret = acl.util.start_thread(reports, [])
    assert ret == 0
    assert acl.rt.subscribe_report(thread_id, stream) == 0
    for index in range(3):
        assert acl.mdl.execute_async(model.id, model.inputs, model.outputs, stream) == 0
        assert acl.rt.launch_callback(seen.append, index, 1, stream) == 0
    assert acl.rt.synchronize_stream(stream) == 0
    last = threading.Event()
    assert acl.rt.launch_callback(lambda _: last.set(), None, 1, stream) == 0
    assert acl.rt.synchronize_stream(stream) == 0
    assert last.wait(5)
    stop.set()
    assert acl.rt.unsubscribe_report(thread_id, stream) == 0
    assert acl.util.stop_thread(thread_id) == 0
    assert seen == [0, 1, 2]
    assert acl.rt.destroy_stream(stream) == 0
    model.close()


def test_load_with_memory_and_configuration(acl: Any, static_om: str) -> None:
    """query_size, memory of one's own, and the configuration handle."""
    work, weight, ret = acl.mdl.query_size(static_om)
    assert ret == 0
    work_pointer, _ = acl.rt.malloc(work, 0)
    weight_pointer, _ = acl.rt.malloc(weight, 0)
    model_id, ret = acl.mdl.load_from_file_with_mem(
        static_om, work_pointer, work, weight_pointer, weight
    )
    assert ret == 0
    assert acl.mdl.unload(model_id) == 0
    handle = acl.mdl.create_config_handle()
    for attribute, value in ((1, 1), (2, static_om)):
        assert acl.mdl.set_config_opt(handle, attribute, value) == 0
    model_id, ret = acl.mdl.load_with_config(handle)
    assert ret == 0
    assert acl.mdl.unload(model_id) == 0
    assert acl.mdl.destroy_config_handle(handle) == 0


def test_events_measure_modelled_time(acl: Any, static_om: str) -> None:
    """Two executions of a millisecond."""
    model = Loaded(acl, static_om)
    stream, _ = acl.rt.create_stream()
    start, end = acl.rt.create_event()[0], acl.rt.create_event()[0]
    assert acl.rt.record_event(start, stream) == 0
    for _ in range(2):
        acl.mdl.execute_async(model.id, model.inputs, model.outputs, stream)
    assert acl.rt.record_event(end, stream) == 0
    assert acl.rt.synchronize_stream(stream) == 0
    elapsed, ret = acl.rt.event_elapsed_time(start, end)
    assert ret == 0
    assert elapsed == pytest.approx(2.0, abs=0.5)


def test_who_waits_with_the_gil(static_om: str) -> None:
    """`execute` stops the whole process, `synchronize_stream` only its thread."""
    progress = {}
    with simulate(device_ms=200):
        acl: Any = importlib.import_module("acl")
        assert acl.init() == 0
        assert acl.rt.set_device(0) == 0
        model = Loaded(acl, static_om)
        for name in ("execute", "execute_async"):
            counter = itertools.count()
            stop = threading.Event()
            thread = threading.Thread(target=count_until, args=(counter, stop))
            thread.start()
            before = next(counter)
            if name == "execute":
                assert acl.mdl.execute(model.id, model.inputs, model.outputs) == 0
            else:
                assert acl.mdl.execute_async(model.id, model.inputs, model.outputs, 0) == 0
                assert acl.rt.synchronize_stream(0) == 0
            progress[name] = next(counter) - before
            stop.set()
            thread.join()
    assert progress["execute_async"] > 3 * progress["execute"]


def count_until(counter: Any, stop: threading.Event) -> None:
    """Count as fast as the GIL lets this thread."""
    while not stop.is_set():
        next(counter)
