"""The API's cases as functions of a base URL, so that the same promise is tested on a fake and on a real pipeline."""

import asyncio
import base64
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from io import BytesIO

import httpx
from openai import AsyncOpenAI, OpenAI
from PIL import Image

Colour = tuple[int, int, int]
IMAGES = "/v1/images/generations"
CHAT = "/v1/chat/completions"
PATIENCE_S = 60.0


def client(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=PATIENCE_S)


def async_client(url: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=PATIENCE_S)


def picture(b64_json: str) -> Image.Image:
    image = Image.open(BytesIO(base64.b64decode(b64_json, validate=True)))
    image.load()
    return image


def average_colour(image: Image.Image) -> Colour:
    r, g, b = image.convert("RGB").resize((1, 1), Image.Resampling.BOX).getpixel((0, 0))
    return r, g, b


def png(colour: tuple[int, ...] = (1, 2, 3), mode: str = "RGB", size: tuple[int, int] = (16, 8)) -> bytes:
    """The bytes of a file in one colour."""
    out = BytesIO()
    Image.new(mode, size, colour).save(out, "png")
    return out.getvalue()


PNG = base64.b64encode(png()).decode()


# --- bad bodies -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BadBody:
    """A body that must be refused, the field that the answer must name, and the status."""

    body: dict[str, object]
    param: str
    status: int = 400


BAD_IMAGE_BODIES: dict[str, BadBody] = {
    "empty prompt": BadBody({"prompt": ""}, "prompt"),
    "blank prompt": BadBody({"prompt": " \n\t"}, "prompt"),
    "no prompt": BadBody({}, "prompt"),
    "prompt of numbers": BadBody({"prompt": 3}, "prompt"),
    "prompt null": BadBody({"prompt": None}, "prompt"),
    "width -64": BadBody({"prompt": "x", "width": -64, "height": 64}, "width"),
    "size -64x64": BadBody({"prompt": "x", "size": "-64x64"}, "size"),
    "size 513x512": BadBody({"prompt": "x", "size": "513x512"}, "size"),
    "width 513": BadBody({"prompt": "x", "width": 513, "height": 512}, "width"),
    "height 513": BadBody({"prompt": "x", "width": 512, "height": 513}, "height"),
    "size 0x0": BadBody({"prompt": "x", "size": "0x0"}, "size"),
    "size 99999x8": BadBody({"prompt": "x", "size": "99999x8"}, "size"),
    "size in words": BadBody({"prompt": "x", "size": "large"}, "size"),
    "size and width": BadBody({"prompt": "x", "size": "64x64", "width": 64}, "size"),
    "steps 0": BadBody({"prompt": "x", "steps": 0}, "steps"),
    "num_inference_steps 0": BadBody({"prompt": "x", "num_inference_steps": 0}, "num_inference_steps"),
    "steps 1.5": BadBody({"prompt": "x", "steps": 1.5}, "steps"),
    "steps true": BadBody({"prompt": "x", "steps": True}, "steps"),
    "steps twice": BadBody({"prompt": "x", "steps": 2, "num_inference_steps": 2}, "steps"),
    "n 0": BadBody({"prompt": "x", "n": 0}, "n"),
    "n -1": BadBody({"prompt": "x", "n": -1}, "n"),
    "n 1000": BadBody({"prompt": "x", "n": 1000}, "n"),
    "n in words": BadBody({"prompt": "x", "n": "2"}, "n"),
    "n beyond 64 bits": BadBody({"prompt": "x", "n": 2**70}, "n"),
    "guidance -1": BadBody({"prompt": "x", "guidance": -1}, "guidance"),
    "seed -1": BadBody({"prompt": "x", "seed": -1}, "seed"),
    "seed beyond 63 bits": BadBody({"prompt": "x", "seed": 2**63}, "seed"),
    "unknown model": BadBody({"prompt": "x", "model": "dall-e-3"}, "model", 404),
    "empty model": BadBody({"prompt": "x", "model": ""}, "model", 404),
    "unknown response format": BadBody({"prompt": "x", "response_format": "tiff"}, "response_format"),
    "response format url": BadBody({"prompt": "x", "response_format": "url"}, "response_format"),
    "unknown output format": BadBody({"prompt": "x", "output_format": "gif"}, "output_format"),
    "malformed base64": BadBody({"prompt": "x", "image": "%%%not base64%%%"}, "image"),
    "base64 cut short": BadBody({"prompt": "x", "image": "iVBORw0KGgo"}, "image"),
    "base64 of something else": BadBody({"prompt": "x", "image": base64.b64encode(b"GIF89a" * 9).decode()}, "image"),
    "image to be fetched": BadBody({"prompt": "x", "image": "http://127.0.0.1/a.png"}, "image"),
    "mistyped field": BadBody({"prompt": "x", "guidence_scale": 3}, "guidence_scale"),
    "transparent background": BadBody({"prompt": "x", "background": "transparent"}, "background"),
    "partial images without a stream": BadBody({"prompt": "x", "partial_images": 1}, "partial_images"),
    "partial images beyond OpenAI's range": BadBody(
        {"prompt": "x", "stream": True, "partial_images": 4}, "partial_images"
    ),
    "mask without an image": BadBody({"prompt": "x", "mask": PNG}, "image"),
    "mask that is no picture": BadBody({"prompt": "x", "image": PNG, "mask": "####"}, "mask"),
    "image as a number": BadBody({"prompt": "x", "image": 3}, "image"),
    "image as a file id": BadBody({"prompt": "x", "image": {"file_id": "file-1"}}, "image"),
    "second image to be fetched": BadBody({"prompt": "x", "image": [PNG, "https://a.example/b.png"]}, "image[1]"),
    "eleven images": BadBody({"prompt": "x", "image": [PNG] * 11}, "image"),
    "extra that the pipeline has not": BadBody({"prompt": "x", "extra": {"true_cfg": 2}}, "true_cfg"),
}


