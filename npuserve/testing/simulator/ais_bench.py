"""`InferSession` of ais_bench (the 2023 generation) over the simulated `acl`.

As the original: synchronous, no checks of dtypes, everything in one thread and process.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from npuserve.testing.simulator.om_file import NUMPY_BY_ACL

_MODES = ("static", "dymbatch", "dymhw", "dymdims", "dymshape")
_GEAR_INPUT = "ascend_mbatch_shape_data"


@dataclass
class TensorInfo:
    """What `get_inputs` and `get_outputs` list."""

    name: str
    datatype: int
    format: int
    shape: list[int]
    size: int
    realsize: int


class InferSession:
    """A loaded model.

    Args:
        device_id: card.
        model_path: of the `.om` file.
        loop: how often each inference runs.
    """

    def __init__(
        self, device_id: int, model_path: str, acl_json_path: str | None = None,
        debug: bool = False, loop: int = 1,
    ) -> None:  # fmt: skip
        self._acl: Any = importlib.import_module("acl")
        self._loop = loop
        self._device_id = device_id
        ret = self._acl.init(acl_json_path) if acl_json_path else self._acl.init()
        if ret not in (0, 100002):
            raise RuntimeError(f"acl.init failed: {ret}")
        self._check("set_device", self._acl.rt.set_device(device_id))
        self._context, ret = self._acl.rt.create_context(device_id)
        self._check("create_context", ret)
        self._model_id, ret = self._acl.mdl.load_from_file(str(model_path))
        if ret:
            text = self._acl.get_recent_err_msg()
            self._acl.rt.destroy_context(self._context)
            self._acl.rt.reset_device(device_id)
            raise RuntimeError(f"load model from file failed, ret {ret}: {text}")
        self._desc = self._acl.mdl.create_desc()
        self._check("get_desc", self._acl.mdl.get_desc(self._desc, self._model_id))
        self._released = False
        self._gear: tuple[str, tuple[Any, ...]] | None = None
        self._times: list[float] = []

    def _check(self, call: str, ret: int) -> None:
        if ret:
            raise RuntimeError(f"{call} failed, ret {ret}: {self._acl.get_recent_err_msg()}")

    def _tensors(self, direction: str) -> list[TensorInfo]:
        mdl = self._acl.mdl
        tensors: list[TensorInfo] = []
        for index in range(getattr(mdl, f"get_num_{direction}s")(self._desc)):
            name = getattr(mdl, f"get_{direction}_name_by_index")(self._desc, index)
            if name == _GEAR_INPUT:
                continue
            call = "get_input_dims_v2" if direction == "input" else "get_output_dims"
            dims, _ = getattr(mdl, call)(self._desc, index)
            size = getattr(mdl, f"get_{direction}_size_by_index")(self._desc, index)
            tensors.append(
                TensorInfo(
                    name,
                    getattr(mdl, f"get_{direction}_data_type")(self._desc, index),
                    getattr(mdl, f"get_{direction}_format")(self._desc, index),
                    list(dims["dims"]),
                    size,
                    size,
                )
            )
        return tensors

    def get_inputs(self) -> list[TensorInfo]:
        """Data inputs."""
        return self._tensors("input")

    def get_outputs(self) -> list[TensorInfo]:
        """Outputs."""
        return self._tensors("output")

    def infer(
        self, feeds: Sequence[Any], mode: str = "static",
        custom_sizes: int | Sequence[int] = 100000, out_array: bool = True,
    ) -> list[NDArray[Any]]:  # fmt: skip
        """Run once.

        Args:
            feeds: arrays in order of the inputs; only their bytes count.
            custom_sizes: bytes of each output, for `dymshape`.
        """
        if mode not in _MODES:
            raise RuntimeError(f"wrong infer_mode:{mode}, only support {','.join(_MODES)}")
        arrays = [np.ascontiguousarray(feed) for feed in feeds]
        inputs = self.get_inputs()
        if len(arrays) != len(inputs):
            raise RuntimeError(f"input count {len(arrays)} of {len(inputs)}")
        self._check("set_context", self._acl.rt.set_context(self._context))
        shapes = [list(array.shape) for array in arrays]
        self._gear = self._gear_call(mode, shapes)
        sizes = self._output_sizes(mode, custom_sizes)
        for _ in range(self._loop - 1):
            self._run(arrays, shapes, sizes, mode)
        return self._run(arrays, shapes, sizes, mode)

    def _gear_call(self, mode: str, shapes: list[list[int]]) -> tuple[str, tuple[Any, ...]] | None:
        if mode == "dymbatch":
            return "set_dynamic_batch_size", (shapes[0][0],)
        if mode == "dymhw":
            return "set_dynamic_hw_size", (shapes[0][2], shapes[0][3])
        if mode == "dymdims":
            dims = [length for shape in shapes for length in shape]
            return "set_input_dynamic_dims", ({"dimCount": len(dims), "dims": dims},)
        return None

    def _output_sizes(self, mode: str, custom_sizes: int | Sequence[int]) -> list[int]:
        outputs = self.get_outputs()
        if mode != "dymshape":
            return [tensor.size for tensor in outputs]
        if isinstance(custom_sizes, int):
            return [custom_sizes] * len(outputs)
        return list(custom_sizes)

    def _run(
        self, arrays: list[NDArray[Any]], shapes: list[list[int]], sizes: list[int], mode: str
    ) -> list[NDArray[Any]]:
        acl = self._acl
        pointers: list[int] = []
        buffers: list[int] = []
        descs: list[int] = []
        input_dataset, output_dataset = acl.mdl.create_dataset(), acl.mdl.create_dataset()

        def add(dataset: int, size: int) -> int:
            pointer, ret = acl.rt.malloc(size, 0)
            self._check("malloc", ret)
            pointers.append(pointer)
            buffers.append(acl.create_data_buffer(pointer, size))
            self._check("add", acl.mdl.add_dataset_buffer(dataset, buffers[-1])[1])
            return int(pointer)

        try:
            for index, (spec, array) in enumerate(zip(self.get_inputs(), arrays, strict=True)):
                pointer = add(input_dataset, max(spec.size, array.nbytes))
                if mode == "static" and array.nbytes != spec.size:
                    raise RuntimeError(
                        f"input {index} size {array.nbytes} not match model's {spec.size}"
                    )
                ret = acl.rt.memcpy(pointer, max(spec.size, array.nbytes), array.ctypes.data,
                                    array.nbytes, 1)  # fmt: skip
                self._check("memcpy", ret)
            self._apply_shapes(input_dataset, shapes, add, descs)
            results = [(add(output_dataset, size), size) for size in sizes]
            ret = acl.mdl.execute(self._model_id, input_dataset, output_dataset)
            self._check("execute", ret)
            return [
                self._read(output_dataset, index, *result) for index, result in enumerate(results)
            ]
        finally:
            for pointer in pointers:
                acl.rt.free(pointer)
            for buffer in buffers:
                acl.destroy_data_buffer(buffer)
            for desc in descs:
                acl.destroy_tensor_desc(desc)
            acl.mdl.destroy_dataset(input_dataset)
            acl.mdl.destroy_dataset(output_dataset)

    def _apply_shapes(
        self, dataset: int, shapes: list[list[int]], add: Any, descs: list[int]
    ) -> None:
        acl = self._acl
        count = len(shapes)
        if acl.mdl.get_num_inputs(self._desc) > count:
            add(dataset, acl.mdl.get_input_size_by_index(self._desc, count))
        if self._gear is not None:
            name, arguments = self._gear
            ret = getattr(acl.mdl, name)(self._model_id, dataset, count, *arguments)
            self._check(name, ret)
        if not self._is_range():
            return
        for index, (spec, shape) in enumerate(zip(self.get_inputs(), shapes, strict=True)):
            descs.append(acl.create_tensor_desc(spec.datatype, shape, spec.format))
            ret = acl.mdl.set_dataset_tensor_desc(dataset, descs[-1], index)[1]
            self._check("set_dataset_tensor_desc", ret)

    def _is_range(self) -> bool:
        return any(not tensor.size for tensor in self.get_inputs())

    def _read(self, dataset: int, index: int, pointer: int, size: int) -> NDArray[Any]:
        acl = self._acl
        info = self.get_outputs()[index]
        if self._is_range():
            desc = acl.mdl.get_dataset_tensor_desc(dataset, index)
            rank = acl.get_tensor_desc_num_dims(desc)
            shape = [acl.get_tensor_desc_dim_v2(desc, axis)[0] for axis in range(rank)]
        else:
            shape = acl.mdl.get_cur_output_dims(self._desc, index)[0]["dims"]
        dtype = np.dtype(NUMPY_BY_ACL[info.datatype])
        host = np.empty(prod(shape) * dtype.itemsize, np.uint8)
        if host.nbytes:
            self._check("memcpy", acl.rt.memcpy(host.ctypes.data, host.nbytes, pointer,
                                                host.nbytes, 2))  # fmt: skip
        return host.view(dtype).reshape(shape)

    def free_resource(self) -> None:
        """Unload; harmless when repeated."""
        if self._released:
            return
        self._released = True
        acl = self._acl
        acl.rt.set_context(self._context)
        acl.mdl.destroy_desc(self._desc)
        acl.mdl.unload(self._model_id)
        acl.rt.destroy_context(self._context)
        acl.rt.reset_device(self._device_id)

    def __del__(self) -> None:
        if hasattr(self, "_released"):
            self.free_resource()

    @staticmethod
    def finalize() -> None:
        """End ACL in the whole process."""
        importlib.import_module("acl").finalize()
