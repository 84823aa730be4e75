"""What a family of pipelines is like, where its signature does not say it: one `Recipe` per loaded pipeline.

`recipe_for` reads the signature first; `_FAMILIES` then corrects what is particular to a family, found by the longest
class-name prefix. A new family is a function here, never a subclass of the engine.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from diffusers import DiffusionPipeline

from proto.params import Json
from stages.diffusion import library, parking
from stages.diffusion.signature import CallSignature
from stages.diffusion.traits import Traits

_NEEDS_IMAGE = ("Img2Img", "Inpaint", "Edit", "ImageToVideo", "Image2Video", "ImageVariation", "Upscale", "ControlNet")
_NO_LATENTS = ("DiTPipeline", "LDM", "Marigold", "KandinskyCombined", "StableCascadeCombined", "ShapE", "RFD4")
_SEVERAL_IMAGES = (
    *("QwenImageEditPlus", "QwenImage21", "QwenImageLayered", "Flux2", "ZImageOmni", "GlmImage", "BriaFibo2"),
    *("BriaFiboEdit", "JoyImageEdit", "StableDiffusionAdapter", "VisualCloze"),
)
_CHANGES_MODULES = ("PAG", "SAG", "AttendAndExcite", "LEdits", "TextToVideoZero", "Pix2PixZero")
_COMPUTES_ITSELF = ("AnyFlow", "GlmImage", "Marigold")
"""Their calls also make large computations that are no module's forward or decode."""
_DECODERS = ("vae", "vqvae", "movq", "vqgan")


@dataclass(frozen=True, slots=True)
class Recipe:
    """`media`: outputs other than latents. `count`: argument for how many per prompt. `guidance`: argument that
    `guidance_scale` means. `fixed`: arguments passed unless the request's `extra` has them. `fps` is for videos whose
    pipeline takes no frame rate. `final_latents`: the last step's latents are what output_type="latent" returns.
    `traits`: what its modules' arguments are. `exclusive`: it changes its shared modules while it runs, so that no other
    request may be at work meanwhile. `prepare` changes the arguments of a call before it is made; `read` turns what it
    returned (or yielded) into a mapping with `images`, `frames` or `audios`. `appends`: whether partial results are pieces
    that together are the output, or each takes the place of the one before; None is pieces for video and sound.
    `light_glue`: what its call computes outside of its modules is small."""

    media: tuple[str, ...] = ("image",)
    latents: bool = True
    final_latents: bool = True
    count: str | None = None
    guidance: str | None = "guidance_scale"
    needs_prompt: bool = True
    needs_image: bool = False
    needs_mask: bool = False
    several_images: bool = False
    image_mode: Literal["RGB", "RGBA"] = "RGB"
    size_multiple: int = 1
    default_size: tuple[int, int] | None = None  # width, height
    one_size: bool = False  # it draws no other
    fps: float = 16.0
    sample_rate: int | None = None  # of audio, in Hz
    fixed: Mapping[str, Json] = field(default_factory=dict)
    traits: Traits = field(default_factory=Traits)
    exclusive: bool = False
    prepare: Callable[[dict[str, Json]], dict[str, Json]] | None = None
    read: Callable[[Json], Json] | None = None
    appends: bool | None = None
    light_glue: bool = False

    @property
    def sized_by_image(self) -> bool:
        """What it draws has the size of the picture that it starts from: it takes no other."""
        return self.needs_image and self.default_size is None


def recipe_for(pipe: DiffusionPipeline, signature: CallSignature) -> Recipe:
    """The recipe of a loaded pipeline."""
    name = type(pipe).__name__
    recipe = _from_signature(pipe, name, signature)
    prefix = max((p for p in _FAMILIES if name.startswith(p)), key=len, default=None)
    return recipe if prefix is None else _FAMILIES[prefix](pipe, recipe)


def _from_signature(pipe: DiffusionPipeline, name: str, signature: CallSignature) -> Recipe:
    has_decoder = any(part in pipe.components for part in _DECODERS)
    return Recipe(
        exclusive=any(word in name for word in _CHANGES_MODULES),
        light_glue=_light_glue(pipe, name),
        media=_media(pipe, signature),
        latents=has_decoder and "output_type" in signature and not name.startswith(_NO_LATENTS),
        count=signature.first("num_images_per_prompt", "num_videos_per_prompt", "num_waveforms_per_prompt"),
        guidance=signature.first("guidance_scale"),
        needs_prompt="prompt" in signature,
        needs_image="image" in signature
        and ("image" not in signature.defaults or any(word in name for word in _NEEDS_IMAGE)),
        needs_mask="mask_image" in signature,
        several_images=name.startswith(_SEVERAL_IMAGES),
        size_multiple=_size_multiple(pipe),
        default_size=_default_size(pipe, signature),
        sample_rate=library.sample_rate(pipe),
    )


def _light_glue(pipe: DiffusionPipeline, name: str) -> bool:
    """Known of the library's pipelines and of our own; code that comes with a model or a plugin may compute anything."""
    known = type(pipe).__module__.startswith(("diffusers.", "stages."))
    return known and parking.covers(pipe) and not name.startswith(_COMPUTES_ITSELF)


def _media(pipe: DiffusionPipeline, signature: CallSignature) -> tuple[str, ...]:
    video = signature.first("num_videos_per_prompt", "num_frames", "video_length") or "video_processor" in vars(pipe)
    audio = signature.first("num_waveforms_per_prompt", "audio_length_in_s", "audio_end_in_s", "audio_duration")
    if video:
        return ("video", "audio") if "vocoder" in pipe.components else ("video",)
    return ("audio",) if audio or "vocoder" in pipe.components else ("image",)


