"""Pictures and masks go into stock image-to-image, inpainting and edit pipelines as their own library takes them."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, UNet2DConditionModel
from numpy.typing import NDArray
from PIL import Image

from proto.errors import ErrorCode, InvalidRequest
from proto.ids import RequestId
from proto.messages import Images, Text
from proto.numpy_tensors import from_wire, to_wire
from proto.params import DiffusionParams, Json
from stages.demo import tiny_painter
from stages.engine import Failed, Finished, Job
from tests.models import tiny_diffusion as tiny
from tests.models.tiny_diffusion_families import FAMILIES
from tests.pipeline.batching_cases import drive, load, payload

Folder = Callable[[str], Path]


@tiny.seeded_build
def build_pix2pix(folder: Path) -> None:
    """Stable Diffusion whose denoiser takes the image's latents beside the noise."""
    tiny_painter.build(folder)
    pipe = DiffusionPipeline.from_pretrained(folder, local_files_only=True)
    pipe.unet = UNet2DConditionModel.from_config({**pipe.unet.config, "in_channels": 8})
    pipe.save_pretrained(folder)


BUILDERS = {
    "sd": tiny.build_tiny_sd,
    "pix2pix": build_pix2pix,
    "flux": tiny.build_tiny_flux,
    "flux2": FAMILIES["flux2"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    root = tmp_path_factory.mktemp("inputs")
    return functools.cache(lambda name: BUILDERS[name](root / name))


def photo(seed: int, width: int = 64, height: int = 64, channels: int = 3) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)


def half_mask(width: int = 64, height: int = 64) -> NDArray[np.uint8]:
    """White, so to be painted anew, on the right."""
    mask = np.zeros((height, width), np.uint8)
    mask[:, width // 2 :] = 255
    return mask


def job(name: str, images: list[NDArray[np.uint8]], mask: NDArray[np.uint8] | None = None, **params: Json) -> Job:
    """As the master plans it: one tensor a picture, the mask's behind them."""
    payloads = params.pop("payloads", {})
    wires = [to_wire(image[None]) for image in images]
    inputs: dict[str, Json] = {} if payloads else {"prompt": Text(text="a red fox")}
    if images:
        inputs["image"] = Images(tensor=0, more=tuple(range(1, len(images))))
    if mask is not None:
        inputs["mask_image"] = Images(tensor=len(wires))
        wires.append(to_wire(mask[None, :, :, None]))
    return Job(RequestId(name), inputs, DiffusionParams(**params), emit=("image",), tensors=wires, payloads=payloads)


def drawn(end: Json) -> NDArray[np.generic]:
    assert isinstance(end, Finished), end
    return from_wire(end.tensors[0])[0]


def expected(folder: Path, pipeline_class: str, seed: int, **arguments: Json) -> NDArray[np.uint8]:
    """What the stock pipeline draws, alone."""
    absent = {"text_encoder": None, "tokenizer": None} if "prompt_embeds" in arguments else {}
    pipe = getattr(diffusers, pipeline_class).from_pretrained(folder, local_files_only=True, **absent)
    pipe.set_progress_bar_config(disable=True)
    with torch.inference_mode():
        return np.asarray(pipe(generator=torch.Generator().manual_seed(seed), **arguments).images[0])


CASES: Mapping[str, tuple[str, str, Mapping[str, Json], Mapping[str, Json], bool]] = {
    "image to image": ("sd", "StableDiffusionImg2ImgPipeline", {"strength": 0.5}, {}, False),
    "inpainting": ("sd", "StableDiffusionInpaintPipeline", {"strength": 0.8}, {}, True),
    "instructions": ("pix2pix", "StableDiffusionInstructPix2PixPipeline", {}, {"image_guidance_scale": 1.2}, False),
    "flux kontext": (
        "flux",
        "FluxKontextPipeline",
        {"width": 64, "height": 64},
        {"_auto_resize": False, "max_area": 64 * 64, "max_sequence_length": 64},
        False,
    ),
    "flux inpainting": (
        "flux",
        "FluxInpaintPipeline",
        {"width": 64, "height": 64, "strength": 0.7},
        {"max_sequence_length": 64},
        True,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_two_edits_side_by_side_are_each_what_the_stock_pipeline_draws(case: str, folder: Folder) -> None:
    name, pipeline_class, params, extra, masked = CASES[case]
    engine = load(folder(name), pipeline_class)
    mask = half_mask() if masked else None
    jobs = [
        job(f"r{k}", [photo(k)], mask, seed=k, num_inference_steps=4, extra=extra or None, **params) for k in (0, 1)
    ]
    ends = {event.request: event for event in drive(engine, dict(enumerate(jobs))) if isinstance(event, Finished)}
    given = {"mask_image": Image.fromarray(mask)} if mask is not None else {}
    for k in (0, 1):
        alone = expected(
            folder(name), pipeline_class, k,
            prompt="a red fox", image=Image.fromarray(photo(k)), num_inference_steps=4, **given, **params, **extra,
        )  # fmt: skip
        ours = drawn(ends[RequestId(f"r{k}")])
        assert ours.shape == alone.shape
        assert np.abs(ours.astype(int) - alone).max() <= 1


def test_one_picture_edited_by_several_is_encoded_once_and_each_draws_its_own_noise(
    folder: Folder, caplog: pytest.LogCaptureFixture
) -> None:
    engine = load(folder("sd"), "StableDiffusionImg2ImgPipeline")
    jobs = [job(f"r{k}", [photo(1)], seed=k, num_inference_steps=4, strength=0.8) for k in (0, 1, 2)]
    ends = {event.request: event for event in drive(engine, dict(enumerate(jobs)))
            if isinstance(event, Finished)}  # fmt: skip
    for k in (0, 1, 2):
        alone = expected(
            folder("sd"), "StableDiffusionImg2ImgPipeline", k,
            prompt="a red fox", image=Image.fromarray(photo(1)), num_inference_steps=4, strength=0.8,
        )  # fmt: skip
        assert np.abs(drawn(ends[RequestId(f"r{k}")]).astype(int) - alone).max() <= 1
    assert "raised together" not in caplog.text


def test_a_strength_that_leaves_no_step_is_refused_and_disturbs_nobody(folder: Folder) -> None:
    engine = load(folder("sd"), "StableDiffusionImg2ImgPipeline")
    good = job("good", [photo(1)], seed=1, num_inference_steps=4, strength=0.5)
    bad = [job(f"bad{s}", [photo(1)], seed=1, num_inference_steps=4, strength=s) for s in (0.0, 0.01)]
    ends = {e.request: e for e in drive(engine, {0: good, 1: bad[0], 2: bad[1]}) if isinstance(e, Finished | Failed)}
    assert isinstance(ends[RequestId("good")], Finished)
    for one in bad:
        end = ends[one.request]
        assert isinstance(end, Failed)
        assert (end.error.code, end.error.field) == (ErrorCode.INVALID_REQUEST, "strength")
    assert not engine.has_work


def test_a_picture_too_small_to_be_drawn_anew_is_refused(folder: Folder) -> None:
    engine = load(folder("sd"), "StableDiffusionImg2ImgPipeline")
    with pytest.raises(InvalidRequest, match="8x8 pixels at least, not 9x7") as refusal:
        engine.submit(job("a", [photo(1, 9, 7)]))
    assert refusal.value.info.field == "image"


def test_several_images_of_several_sizes_go_into_one_edit(folder: Folder) -> None:
    engine = load(folder("flux2"))
    embeds = torch.randn((1, 7, 32), generator=torch.Generator().manual_seed(3))
    given = [photo(1, 80, 64), photo(2, 64, 96, channels=4)]
    params = {"width": 32, "height": 32, "num_inference_steps": 2}
    one = job("r", given, seed=5, payloads={"prompt_embeds": payload("prompt_embeds", embeds[0])}, **params)
    ours = drawn(drive(engine, {0: one})[-1])
    images = [Image.fromarray(image).convert("RGB") for image in given]
    alone = expected(folder("flux2"), "Flux2Pipeline", 5, prompt_embeds=embeds, image=images, **params)
    assert np.abs(ours.astype(int) - alone).max() <= 1
    without = job("s", [], seed=5, payloads={"prompt_embeds": payload("prompt_embeds", embeds[0])}, **params)
    assert np.abs(drawn(drive(engine, {0: without})[-1]).astype(int) - ours).max() > 1


def test_what_an_edit_lacks_or_has_too_much_of_is_refused_by_field(folder: Folder) -> None:
    inpaint = load(folder("sd"), "StableDiffusionInpaintPipeline")
    for one, field, words in (
        (job("a", [photo(1)]), "mask_image", "needs a mask"),
        (job("b", []), "image", "needs an image"),
        (job("c", [photo(1), photo(2)], half_mask()), "image", "starts from one image, not from 2"),
    ):
        with pytest.raises(InvalidRequest, match=words) as refusal:
            inpaint.submit(one)
        assert refusal.value.info.field == field
    plain = load(folder("sd"))
    with pytest.raises(InvalidRequest, match="no input 'image'"):
        plain.submit(job("d", [photo(1)]))
    broken = job("e", [photo(1)], half_mask())
    broken = Job(broken.request, broken.inputs, broken.params, emit=("image",), tensors=[broken.tensors[0]] * 2)
    (*_, end) = drive(inpaint, {0: broken})
    assert isinstance(end, Finished)  # a mask may come as a picture
    broken = Job(broken.request, broken.inputs, broken.params, emit=("image",), tensors=[broken.tensors[0]])
    (*_, end) = drive(inpaint, {0: broken})
    assert isinstance(end, Failed)
    assert end.error.field == "mask_image"
