"""Videos as jobs, made, polled, fetched, listed and deleted by OpenAI's client."""

from collections.abc import Iterator

import msgspec
import numpy as np
import openai
import pytest
from openai import OpenAI

from omni.outputs import ImageOutput, VideoOutput
from proto.deploy import ApiSpec, Kind
from proto.errors import StageFailed
from proto.ids import StageName
from tests.api.cases import BadBody, check_refused, client, png
from tests.api.fake_pipeline import INFOS, PAINTER, Server, serving
from tests.api.test_media import FILM, painter

pytestmark = pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")  # of OpenAI's own servers


@pytest.fixture
def studio() -> Iterator[Server]:
    """Room for two films of one item."""
    api = ApiSpec(port=0, job_bytes=12_000)
    with serving(msgspec.structs.replace(painter(Kind.VIDEO), api=api)) as server:
        info = msgspec.structs.replace(INFOS[PAINTER], accepts=("num_frames",), fps=8.0, frame_step=4)

        def prepare(pipeline) -> None:  # type: ignore[no-untyped-def]
            pipeline.output = FILM
            pipeline.infos = {PAINTER: info}

        server.call(prepare)
        yield server


@pytest.fixture
def ai(studio: Server) -> Iterator[OpenAI]:
    with client(studio.url) as ai:
        yield ai


def test_a_video_is_made_polled_and_fetched(studio: Server, ai: OpenAI) -> None:
    made = ai.videos.create(
        prompt="waves",
        model="demo",  # type: ignore[arg-type]
        seconds="4",
        size="64x32",  # type: ignore[arg-type]
        input_reference=("a.png", png()),
    )
    done = ai.videos.poll(made.id, poll_interval_ms=10)
    assert (done.status, done.progress, done.prompt, done.model) == ("completed", 100, "waves", "demo")
    assert (done.size, done.seconds) == ("24x16", "0.625")
    assert done.completed_at is not None
    assert done.expires_at == done.completed_at + 3600
    assert ai.videos.download_content(done.id).read()[4:8] == b"ftyp"
    (request,) = studio.call(lambda pipeline: pipeline.seen)
    assert request.images is not None
    assert request.params[PAINTER] == {"width": 64, "height": 32, "extra": {"num_frames": 33}}


def test_a_running_video_says_how_far_it_is_and_is_deleted_with_its_request(studio: Server, ai: OpenAI) -> None:
    studio.close_gate()
    made = ai.videos.create(prompt="waves")
    studio.until(lambda pipeline: pipeline.running == 1)
    seen = ai.videos.retrieve(made.id)
    assert (seen.status, seen.progress) == ("in_progress", 50)
    with pytest.raises(openai.ConflictError, match="in_progress"):
        ai.videos.download_content(made.id)
    assert ai.videos.delete(made.id).deleted
    studio.until(lambda pipeline: (pipeline.running, pipeline.aborted) == (0, 1))
    with pytest.raises(openai.NotFoundError, match="there is no video"):
        ai.videos.retrieve(made.id)


def test_what_is_wrong_is_refused_when_it_is_asked_for(studio: Server, ai: OpenAI) -> None:
    for body, param in (
        ({"prompt": "x", "size": "65x32"}, "size"),
        ({"prompt": "x", "seconds": "long"}, "seconds"),
        ({"prompt": "x", "input_reference": {"file_id": "file-1"}}, "input_reference"),
        ({"prompt": "x", "input_reference": {"image_url": "http://127.0.0.1/x.png"}}, "input_reference"),
    ):
        check_refused(studio.url, "/v1/videos", BadBody(body, param))
    with pytest.raises(openai.BadRequestError, match="prompt is empty"):
        ai.videos.create(prompt=" ")
    assert ai.videos.list().data == []


def test_a_video_that_fails_later_is_a_failed_job(studio: Server, ai: OpenAI) -> None:
    studio.close_gate()
    made = ai.videos.create(prompt="waves")
    studio.until(lambda pipeline: pipeline.running == 1)

    def fail(pipeline) -> None:  # type: ignore[no-untyped-def]
        pipeline.fail_after = (0, StageFailed("it broke", stage=StageName("painter")))
        pipeline.gate.set()

    studio.call(fail)
    done = ai.videos.poll(made.id, poll_interval_ms=10)
    assert done.status == "failed"
    assert done.error is not None
    assert (done.error.code, "it broke" in done.error.message) == ("stage_failed", True)
    with pytest.raises(openai.ConflictError, match="failed"):
        ai.videos.download_content(made.id)


def test_videos_are_listed_the_newest_first_and_the_oldest_gives_way(studio: Server, ai: OpenAI) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (1, 4, 32, 32, 3), dtype=np.uint8)
    studio.call(lambda pipeline: setattr(pipeline, "output", VideoOutput(noise, 8.0)))
    names = []
    for _ in range(3):
        made = ai.videos.create(prompt="x", extra_body={"output_format": "webp"})
        names.append(ai.videos.poll(made.id, poll_interval_ms=10).id)
    size = len(ai.videos.download_content(names[-1]).read())
    kept = [video.id for video in ai.videos.list(limit=10)]
    assert kept == names[::-1][: max(1, 12_000 // size)]
    assert len(kept) < 3
    assert [video.id for video in ai.videos.list(order="asc")] == kept[::-1]


def test_an_output_of_another_kind_is_a_failed_job(studio: Server, ai: OpenAI) -> None:
    studio.call(lambda pipeline: setattr(pipeline, "output", ImageOutput(np.zeros((1, 8, 8, 3), np.uint8))))
    with pytest.raises(openai.InternalServerError, match="gave no video"):
        ai.videos.create(prompt="x")
