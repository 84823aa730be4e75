"""The packaged demo, in an empty folder: two processes draw what was asked, over keys and values; sixteen at once too."""

import base64
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from PIL import Image

from stages.demo.models import resolve_model
from stages.diffusion.painter.captions import Caption, Relation
from stages.diffusion.painter.kv import Thinker
from stages.diffusion.painter.pipeline import PainterPipeline
from stages.diffusion.painter.scenes import COLOURS, SHAPES, TOO_CLOSE, Layout, Thing
from stages.diffusion.painter.train import load_thinker
from tests.api.cases import CHAT, IMAGES
from tests.cli.commands import MASTER, Served, run
from tests.painter.checker import judge

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

PROMPT = "a red star above a blue square"
SCENE = Layout((Thing("red", "star"), Thing("blue", "square")), ((0.5, 0.28), (0.5, 0.72)), "white", 11.0, 2.0)
STAR = Layout((Thing("red", "star"),), ((0.5, 0.5),), "white", 17.0, 4.0)
SEED = 7
CLOSE = 4.0
"""Mean difference of two pictures' values: kernels for more rows round otherwise, in bfloat16 and over twenty steps."""


def plain(number: int) -> Caption:
    """One of many plain prompts, each of another colour and shape than the one before."""
    colours = list(COLOURS)
    colour, behind, shape = colours[number % 13], colours[(number * 5 + 3) % 13], SHAPES[number % 10]
    if colour == behind or frozenset({colour, behind}) in TOO_CLOSE:
        behind = "white"
    layout = Layout((Thing(colour, shape),), ((0.5, 0.5),), behind, 17.0, 4.0)
    return Caption(f"a {colour} {shape} on a {behind} background", layout, "one")


class Stock:
    """The same models called by hand, in this process."""

    def __init__(self) -> None:
        folder = resolve_model("demo://painter", lambda note, done: None)
        self.pipe = PainterPipeline.from_pretrained(folder, dtype=torch.bfloat16)
        self.pipe.set_progress_bar_config(disable=True)
        layers = tuple(self.pipe.transformer.config.kv_layers)
        self.thinker: Thinker = load_thinker("demo://smollm2-135m-instruct", layers)

    def draw(self, prompt: str, seed: int, negative: str = "") -> np.ndarray:
        texts = (self.thinker.cached(text) for text in (prompt, negative))
        return np.asarray(self.pipe(*texts, generator=torch.Generator().manual_seed(seed)).images[0])


@pytest.fixture(scope="module")
def stock() -> Stock:
    return Stock()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    log = tmp_path_factory.mktemp("demo") / "log"
    with Served("demo", log, "--set", "api.port=0", "--set", "master.bind=tcp://127.0.0.1:0") as served:
        yield served.until_ready()


def post(url: str, body: dict[str, object]) -> dict[str, object]:
    return httpx.post(url, json=body, timeout=300).raise_for_status().json()


def decoded(data: str) -> np.ndarray:
    return np.asarray(Image.open(BytesIO(base64.b64decode(data))).convert("RGB"))


def off(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(one.astype(float) - other).mean())


def test_the_demo_draws_the_prompt_in_an_empty_folder(tmp_path: Path, stock: Stock) -> None:
    words = ("--prompt", PROMPT, "--param", f"seed={SEED}", "--save", "out.png")
    done = run(MASTER, "launch", "demo", *words, cwd=tmp_path, env={"PYTHONPATH": ""})
    assert done.status == 0, done.err
    assert [path.name for path in tmp_path.iterdir()] == ["out.png"]
    with Image.open(tmp_path / "out.png") as picture:
        assert (picture.format, picture.size) == ("PNG", (64, 64))
        pixels = np.asarray(picture.convert("RGB"))
    assert judge(pixels, Caption(PROMPT, SCENE, "two", Relation.ABOVE)).all_right
    assert off(pixels, stock.draw(PROMPT, SEED)) < CLOSE
    assert re.search(r"^thinker .*prefill", done.out, re.MULTILINE)
    assert re.search(r"^painter .*denoise \d", done.out, re.MULTILINE)


def test_sixteen_prompts_at_once_give_sixteen_right_pictures(served: Served, stock: Stock) -> None:
    captions = [plain(number) for number in range(16)]

    def asked(number: int) -> np.ndarray:
        answer = post(served.url + IMAGES, {"prompt": captions[number].text, "seed": number})
        return decoded(answer["data"][0]["b64_json"])

    with ThreadPoolExecutor(16) as pool:
        drawn = list(pool.map(asked, range(16)))
    for number, picture in enumerate(drawn):
        assert judge(picture, captions[number]).all_right, captions[number].text
        assert off(picture, stock.draw(captions[number].text, number)) < CLOSE


def test_the_thinker_answers_in_words(served: Served) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": "What is the capital of France?"}]}
    message = post(served.url + CHAT, body)["choices"][0]["message"]
    assert "Paris" in message["content"]
    assert "images" not in message


def test_a_chat_that_asks_for_an_image_gets_the_picture_of_its_caption(served: Served, stock: Stock) -> None:
    messages = [{"role": "user", "content": "draw me a red star"}]
    body = {"model": "demo", "messages": messages, "modalities": ["text", "image"], "seed": SEED}
    message = post(served.url + CHAT, body)["choices"][0]["message"]
    caption = message["content"].strip()
    assert "red star" in caption.lower()
    (image,) = message["images"]
    picture = decoded(image["image_url"]["url"].partition(",")[2])
    assert judge(picture, Caption(caption, STAR, "one")).all_right
    assert off(picture, stock.draw(caption, SEED)) < CLOSE


def test_a_negative_prompt_changes_the_picture(served: Served, stock: Stock) -> None:
    body = {"prompt": PROMPT, "seed": SEED, "negative_prompt": "a red star"}
    picture = decoded(post(served.url + IMAGES, body)["data"][0]["b64_json"])
    assert off(picture, stock.draw(PROMPT, SEED, negative="a red star")) < CLOSE
    assert off(picture, stock.draw(PROMPT, SEED)) > CLOSE
