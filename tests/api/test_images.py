"""Image generation, called by the real client."""

import asyncio
import base64
from io import BytesIO

import httpx
import numpy as np
import openai
import pytest
from openai import OpenAI
from PIL import Image

from tests.api.cases import IMAGES, average_colour, picture, png, sixteen_at_once
from tests.api.fake_pipeline import PAINTER, THINKER, Server, only, serving, two_stages


def test_answer_has_images_seeds_size_and_the_prompt_that_was_written(ai: OpenAI) -> None:
    answer = ai.images.generate(prompt="#ff8000", n=3, size="64x32", extra_body={"seed": 5})
    assert [picture(item.b64_json).size for item in answer.data] == [(64, 32)] * 3
    assert {average_colour(picture(item.b64_json)) for item in answer.data} == {(255, 128, 0)}
    assert [item.model_dump()["seed"] for item in answer.data] == [5, 6, 7]
    assert all(item.revised_prompt.startswith("Stars") for item in answer.data)
    assert answer.size == "64x32"
    assert answer.output_format == "png"
    assert answer.model_dump()["id"].startswith("img-")


@pytest.mark.parametrize("name", ["png", "jpeg", "webp"])
def test_output_format_is_the_format_of_the_file(ai: OpenAI, name: str) -> None:
    answer = ai.images.generate(prompt="x", output_format=name, response_format="b64_json")
    assert picture(answer.data[0].b64_json).format == name.upper()


def test_settings_reach_the_stages(server: Server, ai: OpenAI) -> None:
    ai.images.generate(
        prompt="x",
        model="demo/painter",
        n=2,
        user="someone",
        quality="auto",
        background="auto",
        moderation="low",
        extra_body={
            "width": 64,
            "height": 32,
            "seed": 9,
            "steps": 4,
            "guidance": 2.5,
            "negative_prompt": "blur",
            "strength": 0.5,
        },
    )
    (request,) = server.call(lambda pipeline: pipeline.seen)
    assert request.prompt == "x"
    assert request.outputs == (THINKER, PAINTER)
    assert request.params == {
        THINKER: {"seed": 9},
        PAINTER: {
            "width": 64,
            "height": 32,
            "num_inference_steps": 4,
            "guidance_scale": 2.5,
            "negative_prompt": "blur",
            "num_images": 2,
            "seed": 9,
            "strength": 0.5,
        },
    }


def test_what_is_not_set_is_left_to_the_deploy(server: Server, ai: OpenAI) -> None:
    ai.images.generate(prompt="x", size="auto", n=None)
    (request,) = server.call(lambda pipeline: pipeline.seen)
    assert request.params == {PAINTER: {}}


@pytest.mark.parametrize("prefix", ["", "data:image/png;base64,"])
@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
def test_image_goes_in_as_base64_or_data_url(server: Server, ai: OpenAI, prefix: str, mode: str) -> None:
    colour = (10, 20, 30, 255)[: len(mode)]
    answer = ai.images.generate(prompt="x", extra_body={"image": prefix + base64.b64encode(png(colour, mode)).decode()})
    (request,) = server.call(lambda pipeline: pipeline.seen)
    assert request.images is not None
    assert [(image.shape, image.dtype) for image in request.images] == [((8, 16, 3), np.uint8)]
    assert answer.data is not None
    assert average_colour(picture(answer.data[0].b64_json or "")) == (245, 235, 225)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_image_that_unpacks_to_too_much_is_refused_before_that(server: Server, ai: OpenAI) -> None:
    out = BytesIO()
    Image.new("1", (16384, 8192)).save(out, "png")
    with pytest.raises(openai.BadRequestError, match="16384x8192 pixels is too large"):
        ai.images.generate(prompt="x", extra_body={"image": base64.b64encode(out.getvalue()).decode()})
    assert server.call(lambda pipeline: pipeline.seen) == []


def test_sixteen_at_once_each_get_their_own(server: Server) -> None:
    asyncio.run(sixteen_at_once(server.url))


def test_deploy_without_images_says_which_stage_they_need() -> None:
    with serving(only("thinker", two_stages())) as server:
        answer = httpx.post(server.url + IMAGES, json={"prompt": "x"})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["code"] == "not_servable"
        assert "kind diffusion with `output: image`" in error["message"]
        assert "thinker (text)" in error["message"]


def test_answer_without_a_writer_has_no_revised_prompt() -> None:
    with serving(only("painter", two_stages())) as server:
        answer = httpx.post(server.url + IMAGES, json={"prompt": "#010203"})
        assert "revised_prompt" not in answer.json()["data"][0]
