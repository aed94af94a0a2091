"""JPEG and PNG for the image hardware of the simulator, by Pillow.

Pillow is imported when first needed: only programs that use `acl.media` or `acl.himpi` do.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import numpy as np

from npuserve.testing.simulator.faults import RefusedError
from npuserve.testing.simulator.pictures import Bytes, Layout, Picture, Sampling, convert

FAILURE = 500001  # ACL_ERROR_FAILURE
UNSUPPORTED = 200006  # ACL_ERROR_FEATURE_UNSUPPORTED

_ORIENTATION_TAG = 0x0112
_GREY = Layout("y")
# acldvppJpegFormat by the chroma sampling of the file.
_JPEG_FORMATS = {
    Sampling(1, 1): 0, Sampling(2, 1): 1, Sampling(2, 2): 2, Sampling(1, 2): 4, Sampling(4, 1): 5,
}  # fmt: skip
_JPEG_GREY, _JPEG_UNKNOWN = 3, 1000


def _pillow() -> Any:
    try:
        import PIL.Image
        import PIL.ImageOps
    except ImportError as error:
        raise ImportError(
            "the simulator's acl.media and acl.himpi need Pillow: pip install 'npuserve[npu-sim]'"
        ) from error
    return PIL


@dataclass(frozen=True)
class ImageInfo:
    """What the head of a file says.

    Attributes:
        width: as shown, after the rotation that EXIF asks for.
        height: as shown.
        components: channels.
        sampling: of the chroma of a JPEG file; None for grey or PNG.
        jpeg_format: acldvppJpegFormat.
    """

    width: int
    height: int
    components: int
    sampling: Sampling | None
    jpeg_format: int = _JPEG_UNKNOWN


def _open(data: Bytes, kind: str) -> Any:
    pillow = _pillow()
    try:
        return pillow.Image.open(io.BytesIO(data.tobytes()), formats=[kind])
    except (OSError, ValueError) as error:
        raise RefusedError(FAILURE, f"not a {kind} file: {error}") from error


def jpeg_info(data: Bytes) -> ImageInfo:
    """Read the head of a JPEG file."""
    with _open(data, "JPEG") as image:
        width, height = image.size
        if image.getexif().get(_ORIENTATION_TAG, 1) >= 5:
            width, height = height, width
        if len(image.layer) == 1:
            return ImageInfo(width, height, 1, None, _JPEG_GREY)
        (_, across, down, _), (_, less_across, less_down, _) = image.layer[:2]
        sampling = Sampling(across // less_across, down // less_down)
        jpeg_format = _JPEG_FORMATS.get(sampling, _JPEG_UNKNOWN)
        return ImageInfo(width, height, len(image.layer), sampling, jpeg_format)


def png_info(data: Bytes) -> ImageInfo:
    """Read the head of a PNG file."""
    with _open(data, "PNG") as image:
        width, height = image.size
        return ImageInfo(width, height, len(image.getbands()), None)


def decode_jpeg(data: Bytes) -> Picture:
    """Decode a baseline JPEG file of one or three components to 4:4:4 or grey.

    The hardware knows neither progressive files nor four components.
    """
    pillow = _pillow()
    with _open(data, "JPEG") as image:
        if image.info.get("progressive"):
            raise RefusedError(UNSUPPORTED, "progressive JPEG is not supported")
        if len(image.layer) not in (1, 3):
            raise RefusedError(UNSUPPORTED, f"JPEG of {len(image.layer)} components")
        if image.mode == "RGB":
            image.draft("YCbCr", None)  # the colours of the file as they are
        try:
            upright = pillow.ImageOps.exif_transpose(image)
            pixels = np.asarray(upright)
        except OSError as error:
            raise RefusedError(FAILURE, f"broken JPEG file: {error}") from error
    if pixels.ndim == 2:
        return Picture((pixels[..., None].copy(),))
    return Picture((pixels[..., :1].copy(), pixels[..., 1:].copy()))


def decode_png(data: Bytes, alpha: bool) -> Bytes:
    """RGB `[h, w, 3]`, or RGBA `[h, w, 4]`."""
    with _open(data, "PNG") as image:
        try:
            return np.asarray(image.convert("RGBA" if alpha else "RGB"))
        except (OSError, SyntaxError) as error:
            raise RefusedError(FAILURE, f"broken PNG file: {error}") from error


def encode_jpeg(picture: Picture, level: int) -> bytes:
    """A JPEG file of a YUV picture. Level 1 (worst) to 100; 0 is as good as 100."""
    pillow = _pillow()
    whole = convert(picture, Layout("yuv", Sampling(1, 1)))
    pixels = np.concatenate(whole.planes, axis=2)
    down = 2 if picture.sampling_of(picture.planes[1]).down == 2 else 1
    output = io.BytesIO()
    pillow.Image.fromarray(np.ascontiguousarray(pixels), "YCbCr").save(
        output, "JPEG", quality=level or 100, subsampling="4:2:0" if down == 2 else "4:2:2"
    )
    return output.getvalue()
