"""Edits, streams of images, videos, sound and latents, called by the real client where it has a call for them."""

import base64
import io
import json

import httpx
import msgspec
import numpy as np
import pytest
from openai import OpenAI
from PIL import Image

from omni.api.uploads import MAX_PARTS, read_form
from omni.outputs import AudioOutput, ImageOutput, Output, TensorOutput, VideoOutput
from proto.deploy import Deploy, Kind
from proto.errors import InvalidRequest, StageFailed
from tests.api import cases
from tests.api.cases import BadBody, average_colour, check_refused, picture, png
from tests.api.fake_pipeline import INFOS, PAINTER, Server, only, serving, two_stages

EDITS, VIDEOS, AUDIO, LATENTS = (
    f"/v1/{name}" for name in ("images/edits", "videos/generations", "audio/generations", "latents/generations")
)
FILM = VideoOutput(np.arange(2 * 5 * 16 * 24 * 3).astype(np.uint8).reshape(2, 5, 16, 24, 3), 8.0, (7, 8))
TONE = AudioOutput(np.sin(np.arange(400, dtype=np.float32) / 5).reshape(1, 2, 200), 8000, (7,))
RAW = TensorOutput(np.arange(16, dtype=np.float32).reshape(1, 4, 2, 2))


def painter(kind: Kind) -> Deploy:
    """One stage, which gives outputs of that kind."""
    deploy = only("painter", two_stages())
    stage = msgspec.structs.replace(deploy.stages[PAINTER], output=kind)
    return msgspec.structs.replace(deploy, stages={PAINTER: stage})


def gives(server: Server, output: Output, *parts: Output, **info: object) -> None:
    def change(pipeline) -> None:  # type: ignore[no-untyped-def]
        pipeline.output, pipeline.parts = output, list(parts)
        pipeline.infos = {PAINTER: msgspec.structs.replace(INFOS[PAINTER], **info)}

    server.call(change)


def post(server: Server, route: str, **body: object) -> httpx.Response:
    answer = httpx.post(server.url + route, json={"prompt": "x", **body}, timeout=cases.PATIENCE_S)
    assert answer.status_code == 200, answer.text
    return answer


def events_of(text: str) -> list[dict[str, object]]:
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]


# --- edits ------------------------------------------------------------------------------------------------------------


def test_an_edit_with_files_reaches_the_stage_as_pictures_and_mask(server: Server, ai: OpenAI) -> None:
    gives_mask(server)
    mask = Image.new("L", (16, 8), 0)
    mask.paste(255, (8, 0, 16, 8))
    out = io.BytesIO()
    mask.save(out, "png")
    answer = ai.images.edit(
        image=("a.png", png((10, 20, 30))),
        mask=("m.png", out.getvalue()),
        prompt="a red sofa",
        n=1,
        size="64x32",
        model="demo",
        output_format="png",
        extra_body={"strength": 0.5, "seed": 4, "extra": {"true_cfg_scale": 2.5}},
    )
    (request,) = server.call(lambda pipeline: pipeline.seen)
    assert request.prompt == "a red sofa"
    assert request.images is not None
    assert request.mask is not None
    assert [image.shape for image in request.images] == [(8, 16, 3)]
    assert request.mask[:, :8].max() == 0
    assert request.mask[:, 8:].min() == 255
    assert request.params[PAINTER] == {
        "width": 64,
        "height": 32,
        "strength": 0.5,
        "seed": 4,
        "num_images": 1,
        "extra": {"true_cfg_scale": 2.5},
    }
    assert answer.data is not None
    assert average_colour(picture(answer.data[0].b64_json or "")) == (245, 235, 225)


def gives_mask(server: Server) -> None:
    def change(pipeline) -> None:  # type: ignore[no-untyped-def]
        info = INFOS[PAINTER]
        inputs = (*info.inputs, "mask_image")
        pipeline.infos = {
            **pipeline.infos,
            PAINTER: msgspec.structs.replace(info, inputs=inputs, accepts=("true_cfg_scale",)),
        }

    server.call(change)


