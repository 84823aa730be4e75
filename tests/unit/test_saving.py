"""Every kind of output becomes a file of its kind, and no output overwrites another."""

import wave
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

from launch.saving import check_target, save_outputs
from omni import encoding
from omni.outputs import (
    AudioOutput,
    ImageOutput,
    Output,
    RequestOutput,
    StageDone,
    TensorOutput,
    TextOutput,
    TokensOutput,
    VideoOutput,
)
from proto.errors import InvalidRequest
from proto.ids import RequestId, StageName
from proto.messages import Timings, Usage


def result(**outputs: Output | None) -> RequestOutput:
    """What stages of those names gave."""
    request = RequestId("r")
    stages = {
        StageName(name): StageDone(request, StageName(name), output, "stop", Usage(), Timings())
        for name, output in outputs.items()
    }
    return RequestOutput(request, stages, 1.0)


def pixels(count: int, channels: int = 3) -> np.ndarray:
    return np.arange(count * 4 * 6 * channels, dtype=np.uint8).reshape(count, 4, 6, channels)


def saved(done: RequestOutput, target: Path) -> list[str]:
    """Names of the files, all of which are there and no others."""
    paths = save_outputs(done, target)
    assert sorted(paths) == sorted(target.parent.iterdir())
    return [path.name for path in paths]


def test_words_and_picture_take_the_stem_and_the_suffix_of_their_kind(tmp_path: Path) -> None:
    done = result(thinker=TextOutput("a 🌟"), painter=ImageOutput(pixels(1)))
    assert saved(done, tmp_path / "out.png") == ["out.txt", "out.png"]
    assert (tmp_path / "out.txt").read_text("utf-8") == "a 🌟\n"
    assert np.array_equal(np.asarray(Image.open(tmp_path / "out.png")), pixels(1)[0])


@pytest.mark.parametrize("name", ["out", "out.txt", "out.wav", "OUT.PNG"])
def test_any_target_gives_a_png(tmp_path: Path, name: str) -> None:
    (only,) = saved(result(painter=ImageOutput(pixels(1))), tmp_path / name)
    assert only == f"{Path(name).stem}.png"


@pytest.mark.parametrize(
    ("suffix", "form"), [(".jpg", "JPEG"), (".jpeg", "JPEG"), (".webp", "WEBP"), (".WEBP", "WEBP")]
)
def test_target_chooses_the_form_of_pictures(tmp_path: Path, suffix: str, form: str) -> None:
    (only,) = saved(result(painter=ImageOutput(pixels(1, channels=4))), tmp_path / f"out{suffix}")
    assert only == f"out{suffix.lower()}"
    assert Image.open(tmp_path / only).format == form


def test_several_pictures_are_numbered(tmp_path: Path) -> None:
    names = saved(result(painter=ImageOutput(pixels(3))), tmp_path / "out.png")
    assert names == ["out-1.png", "out-2.png", "out-3.png"]
    assert np.array_equal(np.asarray(Image.open(tmp_path / "out-3.png")), pixels(3)[2])


def test_second_stage_with_the_same_kind_adds_its_name(tmp_path: Path) -> None:
    done = result(
        thinker=TextOutput("a"), critic=TextOutput("b"), one=ImageOutput(pixels(2)), two=ImageOutput(pixels(2))
    )
    assert saved(done, tmp_path / "out.png") == [
        *("out.txt", "out-critic.txt", "out-1.png", "out-2.png", "out-two-1.png", "out-two-2.png"),
    ]
    assert (tmp_path / "out-critic.txt").read_text() == "b\n"


def test_stages_without_an_output_leave_no_file(tmp_path: Path) -> None:
    assert saved(result(thinker=None, painter=ImageOutput(pixels(1))), tmp_path / "out.png") == ["out.png"]


def test_sound_is_a_wav(tmp_path: Path) -> None:
    tone = np.stack([np.linspace(-2, 2, 100), np.zeros(100)])[None].astype(np.float32)
    assert saved(result(speaker=AudioOutput(tone, 16000)), tmp_path / "out.png") == ["out.wav"]
    with wave.open(str(tmp_path / "out.wav")) as file:
        assert (file.getnchannels(), file.getframerate(), file.getnframes()) == (2, 16000, 100)
        samples = np.frombuffer(file.readframes(100), "<i2").reshape(100, 2)
    assert (samples[0, 0], samples[-1, 0], samples[50, 1]) == (-32767, 32767, 0)


