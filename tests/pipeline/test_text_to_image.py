"""Real tiny models in three processes give what the same calls give in this one: same words, same pixels, in fp32.

thinker (Llama, transformers) -> painter (StableDiffusion, diffusers) -> refiner (StableDiffusionImg2Img)
        └ kv ─> witness (in this process)
"""

from collections.abc import Iterator
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForCausalLM, AutoTokenizer

from omni.outputs import ImageOutput
from proto.deploy import ArStage, Deploy, DiffusionStage, Kind, Link, ModelSpec
from proto.messages import Payload, StageInfo
from proto.params import DiffusionParams, SamplingParams
from proto.torch_tensors import from_wire
from tests.models.tiny_ar import build_tiny_llama
from tests.models.tiny_diffusion import build_tiny_sd
from tests.pipeline.harness import ENV, Running, deploy, fake_painter
from tests.pipeline.raw_stage import RawStage

WORDS, STEPS, SEED, STRENGTH = 12, 4, 7, 0.6


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """As many threads as the stages have: sums in another order are other numbers."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def painter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_sd(tmp_path_factory.mktemp("models") / "sd")


def four_stages(llama: Path, painter: Path) -> Deploy:
    thinker = ArStage(
        model=ModelSpec(path=str(llama), dtype="float32"),
        defaults=SamplingParams(max_tokens=WORDS, temperature=0.0),
        output=Kind.TEXT,
        threads=1,
        env=ENV,
    )
    first = DiffusionStage(
        model=ModelSpec(path=str(painter), dtype="float32"),
        inputs={"prompt": Link(source="thinker.text")},
        defaults=DiffusionParams(num_inference_steps=STEPS, guidance_scale=3.0),
        output=Kind.IMAGE,
        threads=1,
        env=ENV,
    )
    refiner = DiffusionStage(
        model=ModelSpec(path=str(painter), dtype="float32", pipeline_class="StableDiffusionImg2ImgPipeline"),
        inputs={"prompt": Link(source="thinker.text"), "image": Link(source="painter.image")},
        defaults=DiffusionParams(num_inference_steps=STEPS, guidance_scale=3.0, strength=STRENGTH),
        output=Kind.IMAGE,
        threads=1,
        env=ENV,
    )
    witness = fake_painter(local=0, inputs={"kv": Link(source="thinker.kv")})
    return deploy({"thinker": thinker, "painter": first, "refiner": refiner, "witness": witness})


@pytest.fixture(scope="module")
def pipeline(llama: Path, painter: Path) -> Iterator[Running]:
    with Running(four_stages(llama, painter), wait=False) as running:
        yield running


@pytest.fixture(scope="module", autouse=True)
def witness(pipeline: Running) -> Iterator[RawStage]:
    with RawStage(pipeline.url, "witness", StageInfo(inputs=("kv",), outputs=("image",))) as stage:
        pipeline.until_ready()
        yield stage


class InProcess:
    """The same calls, made with the libraries themselves."""

    def __init__(self, llama: Path, painter: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(llama)
        self.model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
        self.pipe = diffusers.StableDiffusionPipeline.from_pretrained(painter, dtype=torch.float32)
        self.pipe.set_progress_bar_config(disable=True)
        self.img2img = diffusers.StableDiffusionImg2ImgPipeline(**self.pipe.components, requires_safety_checker=False)
        self.img2img.set_progress_bar_config(disable=True)

    def prompt_ids(self, prompt: str) -> torch.Tensor:
        messages = [{"role": "user", "content": prompt}]
        return self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]

    def words(self, prompt: str) -> str:
        ids = self.prompt_ids(prompt)
        out = self.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=WORDS, do_sample=False)
        text = self.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        return text.rstrip("\ufffd")  # a character that `max_new_tokens` cut is not said

    def paint(self, words: str, seed: int = SEED, steps: int = STEPS) -> Image.Image:
        generator = torch.Generator().manual_seed(seed)
        return self.pipe(words, num_inference_steps=steps, guidance_scale=3.0, generator=generator).images[0]

    def refine(self, words: str, image: Image.Image) -> Image.Image:
        generator = torch.Generator().manual_seed(SEED)
        return self.img2img(
            words,
            image=image,
            num_inference_steps=STEPS,
            guidance_scale=3.0,
            strength=STRENGTH,
            generator=generator,
        ).images[0]


@pytest.fixture(scope="module")
def here(llama: Path, painter: Path) -> InProcess:
    return InProcess(llama, painter)


def picture(output: object) -> Image.Image:
    assert isinstance(output, ImageOutput)
    return output.images[0]


def test_two_stages_give_the_words_of_transformers_and_the_pixels_of_diffusers(
    pipeline: Running, here: InProcess
) -> None:
    done = pipeline.run("Describe what to draw: a boat", seed=SEED, outputs=["thinker", "painter"])
    words = here.words("Describe what to draw: a boat")
    assert done.text == words
    assert words.strip()
    assert picture(done.outputs["painter"]).tobytes() == here.paint(words).tobytes()
    assert set(done.outputs) == {"thinker", "painter"}


def test_three_stages_hand_the_picture_on_and_show_all_that_is_visible(pipeline: Running, here: InProcess) -> None:
    done = pipeline.run("Describe what to draw: a cat", seed=SEED, outputs=["thinker", "painter", "refiner"])
    words = here.words("Describe what to draw: a cat")
    first = here.paint(words)
    assert set(done.outputs) == {"thinker", "painter", "refiner"}
    assert done.text == words
    assert picture(done.outputs["painter"]).tobytes() == first.tobytes()
    assert picture(done.outputs["refiner"]).tobytes() == here.refine(words, first).tobytes()
    edges = {(edge.source, edge.target): edge for edge in pipeline.until_idle().edges}
    assert edges["painter.image", "refiner.image"].bytes >= np.asarray(first).nbytes


def test_the_last_stage_alone_can_be_asked_for(pipeline: Running, here: InProcess) -> None:
    done = pipeline.run("a hill", seed=SEED, outputs=["refiner"])
    words = here.words("a hill")
    assert set(done.outputs) == {"refiner"}
    assert picture(done.outputs["refiner"]).tobytes() == here.refine(words, here.paint(words)).tobytes()


def test_words_alone_leave_both_painters_idle(pipeline: Running, here: InProcess) -> None:
    pipeline.until_idle()
    before = [pipeline.replica(stage).steps for stage in ("painter", "refiner")]
    assert pipeline.run("a lake", outputs=["thinker"]).text == here.words("a lake")
    pipeline.until_idle()
    assert [pipeline.replica(stage).steps for stage in ("painter", "refiner")] == before


def test_requests_in_company_give_what_each_gives_alone(pipeline: Running, here: InProcess) -> None:
    prompts = {"a boat": (1, 2), "a cat": (2, 5), "漢字 and 🎨": (3, 3), "the sun": (4, 4)}
    flights = {
        prompt: pipeline.launch(
            prompt, outputs=["thinker", "painter"], stages={"painter": {"seed": seed, "num_inference_steps": steps}}
        )
        for prompt, (seed, steps) in prompts.items()
    }
    for prompt, (seed, steps) in prompts.items():
        done = flights[prompt].result()
        words = here.words(prompt)
        assert done.text == words
        off = np.subtract(picture(done.outputs["painter"]), here.paint(words, seed, steps), dtype=int)
        assert abs(off).max() <= 1  # they share forwards, and kernels for more rows round the other way
    pipeline.until_idle()


def test_image_k_of_n_can_be_made_again_alone(pipeline: Running, here: InProcess) -> None:
    done = pipeline.run("a boat", seed=SEED, num_images=2, outputs=["painter"]).outputs["painter"]
    assert isinstance(done, ImageOutput)
    assert done.seeds == (SEED, SEED + 1)
    alone = pipeline.run("a boat", seed=SEED + 1, outputs=["painter"]).outputs["painter"]
    # a batch of two is another sum than two batches of one: the same picture, to a rounding of its last bit
    assert np.abs(done.array[1].astype(int) - np.asarray(picture(alone)).astype(int)).max() <= 1
    assert np.abs(done.array[0].astype(int) - np.asarray(here.paint(here.words("a boat"))).astype(int)).max() <= 1


def test_the_kv_of_a_real_model_arrives_as_the_model_has_it(
    pipeline: Running, witness: RawStage, here: InProcess
) -> None:
    flight = pipeline.launch("a red boat", outputs=["witness"])
    submit = witness.submitted()
    payload = submit.inputs["kv"]
    assert isinstance(payload, Payload)
    tensors = {name: from_wire(one) for name, one in witness.pull(submit, payload).items()}
    ids = here.prompt_ids("a red boat")
    cache = here.model(ids, use_cache=True).past_key_values
    for layer in range(here.model.config.num_hidden_layers):
        assert torch.equal(tensors[f"k.{layer}"], cache.layers[layer].keys)
        assert torch.equal(tensors[f"v.{layer}"], cache.layers[layer].values)
    assert payload.meta["tokens"] == ids.shape[1]
    witness.finish(submit)
    assert set(flight.result().outputs) == {"witness"}
    witness.beat()
    pipeline.until_idle()