def test_several_files_are_several_images_of_their_own_sizes(server: Server, ai: OpenAI) -> None:
    files = [("a.png", png()), ("b.png", png((9, 9, 9), size=(4, 20)))]
    server.call(lambda pipeline: setattr(pipeline, "output", ImageOutput(np.zeros((1, 8, 8, 3), np.uint8))))
    ai.images.edit(image=files, prompt="both")
    (request,) = server.call(lambda pipeline: pipeline.seen)
    assert request.images is not None
    assert [image.shape for image in request.images] == [(8, 16, 3), (20, 4, 3)]
    assert request.mask is None


def test_transparency_is_the_mask_where_none_is_sent(server: Server, ai: OpenAI) -> None:
    gives_mask(server)
    see_through = Image.new("RGBA", (16, 8), (1, 2, 3, 255))
    see_through.putpixel((0, 0), (1, 2, 3, 0))
    out = io.BytesIO()
    see_through.save(out, "png")
    ai.images.edit(image=("a.png", out.getvalue()), prompt="x")
    ai.images.edit(image=("a.png", png()), mask=("m.png", out.getvalue()), prompt="x")
    for request in server.call(lambda pipeline: pipeline.seen):
        assert request.mask is not None
        assert (request.mask[0, 0], int(request.mask.sum())) == (255, 255)


def test_an_edit_may_be_json_with_data_urls(server: Server) -> None:
    url = "data:image/png;base64," + base64.b64encode(png((10, 20, 30))).decode()
    for image in (url, {"image_url": url}, [{"image_url": {"url": url}}]):
        answer = post(server, EDITS, image=image)
        assert average_colour(picture(answer.json()["data"][0]["b64_json"])) == (245, 235, 225)


@pytest.mark.parametrize(
    ("files", "data", "param"),
    [
        ({"image": b"no picture"}, {"prompt": "x"}, "image"),
        ({"image": png()}, {}, "prompt"),
        ({}, {"prompt": "x", "image": "http://127.0.0.1/x.png"}, "image"),
        ({"image": png()}, {"prompt": "x", "n": "many"}, "n"),
        ({"image": png()}, {"prompt": "x", "steps": "0"}, "steps"),
        ({"image": png(), "mask": png()[:40]}, {"prompt": "x"}, "mask"),
        ({"image": png(), "mask": png(size=(8, 8))}, {"prompt": "x"}, "mask"),
        ({"image": png()}, {"prompt": "x", "quality": "high"}, "quality"),
        ({"image": png()}, {"prompt": "x", "colour": "red"}, "colour"),
        ({"prompt": b"\xff\xfe", "image": png()}, {}, "prompt"),
        ({"quality": b"\xff", "image": png()}, {"prompt": "x"}, "quality"),
    ],
)
def test_a_bad_form_is_refused_by_field(
    server: Server, files: dict[str, bytes], data: dict[str, str], param: str
) -> None:
    gives_mask(server)
    parts: list[tuple[str, tuple[str | None, bytes]]] = [(name, ("f", value)) for name, value in files.items()]
    parts += [(name, (None, value.encode())) for name, value in data.items()]
    answer = httpx.post(server.url + EDITS, files=parts, timeout=cases.PATIENCE_S)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert server.call(lambda pipeline: pipeline.seen) == []