def test_tensors_and_tokens_are_kept_whole(tmp_path: Path) -> None:
    latents = np.ones((1, 4, 2, 2), np.float32)
    done = result(b=TensorOutput(latents), c=TokensOutput((3, 1)))
    assert saved(done, tmp_path / "out.png") == ["out.npy", "out.tokens.txt"]
    assert np.array_equal(np.load(tmp_path / "out.npy"), latents)
    assert (tmp_path / "out.tokens.txt").read_text() == "3 1\n"


def test_the_suffix_is_the_form_of_the_outputs_that_have_it(tmp_path: Path) -> None:
    film = np.arange(2304).astype(np.uint8).reshape(1, 3, 16, 16, 3)
    film[0, 1] += 50
    film[0, 2] += 100
    done = result(a=VideoOutput(film, 8.0), b=AudioOutput(np.zeros((1, 1, 50), np.float32), 8000))
    for target, names in (
        ("x.mp4", ["x.mp4", "x.wav"]),
        ("y.gif", ["y.gif", "y.wav"]),
        ("z.flac", ["z.mp4", "z.flac"]),
    ):
        folder = tmp_path / target
        assert saved(done, folder / target) == names
    assert Image.open(tmp_path / "y.gif" / "y.gif").n_frames == 3
    latents = result(a=TensorOutput(np.ones((2, 2), np.float16)))
    (only,) = save_outputs(latents, tmp_path / "l.safetensors")
    assert load_file(only)["latents"].tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize(
    ("target", "module", "words"),
    [
        ("x.mp4", "av", r"mp4 needs PyAV.*pip install 'omni-pipeline\[video\]'.*webp, gif"),
        ("x.flac", "soundfile", "wav"),
    ],
)
def test_a_form_that_needs_an_extra_is_refused_before_work_with_the_remedy(
    target: str, module: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "find_spec", lambda name: None if name == module else object())
    with pytest.raises(InvalidRequest, match=words) as refusal:
        check_target(tmp_path / target)
    assert refusal.value.info.field == "save"
    film = result(a=VideoOutput(np.arange(768, dtype=np.uint8).reshape(1, 4, 8, 8, 3), 8.0))
    (only,) = save_outputs(film, tmp_path / "out.png")
    assert only.suffix == (".webp" if module == "av" else ".mp4")


def test_folder_is_made_and_old_files_are_replaced(tmp_path: Path) -> None:
    target = tmp_path / "new" / "folder" / "out.txt"
    for words in ("first", "second"):
        assert save_outputs(result(thinker=TextOutput(words)), target) == [target]
    assert target.read_text() == "second\n"


def test_a_file_that_could_not_be_saved_is_refused_with_the_reason(tmp_path: Path) -> None:
    check_target(tmp_path / "new" / "folder" / "out.png")
    assert (tmp_path / "new" / "folder").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match=r"--save '.*out\.png': File exists: '.*file'") as refusal:
        check_target(tmp_path / "file" / "out.png")
    assert refusal.value.info.field == "save"


@pytest.mark.parametrize(
    "target", ["", ".", "..", "/", "folder", "folder/", "folder/..", "x" * 250, "a\0b", "/proc/out.png"]
)
def test_what_is_no_name_of_a_file_or_in_no_folder_of_files_is_refused(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    with pytest.raises(InvalidRequest, match="--save") as refusal:
        check_target(Path(target))
    assert refusal.value.info.field == "save"
    assert len(str(refusal.value)) < 600
    assert [one.name for one in tmp_path.rglob("*")] == ["folder"]


def test_a_file_that_can_be_saved_is_not_touched_yet(tmp_path: Path) -> None:
    (tmp_path / "out.png").write_text("from before")
    check_target(tmp_path / "out.png")
    assert [one.name for one in tmp_path.iterdir()] == ["out.png"]
    assert (tmp_path / "out.png").read_text() == "from before"
