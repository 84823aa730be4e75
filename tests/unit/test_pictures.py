"""Whatever callers give as a picture is the same array, or is refused by field before it is unpacked."""

import base64
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from omni import pictures
from omni.pictures import read_mask, read_pictures
from proto.errors import InvalidRequest

PIXELS = np.random.default_rng(0).integers(0, 256, (8, 12, 3), dtype=np.uint8)


def file(image: Image.Image, form: str = "png", **more: object) -> bytes:
    out = io.BytesIO()
    image.save(out, form, **more)  # type: ignore[arg-type]
    return out.getvalue()


def test_every_way_to_give_a_picture_is_the_same_picture(tmp_path: Path) -> None:
    image = Image.fromarray(PIXELS)
    data = file(image)
    (tmp_path / "a.png").write_bytes(data)
    text = base64.b64encode(data).decode()
    ways = [image, PIXELS, data, text, f"data:image/png;base64,{text}", f"data:;base64,{text}", tmp_path / "a.png"]
    for way in ways:
        (read,) = read_pictures(way)
        assert np.array_equal(read, PIXELS)
    assert all(np.array_equal(read, PIXELS) for read in read_pictures(ways))
    assert len(read_pictures(np.stack([PIXELS, PIXELS]))) == 2


@pytest.mark.parametrize("mode", ["L", "P", "CMYK", "1", "I;16", "RGBA", "LA"])
def test_any_mode_becomes_rgb_and_keeps_alpha_only_where_it_shows(mode: str) -> None:
    opaque = Image.fromarray(PIXELS).convert(mode) if mode != "I;16" else Image.new(mode, (12, 8), 40_000)
    assert read_pictures(opaque)[0].shape == (8, 12, 3)
    if mode in ("RGBA", "LA"):
        opaque.putalpha(100)
        assert read_pictures(opaque)[0].shape == (8, 12, 4)


def test_a_photo_that_was_turned_is_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    data = file(Image.fromarray(PIXELS), "jpeg", exif=exif)
    assert read_pictures(data)[0].shape == (12, 8, 3)


@pytest.mark.parametrize("turn", range(1, 9))
def test_each_way_to_turn_a_photo_is_pils_own(turn: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = turn
    data = file(Image.fromarray(PIXELS), exif=exif)
    assert np.array_equal(read_pictures(data)[0], ImageOps.exif_transpose(Image.open(io.BytesIO(data))))


def test_damaged_exif_does_not_spoil_a_photo_and_other_damage_is_refused() -> None:
    """Each byte of three small files in turn is damaged, and none of it raises anything but a refusal."""
    exif = Image.Exif()
    exif[0x0112], exif[0x011A] = 6, 72.0
    whole = file(Image.fromarray(PIXELS), "jpeg", exif=exif)
    with_a_text = whole.replace(b"\x01\x1a\x00\x05", b"\x01\x1a\x00\x02")  # a resolution that is words
    assert with_a_text != whole
    assert read_pictures(with_a_text)[0].shape == (12, 8, 3)
    for form in ("png", "jpeg", "webp"):
        data = file(Image.fromarray(PIXELS), form, exif=exif)
        for at in range(len(data)):
            try:
                read_pictures(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
            except InvalidRequest as refusal:
                assert refusal.info.field == "image"  # noqa: PT017 - most damage may as well go unseen


def test_sixteen_bits_of_grey_keep_their_shades() -> None:
    grey = np.linspace(0, 65535, 96).astype(np.uint16).reshape(8, 12)
    data = file(Image.fromarray(grey))
    assert np.array_equal(read_pictures(data)[0][:, :, 1], grey >> 8)
    assert np.array_equal(read_mask(data), grey >> 8)
    assert np.array_equal(read_pictures(Image.fromarray(grey))[0][:, :, 0], grey >> 8)


def test_a_mask_is_its_transparency_or_else_its_white() -> None:
    grey = Image.fromarray(np.arange(96, dtype=np.uint8).reshape(8, 12))
    assert np.array_equal(read_mask(file(grey)), np.asarray(grey))
    coloured = Image.fromarray(PIXELS).convert("RGBA")
    coloured.putalpha(grey)
    assert np.array_equal(read_mask(coloured), 255 - np.asarray(grey))
    assert np.array_equal(read_mask(np.asarray(grey)), np.asarray(grey))
    assert read_mask(PIXELS).shape == (8, 12)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (b"", "not a whole png"),
        (b"GIF89a" * 20, "not a whole png"),
        (file(Image.fromarray(PIXELS))[:60], "not a whole png"),
        ("", "not a whole png"),
        ("%%%", "not base64"),
        ("data:text/html;base64,AAAA", "not base64"),
        ("http://127.0.0.1/a.png", "URLs are not fetched"),
        ("FILE:///etc/passwd", "URLs are not fetched"),
        (Path("no/such/file.png"), "No such file"),
        (7, "a int is no picture"),
        (None, "a NoneType is no picture"),
    ],
)
def test_what_is_no_picture_is_refused_by_field_and_place(given: object, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as refusal:
        read_pictures([PIXELS, given], "photo")  # type: ignore[list-item]
    assert refusal.value.info.field == "photo[1]"


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_pictures_that_unpack_to_too_much_are_refused_before_that(monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = file(Image.new("1", (16384, 8192)))
    with pytest.raises(InvalidRequest, match="16384x8192 pixels is too large"):
        read_pictures(bomb)
    with pytest.raises(InvalidRequest, match="20000x1 pixels is too large"):
        read_pictures(file(Image.new("L", (20000, 1))))
    monkeypatch.setattr(pictures, "MAX_PIXELS", 200)
    one = file(Image.fromarray(PIXELS))  # 96 pixels
    assert len(read_pictures([one, one])) == 2
    with pytest.raises(InvalidRequest, match="together 200 pixels") as refusal:
        read_pictures([one, one, one])
    assert refusal.value.info.field == "image[2]"