def test_an_edit_without_a_picture_says_so(server: Server) -> None:
    assert "picture to edit" in check_refused(server.url, EDITS, BadBody({"prompt": "x"}, "image"))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "form"),
        (b"--b\r\n\r\nx", "no whole form"),
        (b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n', "no whole form"),
        (b"--b\r\nContent-Disposition: form-data\r\n\r\n1\r\n--b--\r\n", "no name"),
        (b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\n\xff\r\n--b--\r\n', "no text"),
        (b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n' * (MAX_PARTS + 1) + b"--b--\r\n", "more than"),
        (b"--b\r\n" + b"x" * 100_000, "no whole form"),
    ],
)
def test_what_is_no_form_is_refused(body: bytes, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        read_form(body, "multipart/form-data; boundary=b")
    with pytest.raises(InvalidRequest, match="no boundary"):
        read_form(body, "multipart/form-data")


def test_a_form_that_is_too_large_is_refused_like_any_body(server: Server) -> None:
    answer = httpx.post(server.url + EDITS, files={"image": b"x" * (300 << 10)}, data={"prompt": "x"})
    assert answer.status_code == 413


# --- streams of images ------------------------------------------------------------------------------------------------


def test_a_stream_has_partial_images_and_then_the_image(server: Server, ai: OpenAI) -> None:
    events = list(ai.images.generate(prompt="#ff8000", stream=True, partial_images=2, extra_body={"seed": 5}))
    assert [event.type for event in events] == [
        *("image_generation.partial_image", "image_generation.partial_image", "image_generation.completed"),
    ]
    assert [event.partial_image_index for event in events[:2]] == [0, 1]  # type: ignore[union-attr]
    assert picture(events[0].b64_json).size == (6, 4)
    assert average_colour(picture(events[-1].b64_json)) == (255, 128, 0)
    assert events[-1].model_dump()["seed"] == 5
    (request,) = server.call(lambda pipeline: pipeline.seen)
    assert request.params[PAINTER]["previews"] == 2


def test_a_stream_of_an_edit_has_its_own_names(server: Server, ai: OpenAI) -> None:
    events = list(ai.images.edit(image=("a.png", png()), prompt="x", stream=True, partial_images=1))
    assert [event.type for event in events] == ["image_edit.partial_image", "image_edit.completed"]


def test_each_of_several_images_is_completed(server: Server, ai: OpenAI) -> None:
    events = list(ai.images.generate(prompt="x", n=3, stream=True))
    assert [(event.type, event.model_dump().get("index", 0)) for event in events] == [
        ("image_generation.completed", k) for k in range(3)
    ]


def test_a_stream_that_fails_before_its_first_event_has_a_status_and_after_it_an_event(
    server: Server, ai: OpenAI
) -> None:
    def fail(pipeline) -> None:  # type: ignore[no-untyped-def]
        pipeline.fail_after = (0, StageFailed("it broke", stage="painter"))
        pipeline.infos = {PAINTER: INFOS[PAINTER]}
        pipeline._deploy = only("painter", two_stages())

    with serving(painter(Kind.IMAGE)) as broken:
        broken.call(fail)
        answer = httpx.post(broken.url + cases.IMAGES, json={"prompt": "x", "stream": True})
        assert answer.status_code == 500
        answer = httpx.post(broken.url + cases.IMAGES, json={"prompt": "x", "stream": True, "partial_images": 1})
        assert answer.status_code == 200
        *_, last = events_of(answer.text)
        assert "it broke" in last["error"]["message"]  # type: ignore[index]


# --- videos, sound, latents -------------------------------------------------------------------------------------------


def test_videos_come_as_files_with_their_seeds_and_frame_rate() -> None:
    with serving(painter(Kind.VIDEO)) as server:
        gives(server, FILM, accepts=("num_frames", "fps"), fps=8.0, frame_step=4)
        answer = post(server, VIDEOS, n=2, num_frames=5, output_format="gif").json()
        assert [item["seed"] for item in answer["data"]] == [7, 8]
        assert (answer["size"], answer["fps"], answer["frames"], answer["output_format"]) == ("24x16", 8.0, 5, "gif")
        for item in answer["data"]:
            assert Image.open(io.BytesIO(base64.b64decode(item["b64_json"]))).format == "GIF"
        (request,) = server.call(lambda pipeline: pipeline.seen)
        assert request.params[PAINTER] == {"num_images": 2, "extra": {"num_frames": 5}}


def test_seconds_are_the_frames_that_the_pipeline_can_make_of_them() -> None:
    with serving(painter(Kind.VIDEO)) as server:
        gives(server, FILM, accepts=("num_frames", "fps"), fps=8.0, frame_step=4)
        post(server, VIDEOS, seconds=2)
        post(server, VIDEOS, seconds=2, fps=12)
        asked = [request.params[PAINTER]["extra"] for request in server.call(lambda pipeline: pipeline.seen)]
        assert asked == [{"num_frames": 17}, {"fps": 12, "num_frames": 25}]
        check_refused(server.url, VIDEOS, BadBody({"prompt": "x", "seconds": 1, "num_frames": 9}, "seconds"))
        gives(server, FILM, accepts=())
        check_refused(server.url, VIDEOS, BadBody({"prompt": "x", "seconds": 1}, "seconds"))


def test_a_file_is_the_whole_answer_where_it_is_asked_for() -> None:
    with serving(painter(Kind.VIDEO)) as server:
        gives(server, FILM)
        answer = post(server, VIDEOS, response_format="file")
        assert answer.headers["content-type"] == "video/mp4"
        assert answer.headers["x-seed"] == "7"
        assert answer.headers["content-disposition"].endswith('.mp4"')
        assert answer.content[4:8] == b"ftyp"
        check_refused(server.url, VIDEOS, BadBody({"prompt": "x", "n": 2, "response_format": "file"}, "n"))
        check_refused(server.url, VIDEOS, BadBody({"prompt": "x", "output_format": "avi"}, "output_format"))


def test_a_form_that_needs_an_extra_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omni.encoding.find_spec", lambda name: None)
    with serving(painter(Kind.VIDEO)) as server:
        gives(server, FILM)
        words = check_refused(server.url, VIDEOS, BadBody({"prompt": "x", "output_format": "mp4"}, "output_format"))
        assert "pip install 'omni-pipeline[video]'" in words
        assert server.call(lambda pipeline: pipeline.seen) == []
        assert post(server, VIDEOS).json()["output_format"] == "webp"


def test_pieces_of_a_video_are_sent_as_they_come() -> None:
    pieces = [VideoOutput(FILM.array[:1, at : at + 2], 8.0) for at in (0, 2)]
    with serving(painter(Kind.VIDEO)) as server:
        gives(server, FILM, *pieces)
        answer = post(server, VIDEOS, stream=True, output_format="webp")
        told = events_of(answer.text)
        assert [event["type"] for event in told] == [
            *("video_generation.partial_video", "video_generation.partial_video"),
            *("video_generation.completed", "video_generation.completed"),
        ]
        assert [event.get("append") for event in told] == [True, True, None, None]
        frames = [Image.open(io.BytesIO(base64.b64decode(str(event["b64_json"])))).n_frames for event in told]
        assert frames == [2, 2, 5, 5]


@pytest.mark.parametrize("form", ["wav", "flac"])
def test_sound_comes_as_a_file_of_its_form(form: str) -> None:
    with serving(painter(Kind.AUDIO)) as server:
        gives(server, TONE, accepts=("audio_end_in_s",))
        answer = post(server, AUDIO, seconds=1.5, output_format=form).json()
        assert (answer["sample_rate"], answer["seconds"], answer["data"][0]["seed"]) == (8000, 0.025, 7)
        assert base64.b64decode(answer["data"][0]["b64_json"])[:4] == {"wav": b"RIFF", "flac": b"fLaC"}[form]
        (request,) = server.call(lambda pipeline: pipeline.seen)
        assert request.params[PAINTER] == {"extra": {"audio_end_in_s": 1.5}}


def test_latents_come_with_their_shape_and_keep_every_bit() -> None:
    with serving(painter(Kind.LATENTS)) as server:
        gives(server, RAW)
        answer = post(server, LATENTS).json()
        assert (answer["shape"], answer["dtype"], answer["output_format"]) == ([1, 4, 2, 2], "float32", "npy")
        loaded = np.load(io.BytesIO(base64.b64decode(answer["data"][0]["b64_json"])))
        assert np.array_equal(loaded, RAW.array)
        whole = post(server, LATENTS, output_format="safetensors", response_format="file")
        assert whole.headers["content-type"] == "application/octet-stream"


def test_a_route_says_which_stage_it_would_need(server: Server) -> None:
    for route, kind in ((VIDEOS, "video"), (AUDIO, "audio"), (LATENTS, "latents")):
        answer = httpx.post(server.url + route, json={"prompt": "x"})
        assert answer.status_code == 400
        assert f"`output: {kind}`" in answer.json()["error"]["message"]


def test_a_stage_that_gives_another_kind_than_it_said_fails_the_request() -> None:
    with serving(painter(Kind.VIDEO)) as server:
        gives(server, ImageOutput(np.zeros((1, 8, 8, 3), np.uint8)))
        answer = httpx.post(server.url + VIDEOS, json={"prompt": "x"})
        assert answer.status_code == 500
        assert "gave no video" in answer.json()["error"]["message"]


def test_a_mask_that_no_stage_takes_is_refused(server: Server) -> None:
    body: dict[str, object] = {"prompt": "x", "image": cases.PNG, "mask": cases.PNG}
    assert "no stage of this request takes a mask" in check_refused(server.url, EDITS, BadBody(body, "mask"))