def check_refused(url: str, route: str, bad: BadBody) -> str:
    """The message of the refusal, which has OpenAI's shape and names the field."""
    answer = httpx.post(f"{url}{route}", json=bad.body, timeout=PATIENCE_S)
    assert answer.status_code == bad.status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == bad.param
    assert error["type"] == "invalid_request_error"
    message: str = error["message"]
    assert bad.param in message
    return message


# --- many at once -----------------------------------------------------------------------------------------------------

SIXTEEN: tuple[Colour, ...] = tuple((16 * k, 255 - 16 * k, (97 * k) % 256) for k in range(16))


def colour_prompt(colour: Colour) -> str:
    return "paint it #{:02x}{:02x}{:02x}".format(*colour)


async def sixteen_at_once(url: str, seen: Callable[[Image.Image], Colour] = average_colour) -> None:
    """Sixteen simultaneous calls: sixteen ids, and each answer in its own colour."""

    async def paint(ai: AsyncOpenAI, colour: Colour) -> tuple[str, Colour]:
        answer = await ai.images.generate(prompt=colour_prompt(colour))
        assert answer.data is not None
        (item,) = answer.data
        assert item.b64_json is not None
        return answer.model_dump()["id"], seen(picture(item.b64_json))

    async with async_client(url) as ai:
        answers = await asyncio.gather(*(paint(ai, colour) for colour in SIXTEEN))
    assert [colour for _, colour in answers] == list(SIXTEEN)
    ids = {answer_id for answer_id, _ in answers}
    assert len(ids) == 16
    assert all(answer_id.startswith("img-") for answer_id in ids)


# --- a stream says the same as one answer -----------------------------------------------------------------------------


def stream_equals_answer(url: str, model: str, prompt: str, stop: str, seed: int = 7) -> str:
    """The text that both ways of asking gave: no stop string, no replacement character, same usage and reason."""
    ask = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "stop": stop,
        "seed": seed,
        "temperature": 0,
    }
    with client(url) as ai:
        whole = ai.chat.completions.create(**ask)
        chunks = list(ai.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    *parts, last = chunks
    text = "".join(chunk.choices[0].delta.content or "" for chunk in parts)
    assert text == whole.choices[0].message.content
    assert stop not in text
    assert "\N{REPLACEMENT CHARACTER}" not in text
    reasons = [chunk.choices[0].finish_reason for chunk in parts if chunk.choices[0].finish_reason]
    assert reasons == [whole.choices[0].finish_reason] == ["stop"]
    assert last.choices == []
    assert last.usage is not None
    assert last.usage == whole.usage
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert chunks[0].id != whole.id
    return text


# --- a burst ----------------------------------------------------------------------------------------------------------


async def burst(url: str, calls: int, admitted: int, release: Callable[[], Awaitable[None]]) -> None:
    """`calls` at once while work stands still: all but `admitted` are refused at once, health answers meanwhile, and
    after `release` each admitted one succeeds."""
    limits = httpx.Limits(max_connections=calls + 4)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=PATIENCE_S) as http:
        waiting = {asyncio.create_task(http.post(IMAGES, json={"prompt": "a cat"})) for _ in range(calls)}
        answers: list[httpx.Response] = []
        while len(waiting) > admitted:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            answers += [task.result() for task in done]
            for route in ("/health/live", "/health/ready", "/status", "/metrics"):
                assert (await http.get(route)).status_code == 200
        assert len(answers) == calls - admitted
        assert_come_back_later(answers)
        await release()
        admitted_answers = await asyncio.gather(*waiting)
    assert [answer.status_code for answer in admitted_answers] == [200] * admitted


def assert_come_back_later(answers: Sequence[httpx.Response]) -> None:
    for answer in answers:
        assert answer.status_code in (429, 503), answer.text
        assert int(answer.headers["retry-after"]) >= 1
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
