"""Dynamic AIPP: image preprocessing on the card whose settings the caller gives at run time.

A model compiled with `aipp_mode: dynamic` has one more input for each image input. The settings
come from the model's parameters, are checked here (every mistake names its parameter), and are
written into that input once, when the model is loaded:

    aipp_input_format     RGB888_U8, XRGB8888_U8, YUV420SP_U8 or YUV400_U8
    aipp_src_image_size   width,height of the images that clients send
    aipp_crop             x,y,width,height
    aipp_padding          top,bottom,left,right
    aipp_csc_matrix       nine numbers, row by row; with aipp_csc_input_bias (of YUV images) and
                          aipp_csc_output_bias (of RGB images), 16,128,128 as in atc
    aipp_rbuv_swap        true: swap R and B, or U and V
    aipp_ax_swap          true: RGBA to ARGB
    aipp_mean, aipp_min, aipp_var_reci   one number a channel

`aipp_mean.<input>` is for that input alone, where a model has several. Steps of the card: crop,
swaps, colour space conversion, (pixel - mean - min) * var_reci, padding with zeros.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from npuserve.backends.acl.runtime import Owned
from npuserve.errors import InvalidConfigError

if TYPE_CHECKING:
    from npuserve.backends.acl.gears import Dims
    from npuserve.backends.acl.library import AclLibrary

PREFIX = "aipp_"

# aclAippInputFormat.
_FORMATS = {"YUV420SP_U8": 1, "XRGB8888_U8": 2, "RGB888_U8": 3, "YUV400_U8": 4}
_STORED_CHANNELS = {"YUV420SP_U8": 1, "XRGB8888_U8": 4, "RGB888_U8": 3, "YUV400_U8": 1}
_NAMES = frozenset(
    PREFIX + name
    for name in (
        "input_format", "src_image_size", "crop", "padding", "csc_matrix", "csc_input_bias",
        "csc_output_bias", "rbuv_swap", "ax_swap", "mean", "min", "var_reci",
    )
)  # fmt: skip
_MAX_SIDE = 4096
_HALF_MAX = 65504.0
_DEFAULT_BIAS = (16, 128, 128)


@dataclass(frozen=True)
class AippSettings:
    """Checked settings of one image input.

    Attributes:
        crop: x, y, width, height; None for the whole image.
        padding: top, bottom, left, right; None for none.
        csc: matrix (9), output bias (3), input bias (3); None for no conversion.
    """

    input_format: str
    width: int
    height: int
    crop: tuple[int, ...] | None
    padding: tuple[int, ...] | None
    csc: tuple[int, ...] | None
    rbuv_swap: bool
    ax_swap: bool
    mean: tuple[int, ...]
    minimum: tuple[float, ...]
    var_reci: tuple[float, ...]

    def image_dims(self, batch: int) -> Dims:
        """What clients send: `[batch, rows, width, channels]` of UINT8."""
        rows = self.height * 3 // 2 if self.input_format == "YUV420SP_U8" else self.height
        return (batch, rows, self.width, _STORED_CHANNELS[self.input_format])

    @property
    def summary(self) -> str:
        """The settings that decide the shape behind AIPP, for errors of the runtime."""
        parts = [
            f"aipp_input_format {self.input_format}",
            f"aipp_src_image_size {self.width},{self.height}",
        ]
        for name, values in (("aipp_crop", self.crop), ("aipp_padding", self.padding)):
            if values is not None:
                parts.append(f"{name} {','.join(map(str, values))}")
        return ", ".join(parts)


def aipp_parameters(parameters: Mapping[str, str]) -> dict[str, str]:
    """Those of a model's parameters that are about AIPP.

    Raises:
        InvalidConfigError: one that there is not.
    """
    found = {name: text for name, text in parameters.items() if name.startswith(PREFIX)}
    for name in found:
        if name.partition(".")[0] not in _NAMES:
            known = ", ".join(sorted(_NAMES))
            raise InvalidConfigError.of_parameter(
                name, f"parameter '{name}' is unknown; of AIPP there are {known}"
            )
    return found


def parameter_name(parameters: Mapping[str, str], name: str, input_name: str) -> str:
    """The parameter that counts for an input: its own, else the one for all."""
    own = f"{PREFIX}{name}.{input_name}"
    return own if own in parameters else PREFIX + name


class _Reader:
    """Reads the parameters of one input."""

    def __init__(self, parameters: Mapping[str, str], input_name: str) -> None:
        self._parameters = parameters
        self._input = input_name

    def text(self, name: str) -> tuple[str, str | None]:
        """(full name of the parameter that counts, its value)."""
        key = parameter_name(self._parameters, name, self._input)
        return key, self._parameters.get(key)

    def wrong(self, name: str, what: str) -> InvalidConfigError:
        key, text = self.text(name)
        return InvalidConfigError.of_parameter(key, f"parameter '{key}' is '{text}'; {what}")

    def numbers(
        self, name: str, counts: Sequence[int], low: float, high: float, form: str
    ) -> tuple[float, ...] | None:
        """A list of so many numbers within limits; None when it is not given."""
        _, text = self.text(name)
        if text is None:
            return None
        try:
            values = tuple(float(part) for part in text.split(","))
        except ValueError:
            raise self.wrong(name, f"write {form}") from None
        if len(values) not in counts or not all(low <= value <= high for value in values):
            raise self.wrong(name, f"write {form}, each in [{low:g}, {high:g}]")
        return values

    def integers(
        self, name: str, counts: Sequence[int], low: int, high: int, form: str
    ) -> tuple[int, ...] | None:
        """The same of whole numbers."""
        values = self.numbers(name, counts, low, high, form)
        if values is None:
            return None
        if any(value != int(value) for value in values):
            raise self.wrong(name, f"write {form}, whole numbers")
        return tuple(int(value) for value in values)

    def channels(self, name: str, default: float, low: float, high: float) -> tuple[float, ...]:
        """One number a channel, filled up to the four that the runtime wants."""
        values = self.numbers(name, (1, 2, 3, 4), low, high, "a number for each channel")
        values = values or ()
        return values + (default,) * (4 - len(values))

    def flag(self, name: str) -> bool:
        """True or false."""
        _, text = self.text(name)
        if text not in (None, "true", "false"):
            raise self.wrong(name, "write true or false")
        return text == "true"


def read_settings(parameters: Mapping[str, str], input_name: str) -> AippSettings:
    """The settings for one image input.

    Raises:
        InvalidConfigError: a parameter is missing or wrong; it is named.
    """
    reader = _Reader(parameters, input_name)
    input_format = _input_format(reader, input_name)
    width, height = _image_size(reader, input_name, input_format)
    mean = reader.channels("mean", 0, 0, 255)
    if any(value != int(value) for value in mean):
        raise reader.wrong("mean", "the card takes whole numbers")
    return AippSettings(
        input_format,
        width,
        height,
        _crop(reader, input_format, width, height),
        reader.integers("padding", (4,), 0, 32, "top,bottom,left,right"),
        _csc(reader, input_format),
        reader.flag("rbuv_swap"),
        reader.flag("ax_swap"),
        tuple(int(value) for value in mean),
        reader.channels("min", 0, 0, 255),
        reader.channels("var_reci", 1, -_HALF_MAX, _HALF_MAX),
    )


def _input_format(reader: _Reader, input_name: str) -> str:
    key, text = reader.text("input_format")
    if text is None:
        raise InvalidConfigError.of_parameter(
            key,
            f"input '{input_name}' has dynamic AIPP, whose settings the configuration must give: "
            f"parameter '{key}' is missing",
        )
    if text not in _FORMATS:
        raise reader.wrong("input_format", f"there are {', '.join(_FORMATS)}")
    return text


def _image_size(reader: _Reader, input_name: str, input_format: str) -> tuple[int, int]:
    size = reader.integers("src_image_size", (2,), 1, _MAX_SIDE, "width,height")
    if size is None:
        key, _ = reader.text("src_image_size")
        raise InvalidConfigError.of_parameter(
            key, f"parameter '{key}' is missing for input '{input_name}'"
        )
    width, height = size
    if width < 2:
        raise reader.wrong("src_image_size", "the width must be at least 2")
    if input_format == "YUV420SP_U8" and (width % 2 or height % 2):
        raise reader.wrong("src_image_size", "both must be even for YUV420SP_U8")
    return width, height


def _crop(reader: _Reader, input_format: str, width: int, height: int) -> tuple[int, ...] | None:
    crop = reader.integers("crop", (4,), 0, _MAX_SIDE, "x,y,width,height")
    if crop is None:
        return None
    x, y, crop_width, crop_height = crop
    if not (0 < crop_width <= width - x and 0 < crop_height <= height - y):
        raise reader.wrong("crop", f"it must lie within the image of {width}x{height}")
    if input_format == "YUV420SP_U8" and (x % 2 or y % 2):
        raise reader.wrong("crop", "x and y must be even for YUV420SP_U8")
    return crop


def _csc(reader: _Reader, input_format: str) -> tuple[int, ...] | None:
    matrix = reader.integers("csc_matrix", (9,), -32677, 32676, "nine numbers, row by row")
    biases: tuple[int, ...] = ()
    for name in ("csc_output_bias", "csc_input_bias"):
        bias = reader.integers(name, (3,), 0, 255, "three numbers")
        if bias is not None and matrix is None:
            raise reader.wrong(name, "it has no meaning without aipp_csc_matrix")
        biases += bias or _DEFAULT_BIAS
    if matrix is None:
        return None
    if input_format == "YUV400_U8":
        raise reader.wrong("csc_matrix", "YUV400_U8 has no colours to convert")
    return matrix + biases


class Aipp(Owned):
    """Settings as the runtime wants them, for a batch of equal images."""

    def __init__(self, library: AclLibrary, settings: AippSettings, batch: int) -> None:
        super().__init__()
        self._library = library
        self._settings = settings
        with ExitStack() as stack:
            self._handle = library.handle("acl.mdl.create_aipp", batch)
            stack.callback(library.release, "acl.mdl.destroy_aipp", self._handle)
            self._fill(batch)
            self._stack = stack.pop_all()

    def _fill(self, batch: int) -> None:
        settings = self._settings
        self._set("input_format", _FORMATS[settings.input_format])
        self._set("src_image_size", settings.width, settings.height)
        if settings.csc is not None:
            self._set("csc_params", 1, *settings.csc)
        self._set("rbuv_swap_switch", int(settings.rbuv_swap))
        self._set("ax_swap_switch", int(settings.ax_swap))
        for index in range(batch):
            if settings.crop is not None:
                self._set("crop_params", 1, *settings.crop, index)
            if settings.padding is not None:
                self._set("padding_params", 1, *settings.padding, index)
            self._set("dtc_pixel_mean", *settings.mean, index)
            self._set("dtc_pixel_min", *settings.minimum, index)
            self._set("pixel_var_reci", *settings.var_reci, index)

    def _set(self, name: str, *values: float) -> None:
        self._library.call(f"acl.mdl.set_aipp_{name}", self._handle, *values)

    def apply(self, model_id: int, dataset: int, index: int) -> None:
        """Write the settings into parameter input `index`, whose buffer is in the dataset."""
        self._library.call(
            "acl.mdl.set_input_aipp", model_id, dataset, index, self._handle,
            context=f"for {self._settings.summary}",
        )  # fmt: skip
