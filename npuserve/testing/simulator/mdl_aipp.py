"""`acl.mdl.*`: AIPP, static (asked for) and dynamic (set for an execution).

Source of checks and codes: `acl_aipp.cpp` and `aipp_param_check.cpp` of GE.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from npuserve.testing.simulator import aipp
from npuserve.testing.simulator.aipp import AippParams, ImageParams
from npuserve.testing.simulator.binding import bare, entry
from npuserve.testing.simulator.core import DataBuffer
from npuserve.testing.simulator.faults import RefusedError
from npuserve.testing.simulator.mdl_describe import ExtraInput, extra_input, extra_inputs, largest
from npuserve.testing.simulator.mdl_load import Model
from npuserve.testing.simulator.mdl_run import Dataset

if TYPE_CHECKING:
    from npuserve.testing.simulator.om_file import OmDescription
    from npuserve.testing.simulator.runtime import Runtime

_INVALID_PARAM = 100000
_INVALID_MODEL = 100011
_NOT_STATIC = 100038
_TOO_SHORT = 145012
_NO_AIPP_CODE = 145015
_FAILURE = 500001

_NOTHING_ATTACHED = 0xFFFFFFFF
_NO_AIPP, _STATIC, _DYNAMIC, _PARAMETERS = range(4)
_MAX_SIDE = 4096
_MAX_PADDED_WIDTH = 1080


@dataclass(eq=False)
class AippHandle:
    """Settings under construction; `images` has one entry an image of the batch."""

    params: AippParams = field(default_factory=lambda: AippParams(""))

    def set_image(self, index: int, **changes: Any) -> None:
        """Change the settings of one image."""
        images = list(self.params.images)
        if not 0 <= index < len(images):
            raise RefusedError(_INVALID_PARAM, f"batch_index {index} of {len(images)}")
        images[index] = replace(images[index], **changes)
        self.params = replace(self.params, images=images)


def _check_range(what: str, low: float, high: float, *values: float) -> None:
    for value in values:
        if not low <= value <= high:
            raise RefusedError(_INVALID_PARAM, f"{what} {value} is not in [{low}, {high}]")


def _check_switch(what: str, value: int) -> bool:
    _check_range(what, 0, 1, value)
    return bool(value)


# Making settings.


@bare("acl.mdl.create_aipp", "k")
def create_aipp(runtime: Runtime, batch: int) -> int:
    """Settings for a batch of images."""
    if not batch:
        raise RefusedError(_INVALID_PARAM, "AIPP settings for a batch of 0")
    handle = AippHandle(AippParams("", images=[ImageParams()] * batch))
    return runtime.register(handle, "AIPP settings", "acl.mdl.create_aipp")


@entry("acl.mdl.destroy_aipp", "k")
def destroy_aipp(runtime: Runtime, handle: int) -> None:
    """Destroy settings."""
    runtime.drop(handle, AippHandle)


@entry("acl.mdl.get_aipp_data_size", "k", failure=(0,))
def get_aipp_data_size(runtime: Runtime, batch: int) -> int:
    """Bytes of the parameter input for a batch."""
    if not batch:
        raise RefusedError(_INVALID_PARAM, "a batch of 0")
    return aipp.encoded_bytes(batch)


@entry("acl.mdl.set_aipp_input_format", "ki")
def set_aipp_input_format(runtime: Runtime, handle: int, number: int) -> None:
    """Set the layout of the images."""
    settings = runtime.find(handle, AippHandle)
    if number not in aipp.FORMATS:
        raise RefusedError(_INVALID_PARAM, f"image format {number} is not supported")
    settings.params = replace(settings.params, input_format=aipp.FORMATS[number])


@entry("acl.mdl.set_aipp_src_image_size", "kii")
def set_aipp_src_image_size(runtime: Runtime, handle: int, width: int, height: int) -> None:
    """Set the size of the images."""
    settings = runtime.find(handle, AippHandle)
    _check_range("srcImageSizeW", 2, _MAX_SIDE, width)
    _check_range("srcImageSizeH", 1, _MAX_SIDE, height)
    settings.params = replace(settings.params, width=width, height=height)


@entry("acl.mdl.set_aipp_csc_params", "kbhhhhhhhhhBBBBBB")
def set_aipp_csc_params(runtime: Runtime, handle: int, switch: int, *values: int) -> None:
    """Set the colour space conversion: matrix, output bias, input bias."""
    settings = runtime.find(handle, AippHandle)
    if not _check_switch("cscSwitch", switch):
        settings.params = replace(settings.params, csc=None)
        return
    _check_range("cscMatrix", -32677, 32676, *values[:9])
    settings.params = replace(
        settings.params, csc=values[:9], output_bias=values[9:12], input_bias=values[12:]
    )


@entry("acl.mdl.set_aipp_rbuv_swap_switch", "kb")
def set_aipp_rbuv_swap_switch(runtime: Runtime, handle: int, switch: int) -> None:
    """Swap R and B, or U and V."""
    settings = runtime.find(handle, AippHandle)
    settings.params = replace(settings.params, rbuv_swap=_check_switch("rbuvSwapSwitch", switch))


@entry("acl.mdl.set_aipp_ax_swap_switch", "kb")
def set_aipp_ax_swap_switch(runtime: Runtime, handle: int, switch: int) -> None:
    """RGBA to ARGB."""
    settings = runtime.find(handle, AippHandle)
    settings.params = replace(settings.params, ax_swap=_check_switch("axSwapSwitch", switch))


@entry("acl.mdl.set_aipp_crop_params", "kbiiiik")
def set_aipp_crop_params(
    runtime: Runtime, handle: int, switch: int, x: int, y: int, width: int, height: int, index: int
) -> None:
    """Set what is cut out of an image."""
    settings = runtime.find(handle, AippHandle)
    settings.set_image(index)
    if not _check_switch("cropSwitch", switch):
        settings.set_image(index, crop=None)
        return
    _check_range("cropStartPos", 0, _MAX_SIDE - 1, x, y)
    _check_range("cropSize", 1, _MAX_SIDE, width, height)
    settings.set_image(index, crop=(x, y, width, height))


@entry("acl.mdl.set_aipp_padding_params", "kbiiiik")
def set_aipp_padding_params(
    runtime: Runtime, handle: int, switch: int, top: int, bottom: int, left: int, right: int,
    index: int,
) -> None:  # fmt: skip
    """Set what is put around an image."""
    settings = runtime.find(handle, AippHandle)
    settings.set_image(index)
    if not _check_switch("paddingSwitch", switch):
        settings.set_image(index, padding=None)
        return
    _check_range("paddingSize", 0, 32, top, bottom, left, right)
    settings.set_image(index, padding=(top, bottom, left, right))


@entry("acl.mdl.set_aipp_dtc_pixel_mean", "khhhhk")
def set_aipp_dtc_pixel_mean(
    runtime: Runtime, handle: int, c0: int, c1: int, c2: int, c3: int, index: int
) -> None:
    """Set the means of the channels."""
    settings = runtime.find(handle, AippHandle)
    _check_range("dtcPixelMeanChn", 0, 255, c0, c1, c2, c3)
    settings.set_image(index, mean=(c0, c1, c2, c3))


@entry("acl.mdl.set_aipp_dtc_pixel_min", "kffffk")
def set_aipp_dtc_pixel_min(
    runtime: Runtime, handle: int, c0: float, c1: float, c2: float, c3: float, index: int
) -> None:
    """Set the minima of the channels."""
    settings = runtime.find(handle, AippHandle)
    _check_range("dtcPixelMinChn", 0, 255, c0, c1, c2, c3)
    settings.set_image(index, minimum=(c0, c1, c2, c3))


@entry("acl.mdl.set_aipp_pixel_var_reci", "kffffk")
def set_aipp_pixel_var_reci(
    runtime: Runtime, handle: int, c0: float, c1: float, c2: float, c3: float, index: int
) -> None:
    """Set what the channels are multiplied by."""
    settings = runtime.find(handle, AippHandle)
    _check_range("dtcPixelVarReciChn", -65504, 65504, c0, c1, c2, c3)
    settings.set_image(index, var_reci=(c0, c1, c2, c3))


# Using settings.


@entry("acl.mdl.set_input_aipp", "ikkk")
def set_input_aipp(runtime: Runtime, model_id: int, dataset: int, index: int, handle: int) -> None:
    """Write settings into a parameter input of a dataset."""
    blobs = runtime.find(dataset, Dataset)
    params = runtime.find(handle, AippHandle).params
    description = runtime.find(model_id, Model, _INVALID_MODEL).description
    extra = extra_input(description, index)
    if extra is None or extra.aipp_of is None:
        raise RefusedError(_INVALID_PARAM, f"input {index} has no parameters of dynamic AIPP")
    _check_settings(description, extra.aipp_of, params)
    if index >= len(blobs.buffers):
        raise RefusedError(_INVALID_PARAM, f"buffer {index} of {len(blobs.buffers)}")
    buffer = runtime.find(blobs.buffers[index], DataBuffer)
    if not buffer.address:
        raise RefusedError(_INVALID_PARAM, f"the buffer of {extra.name} is null")
    content = params.encode()
    if buffer.size < len(content):
        text = f"the buffer of {extra.name} has {buffer.size} bytes, not {len(content)}"
        raise RefusedError(_TOO_SHORT, text)
    runtime.bytes_at(buffer.address, len(content))[:] = np.frombuffer(content, np.uint8)


def _check_settings(description: OmDescription, index: int, params: AippParams) -> None:
    if not params.input_format:
        raise RefusedError(_INVALID_PARAM, "inputFormat must be set")
    if not params.width or not params.height:
        raise RefusedError(_INVALID_PARAM, "srcImageSizeW and srcImageSizeH must be set")
    size = len(params.images) * params.image_bytes
    maximum = int(description.inputs[index].aipp["max_src_image_size"])
    if size > maximum:
        text = f"the dynamic aipp size[{size}] is bigger than max_src_image_size[{maximum}]"
        raise RefusedError(_INVALID_PARAM, f"E10055: {text}")
    for image in range(len(params.images)):
        _check_image(params, image)
    count, _, height, width = largest(description, index, "inputs")
    output = params.output_size(0)
    if (len(params.images), *output) != (count, height, width):
        raise RefusedError(
            _INVALID_PARAM,
            "E10055: aipp output shape set by ACL must be equal to aipp output shape in the model! "
            f"AclAippBatchSize = {len(params.images)}, AclAippOutputW = {output[1]}, "
            f"AclAippOutputH = {output[0]}, ModelAippBatchSize = {count}, ModelAippOutputW = "
            f"{width}, ModelAippOutputH = {height}",
        )
    if params.input_format == "YUV400_U8" and params.csc is not None:
        raise RefusedError(_INVALID_PARAM, "YUV400 does not support the csc switch")
    if params.input_format == "YUV420SP_U8" and (params.width % 2 or params.height % 2):
        raise RefusedError(
            _INVALID_PARAM, "srcImageSizeH and srcImageSizeW must be even for YUV420SP"
        )


def _check_image(params: AippParams, index: int) -> None:
    entry = params.images[index]
    if entry.crop is not None:
        x, y, width, height = entry.crop
        if x + width > params.width or y + height > params.height:
            raise RefusedError(_INVALID_PARAM, f"the crop {entry.crop} leaves the image")
        if params.input_format == "YUV420SP_U8" and (x % 2 or y % 2):
            raise RefusedError(_INVALID_PARAM, "cropStartPos must be even for YUV420SP_U8")
    output = params.output_size(index)
    if entry.padding is not None and output[1] > _MAX_PADDED_WIDTH:
        raise RefusedError(_INVALID_PARAM, f"after padding the width {output[1]} exceeds 1080")
    if output != params.output_size(0):
        raise RefusedError(_INVALID_PARAM, f"image {index} becomes {output}, not as the first one")


@entry("acl.mdl.set_aipp_by_input_index", "ikkk")
def set_aipp_by_input_index(
    runtime: Runtime, model_id: int, dataset: int, index: int, handle: int
) -> None:
    """The same by the data input."""
    if index >= len(runtime.find(dataset, Dataset).buffers):
        raise RefusedError(_INVALID_PARAM, f"buffer {index}")
    kind, attached = get_aipp_type(runtime, model_id, index)
    if kind != _DYNAMIC:
        raise RefusedError(_FAILURE, f"input {index} has no dynamic AIPP")
    set_input_aipp(runtime, model_id, dataset, attached, handle)


# Asking.


@entry("acl.mdl.get_aipp_type", "ik", failure=(0, _NOTHING_ATTACHED))
def get_aipp_type(runtime: Runtime, model_id: int, index: int) -> tuple[int, int]:
    """0: none, 1: static, 2: dynamic (and the input of its parameters), 3: such an input."""
    description = runtime.find(model_id, Model, _INVALID_MODEL).description
    extra = extra_input(description, index)
    if extra is not None:
        return (_NO_AIPP if extra.aipp_of is None else _PARAMETERS), _NOTHING_ATTACHED
    spec = description.inputs[index]
    if not spec.has_dynamic_aipp:
        return (_STATIC if spec.aipp else _NO_AIPP), _NOTHING_ATTACHED
    return _DYNAMIC, len(description.inputs) + _place(extra_inputs(description), index)


def _place(extra: list[ExtraInput], data_index: int) -> int:
    return [added.aipp_of for added in extra].index(data_index)


@entry("acl.mdl.get_first_aipp_info", "ik", failure=(None,))
def get_first_aipp_info(runtime: Runtime, model_id: int, index: int) -> dict[str, Any]:
    """Static AIPP of an input."""
    description = runtime.find(model_id, Model, _INVALID_MODEL).description
    extra = extra_input(description, index)
    if extra is not None or description.inputs[index].has_dynamic_aipp:
        raise RefusedError(_NOT_STATIC, f"input {index} has no static AIPP")
    if not description.inputs[index].aipp:
        raise RefusedError(_NO_AIPP_CODE, f"input {index} has no AIPP")
    return aipp.describe(aipp.from_config(description.inputs[index].aipp))
