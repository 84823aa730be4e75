"""Files that are made can be read again, and say what went in."""

import io
from pathlib import Path

import av
import numpy as np
import pytest
import soundfile
from PIL import Image
from safetensors.numpy import load

from omni.encoding import FORMS
from omni.outputs import AudioOutput, ImageOutput, TensorOutput, VideoOutput
from proto.deploy import Kind
from proto.errors import InvalidRequest


def film(width: int = 32, height: int = 16, frames: int = 6) -> np.ndarray:
    """A bright bar that moves over a dark ground."""
    pixels = np.full((1, frames, height, width, 3), 40, np.uint8)
    for at in range(frames):
        pixels[0, at, :, 4 * at : 4 * at + 4] = 220
    return pixels


def brightest_column(frame: np.ndarray) -> int:
    return int(frame.astype(int).sum(axis=(0, 2)).argmax())


@pytest.mark.parametrize(("width", "height"), [(32, 16), (31, 15)])
def test_an_mp4_has_the_frames_at_their_times(width: int, height: int) -> None:
    data = VideoOutput(film(width, height), 12.5).encode(form="mp4")
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.video[0]
        assert float(stream.average_rate) == 12.5
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
    assert len(frames) == 6
    assert frames[0].shape == (height + height % 2, width + width % 2, 3)
    assert [brightest_column(frame) // 4 for frame in frames] == list(range(6))


@pytest.mark.parametrize("form", ["webp", "gif"])
def test_an_animation_needs_no_library_more(form: str) -> None:
    data = VideoOutput(film(), 10.0).encode(form=form)
    image = Image.open(io.BytesIO(data))
    assert (image.format, image.n_frames, image.size) == (form.upper(), 6, (32, 16))
    for at in range(6):
        image.seek(at)
        assert brightest_column(np.asarray(image.convert("RGB"))) // 4 == at
    assert image.info["duration"] == 100


@pytest.mark.parametrize("form", ["wav", "flac"])
def test_sound_keeps_its_samples_rate_and_channels(form: str) -> None:
    tone = np.stack([np.sin(np.arange(800) / 9), np.linspace(-1, 1, 800)])[None].astype(np.float32)
    read, rate = soundfile.read(io.BytesIO(AudioOutput(tone, 8000).encode(form=form)), dtype="float32")
    assert rate == 8000
    assert np.abs(read.T - tone[0]).max() < 1e-4


def test_pcm_is_the_samples_alone() -> None:
    data = AudioOutput(np.array([[[0.0, 1.0], [-1.0, 0.5]]], np.float32), 8000).encode(form="pcm")
    assert np.frombuffer(data, "<i2").tolist() == [0, -32767, 32767, 16383]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int64])
def test_tensors_keep_every_bit(dtype: type) -> None:
    array = np.arange(24).reshape(2, 3, 4).astype(dtype)
    output = TensorOutput(array)
    assert np.array_equal(np.load(io.BytesIO(output.encode(form="npy"))), array)
    assert np.array_equal(load(output.encode(form="safetensors"))["latents"], array)


def test_save_takes_the_form_from_the_suffix(tmp_path: Path) -> None:
    output = ImageOutput(np.zeros((2, 4, 6, 4), np.uint8))
    for suffix, form in ((".png", "PNG"), (".jpg", "JPEG"), (".WEBP", "WEBP")):
        path = output.save(tmp_path / f"x{suffix}", index=1)
        assert Image.open(path).format == form
    with pytest.raises(InvalidRequest, match="image is not written as 'mp4', but as: png, jpeg, webp"):
        output.save(tmp_path / "x.mp4")
    assert not (tmp_path / "x.mp4").exists()


def test_every_kind_has_a_form_that_needs_nothing_more() -> None:
    assert set(FORMS) == {Kind.IMAGE, Kind.VIDEO, Kind.AUDIO, Kind.LATENTS}
    assert all(any(form.module is None for form in forms) for forms in FORMS.values())