def _size_multiple(pipe: DiffusionPipeline) -> int:
    """UNet pipelines check for 8 whatever their VAE; the others need whole tokens, and their processor must not round."""
    whole_tokens = library.scale_factor(pipe) * library.patch_size(pipe)
    return math.lcm(whole_tokens, library.processor_factor(pipe), 8 if "unet" in pipe.components else 1)


def _default_size(pipe: DiffusionPipeline, signature: CallSignature) -> tuple[int, int] | None:
    width, height = signature.defaults.get("width"), signature.defaults.get("height")
    if isinstance(width, int) and isinstance(height, int):
        return width, height
    if "width" not in signature or "height" not in signature:
        return None
    width, height = library.attribute(pipe, "default_width"), library.attribute(pipe, "default_height")
    if width and height:
        return int(width), int(height)
    sample = library.attribute(pipe, "default_sample_size") or library.denoiser_setting(pipe, "sample_size")
    if sample is None:
        return None
    rows, columns = sample if isinstance(sample, (list, tuple)) else (sample, sample)
    scale = library.scale_factor(pipe)
    return int(columns) * scale, int(rows) * scale


# --- families ---------------------------------------------------------------------------------------------------------


_MASKED: Final = Traits(masked={"encoder_hidden_states": "encoder_attention_mask"})


def _binned(*sample_sizes: int) -> Callable[[DiffusionPipeline, Recipe], Recipe]:
    """The pipeline draws at the nearest trained size and resizes, so any size will do; for denoisers of other sizes it
    has no table and raises unless told not to."""

    def correct(pipe: DiffusionPipeline, recipe: Recipe) -> Recipe:
        if library.denoiser_setting(pipe, "sample_size") in sample_sizes:
            return replace(recipe, size_multiple=1)
        return replace(recipe, fixed={"use_resolution_binning": False})

    return correct


def _sana(pipe: DiffusionPipeline, recipe: Recipe) -> Recipe:
    recipe = replace(recipe, traits=_MASKED)
    multiple = math.lcm(recipe.size_multiple, 32)  # checked as a constant
    return _binned(16, 32, 64, 128)(pipe, replace(recipe, size_multiple=multiple))


def _pixart(pipe: DiffusionPipeline, recipe: Recipe) -> Recipe:
    recipe = replace(recipe, traits=_MASKED)
    multiple = math.lcm(recipe.size_multiple, 8)  # checked as a constant
    return _binned(32, 64, 128, 256)(pipe, replace(recipe, size_multiple=multiple))


def _at_least(multiple: int, fps: float = 16.0) -> Callable[[DiffusionPipeline, Recipe], Recipe]:
    """`check_inputs` demands a constant, whatever the components say."""

    def correct(_: DiffusionPipeline, recipe: Recipe) -> Recipe:
        return replace(recipe, size_multiple=math.lcm(recipe.size_multiple, multiple), fps=fps)

    return correct


def _qwen_image(pipe: DiffusionPipeline, recipe: Recipe) -> Recipe:
    """Its `guidance_scale` is an input of guidance-distilled checkpoints only; for the others the word means true CFG."""
    distilled = bool(library.denoiser_setting(pipe, "guidance_embeds"))
    layered = type(pipe).__name__.startswith("QwenImageLayered")
    return replace(
        recipe,
        guidance=recipe.guidance if distilled else "true_cfg_scale",
        image_mode="RGBA" if layered else "RGB",
        traits=Traits(masked={"encoder_hidden_states": "encoder_hidden_states_mask"}),
    )


def _glm_image(pipe: DiffusionPipeline, recipe: Recipe) -> Recipe:
    """A prior token stands for 2 x 2 of the denoiser's."""
    return replace(recipe, size_multiple=recipe.size_multiple * 2, needs_image=False)


def _z_image(_: DiffusionPipeline, recipe: Recipe) -> Recipe:
    ragged = Traits(lists=frozenset({"x", "cap_feats"}))
    return replace(recipe, default_size=recipe.default_size or (1024, 1024), traits=ragged)


def _lumina2(_: DiffusionPipeline, recipe: Recipe) -> Recipe:
    return replace(recipe, traits=_MASKED)


def _painter(pipe: DiffusionPipeline, recipe: Recipe) -> Recipe:
    """It has no VAE: its latents are the picture itself, of one size."""
    side = int(library.denoiser_setting(pipe, "sample_size"))
    return replace(recipe, traits=_MASKED, latents=True, size_multiple=side, one_size=True)


def _ltx2(_: DiffusionPipeline, recipe: Recipe) -> Recipe:
    return replace(recipe, size_multiple=math.lcm(recipe.size_multiple, 32), fps=24.0, final_latents=False)


_FAMILIES: Final[Mapping[str, Callable[[DiffusionPipeline, Recipe], Recipe]]] = {
    "AnimateDiff": _at_least(8, fps=8.0),
    "CogVideoX": _at_least(8, fps=8.0),
    "GlmImage": _glm_image,
    "HunyuanVideo": _at_least(16, fps=15.0),
    "Kandinsky5": _at_least(16, fps=24.0),
    "Lumina2": _lumina2,
    "LTX": _at_least(32, fps=24.0),
    "LTX2": _ltx2,
    "Mochi": _at_least(16, fps=30.0),
    "Painter": _painter,
    "PixArt": _pixart,
    "QwenImage": _qwen_image,
    "Sana": _sana,
    "SanaVideo": _at_least(32),
    "SkyReelsV2": _at_least(16, fps=24.0),
    "Wan": _at_least(16),
    "ZImage": _z_image,
}
