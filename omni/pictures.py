"""Pictures that callers give, as arrays: PIL images, arrays, the bytes of a file, data URLs, paths.

Decoding is slow, so it is never done on an event loop. Invariant: nothing is unpacked before its size is known to be
allowed, and nothing is ever fetched: a URL is refused, whatever it points to.
"""

import base64
import re
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Final, Union, cast

from proto.errors import InvalidRequest
from proto.params import MAX_PIXELS_A_SIDE

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image

Picture = Union["Image", "NDArray[np.uint8]", bytes, str, Path]
"""A PIL image, an array (height, width, 3 or 4), a png, jpeg or webp file as bytes or as a path, or its text: base64 or a
data URL."""

Pictures = Picture | Sequence[Picture]

MAX_PIXELS: Final = 64 << 20
"""Of all pictures of a request together. A small file can unpack to a huge picture; what would be too large is refused
before it is unpacked."""

_DATA_URL: Final = re.compile(r"data:(image/[a-z+.-]{1,32})?;base64,", re.IGNORECASE)
_SCHEME: Final = re.compile(r"(https?|ftp|file|s3|gs)://", re.IGNORECASE)
_ORIENTATION: Final = 0x0112  # a tag of EXIF
_FORMATS: Final = ("PNG", "JPEG", "WEBP")


def read_pictures(given: Pictures, field: str = "image") -> "tuple[NDArray[np.uint8], ...]":
    """Each picture as uint8 (height, width, 3), or 4 where some of it is transparent. Raises `InvalidRequest` naming
    `field`, with its place if there are several."""
    from PIL.Image import Image

    if _is_array(given, 4):
        return tuple(cast("NDArray[np.uint8]", given))
    if not isinstance(given, str | bytes | Path | Image) and not _is_array(given):
        several = list(cast("Sequence[Picture]", given))
        names = [field] if len(several) == 1 else [f"{field}[{at}]" for at in range(len(several))]
        read: list[NDArray[np.uint8]] = []
        for one, name in zip(several, names, strict=True):
            read.append(read_picture(one, name, MAX_PIXELS - sum(array.shape[0] * array.shape[1] for array in read)))
        return tuple(read)
    return (read_picture(cast(Picture, given), field),)


def read_picture(given: Picture, field: str = "image", max_pixels: int = MAX_PIXELS) -> "NDArray[np.uint8]":
    """One picture, as in `read_pictures`."""
    import numpy as np

    if _is_array(given):
        return cast("NDArray[np.uint8]", given)  # the planner says what is wrong with its shape
    image = _of_8_bits(_opened(given, field, max_pixels))
    form = "RGBA" if _is_transparent(image) else "RGB"
    return np.asarray(image if image.mode == form else image.convert(form), dtype=np.uint8)


def read_mask(given: Picture, field: str = "mask") -> "NDArray[np.uint8]":
    """A mask as uint8 (height, width): 255 where the image is to be painted anew.

    As in OpenAI's API a picture with an alpha channel says it by transparency; any other by its white."""
    import numpy as np

    if isinstance(given, np.ndarray):
        if given.dtype != np.uint8 or given.ndim != 3 or given.shape[2] not in (3, 4):
            return given  # a mask already, or the planner says what is wrong with its shape
        from PIL.Image import fromarray

        given = fromarray(given)
    image = _of_8_bits(_opened(given, field, MAX_PIXELS))
    if _has_alpha(image):
        return mask_of(np.asarray(image.convert("RGBA"), dtype=np.uint8))
    return np.asarray(image.convert("L"), dtype=np.uint8)


def mask_of(picture: "NDArray[np.uint8]") -> "NDArray[np.uint8]":
    """The mask that the transparency of a picture (height, width, 4) is."""
    return 255 - picture[:, :, 3]


def _is_array(given: object, ndim: int | None = None) -> bool:
    import numpy as np

    return isinstance(given, np.ndarray) and ndim in (None, given.ndim)


def _has_alpha(image: "Image") -> bool:
    return image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info


def _is_transparent(image: "Image") -> bool:
    return _has_alpha(image) and image.convert("RGBA").getextrema()[3][0] < 255


def _opened(given: object, field: str, max_pixels: int) -> "Image":
    from PIL.Image import Image

    if isinstance(given, Image):
        _check_size(given, field, max_pixels)
        return given
    if isinstance(given, Path):
        try:
            given = given.read_bytes()
        except OSError as error:
            raise InvalidRequest(f"{field}: {error.strerror}: {str(given)!r}", field=field) from None
    if isinstance(given, str):
        given = _from_text(given, field)
    if not isinstance(given, bytes):
        raise InvalidRequest(
            f"{field}: a {type(given).__name__} is no picture; give a PIL image, an array (height, width, 3 or 4), bytes,"
            " a path, or a data URL",
            field=field,
        )
    return _from_file(given, field, max_pixels)


def _from_text(text: str, field: str) -> bytes:
    if _SCHEME.match(text[:16]):
        raise InvalidRequest(
            f"{field}: URLs are not fetched here; send the picture as base64 or a data URL", field=field
        )
    prefix = _DATA_URL.match(text)
    try:
        return base64.b64decode("".join(text[prefix.end() if prefix else 0 :].split()), validate=True)
    except ValueError:
        raise InvalidRequest(f"{field}: this is not base64, nor a data URL with base64", field=field) from None


def _from_file(raw: bytes, field: str, max_pixels: int) -> "Image":
    """Upright, and unpacked."""
    from PIL import Image

    try:
        with Image.open(BytesIO(raw), formats=_FORMATS) as image:
            _check_size(image, field, max_pixels)
            image.load()
            return _upright(image)
    except Image.DecompressionBombError:
        raise _too_large("it", field) from None
    except InvalidRequest:
        raise
    except Exception:  # noqa: BLE001 - PIL's readers raise struct.error, KeyError and others for bytes that are damaged
        raise InvalidRequest(f"{field}: this is not a whole png, jpeg or webp file", field=field) from None


def _upright(image: "Image") -> "Image":
    """As its EXIF says; EXIF that cannot be read says nothing. PIL's own `exif_transpose` also writes all of it anew, and
    raises for a value that has not its type, which the photos of some cameras have."""
    from PIL.Image import Transpose

    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    try:
        turn = turns.get(image.getexif().get(_ORIENTATION))
    except Exception:  # noqa: BLE001 - as when a file is read
        turn = None
    return image.copy() if turn is None else image.transpose(turn)


def _of_8_bits(image: "Image") -> "Image":
    """PIL cuts 16-bit greys off at 255, so that nearly all of them would be white."""
    import numpy as np
    from PIL.Image import fromarray

    if not image.mode.startswith("I;16"):
        return image
    grey = np.asarray(image)
    if "transparency" not in image.info:
        return fromarray((grey >> 8).astype(np.uint8))
    seen = np.where(grey == image.info["transparency"], 0, 255)
    return fromarray(np.stack([grey >> 8, seen], axis=-1).astype(np.uint8))


def _check_size(image: "Image", field: str, max_pixels: int) -> None:
    width, height = image.size
    if max(width, height) > MAX_PIXELS_A_SIDE or width * height > max_pixels:
        raise _too_large(f"{width}x{height} pixels", field)


def _too_large(what: str, field: str) -> InvalidRequest:
    return InvalidRequest(
        f"{field}: {what} is too large; a side may have {MAX_PIXELS_A_SIDE}, and all images of a request together"
        f" {MAX_PIXELS} pixels",
        field=field,
    )
