"""From arrays to the bytes of files: pictures, sound, videos and tensors, in the forms that callers may ask for.

Slow, so never called on an event loop. What needs an extra (`pip install 'omni-pipeline[video]'`) says so in `check_form`,
before any work; each kind of output has at least one form that needs none.
"""

import io
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from proto.deploy import Kind
from proto.errors import InvalidRequest

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Form:
    """A kind of file. `module` is what it needs beyond the package's own dependencies, from the extra `extra`."""

    name: str
    media_type: str
    module: str | None = None
    extra: str | None = None
    library: str | None = None

    @property
    def suffix(self) -> str:
        return ".jpg" if self.name == "jpeg" else f".{self.name}"

    @property
    def missing(self) -> bool:
        return self.module is not None and find_spec(self.module) is None


FORMS: Final[dict[Kind, tuple[Form, ...]]] = {
    Kind.IMAGE: (Form("png", "image/png"), Form("jpeg", "image/jpeg"), Form("webp", "image/webp")),
    Kind.VIDEO: (
        Form("mp4", "video/mp4", "av", "video", "PyAV"),
        Form("webp", "image/webp"),
        Form("gif", "image/gif"),
    ),
    Kind.AUDIO: (Form("wav", "audio/wav"), Form("flac", "audio/flac", "soundfile", "audio", "soundfile")),
    Kind.LATENTS: (Form("npy", "application/octet-stream"), Form("safetensors", "application/octet-stream")),
}
"""By kind of output; the first is the usual one."""


def check_form(kind: Kind, name: str | None, field: str = "output_format") -> Form:
    """The form of that name; None is the first that works here. Raises `InvalidRequest` with the remedy."""
    forms = FORMS[kind]
    if name is None:
        return next(form for form in forms if not form.missing)
    known = next((form for form in forms if form.name == {"jpg": "jpeg"}.get(name, name)), None)
    others = ", ".join(form.name for form in forms if not form.missing)
    if known is None:
        raise InvalidRequest(f"{field}: {kind.value} is not written as {name[:40]!r}, but as: {others}", field=field)
    if known.missing:
        raise InvalidRequest(
            f"{field}: {known.name} needs {known.library}, which is not installed here:"
            f" pip install 'omni-pipeline[{known.extra}]'; without it there is: {others}",
            field=field,
        )
    return known


def image_file(pixels: "NDArray[np.uint8]", form: str = "png") -> bytes:
    """uint8 (height, width, 3 or 4) as png, jpeg (without its alpha) or webp."""
    from PIL import Image

    image = Image.fromarray(pixels)
    if form == "jpeg" and image.mode == "RGBA":
        image = image.convert("RGB")
    out = io.BytesIO()
    image.save(out, format=form)
    return out.getvalue()


def video_file(frames: "NDArray[np.uint8]", fps: float, form: str = "mp4") -> bytes:
    """uint8 (frames, height, width, 3) as mp4 (H.264 where PyAV has it, else MPEG-4), or as an animated webp or gif."""
    if form == "mp4":
        return _mp4(frames, fps)
    from PIL import Image

    first, *rest = [Image.fromarray(frame) for frame in frames]
    settings = {"quality": 90, "method": 2} if form == "webp" else {"disposal": 1}
    out = io.BytesIO()
    duration = max(1, round(1000 / fps))
    first.save(out, format=form, save_all=True, append_images=rest, duration=duration, loop=0, **settings)
    return out.getvalue()


def _mp4(frames: "NDArray[np.uint8]", fps: float) -> bytes:
    import av
    import numpy as np

    height, width = frames.shape[1:3]
    even = ((0, 0), (0, height % 2), (0, width % 2), (0, 0))  # colours are stored for 2 x 2 pixels
    frames = np.pad(frames, even, mode="edge") if height % 2 or width % 2 else frames
    codec = "libx264" if "libx264" in av.codecs_available else "mpeg4"
    with tempfile.TemporaryDirectory(
        prefix="omni-video-"
    ) as folder:  # its index goes to the front at the end: no stream
        path = Path(folder, "video.mp4")
        _write_mp4(path, codec, frames, fps)
        return path.read_bytes()


def _write_mp4(path: Path, codec: str, frames: "NDArray[np.uint8]", fps: float) -> None:
    import av
    import numpy as np

    with av.open(str(path), mode="w", format="mp4", options={"movflags": "faststart"}) as container:
        stream = container.add_stream(codec, rate=Fraction(fps).limit_denominator(1001))
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.options = {"crf": "18"} if codec == "libx264" else {"qscale": "2"}
        for pixels in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")))
        container.mux(stream.encode())


def audio_file(samples: "NDArray[np.float32]", rate: int, form: str = "wav") -> bytes:
    """float32 (channels, samples) in -1..1, in 16 bits a sample: wav, flac, or pcm (no header)."""
    import numpy as np

    words = (np.clip(samples, -1.0, 1.0).T * 32767).astype("<i2")
    if form == "pcm":
        return words.tobytes()
    out = io.BytesIO()
    if form == "flac":
        import soundfile

        soundfile.write(out, words, rate, format="FLAC", subtype="PCM_16")
        return out.getvalue()
    import wave

    with wave.open(out, "wb") as file:
        file.setnchannels(words.shape[1])
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(words.tobytes())
    return out.getvalue()


def tensor_file(array: "NDArray[np.generic]", form: str = "npy", name: str = "latents") -> bytes:
    """Any array as npy, or as safetensors under `name`."""
    import numpy as np

    if form == "safetensors":
        from safetensors.numpy import save

        return bytes(save({name: np.ascontiguousarray(array)}))
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def form_of_suffix(kind: Kind, suffix: str) -> str | None:
    """The name of the form that files with that suffix have, or None if the kind has none such."""
    name = suffix.lower().removeprefix(".")
    name = {"jpg": "jpeg"}.get(name, name)
    return name if any(form.name == name for form in FORMS[kind]) else None


def kinds_of_suffix(suffix: str) -> Sequence[Kind]:
    """The kinds of output that files with that suffix can hold."""
    return [kind for kind in FORMS if form_of_suffix(kind, suffix) is not None]
