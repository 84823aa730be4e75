"""Chats that ask for an image too: what the answer says is what is drawn."""

import base64
from collections.abc import Iterator
from io import BytesIO

import msgspec
import openai
import pytest
from PIL import Image

from proto.deploy import ArStage, Deploy, Link, PromptSpec
from tests.api.cases import client
from tests.api.fake_pipeline import PAINTER, TEXT, THINKER, Server, only, serving, two_stages

BOTH = ["text", "image"]
HELLO = [{"role": "user", "content": "something red"}]
CAPTION = "Answer with a caption."
EXAMPLES = {"a boat, please": "a boat", "draw me a fox": "a fox"}


def over_kv() -> Deploy:
    """The painter draws from the keys and values of what the thinker reads."""
    deploy = two_stages()
    thinker = deploy.stages["thinker"]
    assert isinstance(thinker, ArStage)
    painter = msgspec.structs.replace(
        deploy.stages["painter"], inputs={"kv": Link(source="thinker.kv", companion="negative_prompt")}
    )
    thinker = msgspec.structs.replace(thinker, prompt=PromptSpec(caption=CAPTION, caption_examples=EXAMPLES))
    return msgspec.structs.replace(deploy, stages={"thinker": thinker, "painter": painter})


@pytest.fixture
def kv_server() -> Iterator[Server]:
    with serving(over_kv()) as server:
        yield server


def image_of(url: str) -> Image.Image:
    head, _, data = url.partition(",")
    assert head == "data:image/png;base64"
    return Image.open(BytesIO(base64.b64decode(data, validate=True)))


def ask(server: Server, **settings: object) -> object:
    with client(server.url) as ai:
        answer = ai.chat.completions.create(**{"model": "demo", "messages": HELLO, "modalities": BOTH, **settings})
        return list(answer) if settings.get("stream") else answer


def test_words_that_lead_to_the_painter_are_drawn_in_the_same_request(server: Server) -> None:
    answer = ask(server, seed=5)
    message = answer.choices[0].message
    assert message.content == TEXT
    (image,) = message.images
    assert image_of(image["image_url"]["url"]).size == (16, 16)
    (request,) = server.call(lambda pipeline: pipeline.seen)
    assert request.outputs == (THINKER, PAINTER)
    assert request.params[PAINTER] == {"seed": 5}


def test_a_caption_becomes_the_prompt_of_a_painter_that_reads_keys_and_values(kv_server: Server) -> None:
    answer = ask(kv_server, seed=5)
    assert answer.choices[0].message.content == TEXT
    assert len(answer.choices[0].message.images) == 1
    first, second = kv_server.call(lambda pipeline: pipeline.seen)
    assert first.outputs == (THINKER,)
    assert (second.prompt, second.outputs, second.params) == (TEXT, (PAINTER,), {PAINTER: {"seed": 5}})


def test_the_deploys_instruction_and_examples_go_before_a_chat_that_has_none_of_its_own(kv_server: Server) -> None:
    ask(kv_server)
    ask(kv_server, messages=[{"role": "system", "content": "Be brief."}, *HELLO])
    ask(kv_server, modalities=["text"])
    chats = [request.messages for request in kv_server.call(lambda pipeline: pipeline.seen) if request.messages]
    said = [[(one.role, one.content) for one in chat] for chat in chats]
    hello = ("user", HELLO[0]["content"])
    turns = [turn for pair in EXAMPLES.items() for turn in zip(("user", "assistant"), pair, strict=True)]
    assert said == [[("system", CAPTION), *turns, hello], [("system", "Be brief."), hello], [hello]]


def test_a_stream_says_the_words_first_and_then_shows_the_picture(kv_server: Server) -> None:
    chunks = ask(kv_server, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT
    shown = [n for n, chunk in enumerate(chunks) if getattr(chunk.choices[0].delta, "images", None)]
    assert shown == [len(chunks) - 2]
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_words_alone_are_not_drawn(kv_server: Server) -> None:
    answer = ask(kv_server, modalities=["text"])
    assert getattr(answer.choices[0].message, "images", None) is None
    assert len(kv_server.call(lambda pipeline: pipeline.seen)) == 1


def test_an_answer_with_a_picture_can_be_sent_back(kv_server: Server) -> None:
    answer = ask(kv_server)
    ask(kv_server, messages=[*HELLO, answer.choices[0].message.model_dump(), *HELLO])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"modalities": ["image"]}, "text at least"),
        ({"n": 2}, "one answer is drawn"),
        ({"modalities": ["text", "audio"]}, "modalities"),
    ],
)
def test_what_cannot_be_drawn_is_refused(kv_server: Server, settings: dict[str, object], words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words):
        ask(kv_server, **settings)
    assert not kv_server.call(lambda pipeline: pipeline.seen)


def test_a_deploy_that_draws_nothing_says_so() -> None:
    with serving(only("thinker", two_stages())) as server, pytest.raises(openai.APIStatusError, match="output: image"):
        ask(server)
