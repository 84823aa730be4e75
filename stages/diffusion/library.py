"""What diffusers leaves without a type: reading facts from a pipeline object and its components.

diffusers has no common base for these attributes, so each is asked for here, by name, and may be missing. Nothing else in
the stage looks into a pipeline's attributes.
"""

from collections.abc import Mapping
from typing import Final

import torch
from diffusers import DiffusionPipeline, SchedulerMixin
from diffusers.loaders.lora_base import LoraBaseMixin
from diffusers.models.transformers.transformer_glm_image import GlmImageKVCache

from proto.params import Json

DENOISERS: Final = ("transformer", "transformer_2", "unet", "prior", "decoder")
"""Components that are called at every denoising step, in the order of their importance."""

_ENCODERS = ("text_encoder", "image_encoder", "vision_language_encoder", "language_model")
_AUTOENCODERS = ("vae", "movq", "vqgan")
_SPATIAL = ("vae_scale_factor", "vae_scale_factor_spatial", "vae_spatial_compression_ratio", "movq_scale_factor")
_TEMPORAL = ("vae_scale_factor_temporal", "vae_temporal_compression_ratio", "temporal_compression_ratio")
_SAMPLE_RATES = ("output_sampling_rate", "sampling_rate", "sample_rate")


def modules(pipe: DiffusionPipeline) -> dict[str, torch.nn.Module]:
    """The components with weights, by name."""
    return {name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}


def schedulers(pipe: DiffusionPipeline) -> dict[str, SchedulerMixin]:
    return {name: part for name, part in pipe.components.items() if isinstance(part, SchedulerMixin)}


def denoisers(pipe: DiffusionPipeline) -> dict[str, torch.nn.Module]:
    """By name, the most important first."""
    found = modules(pipe)
    return {name: found[name] for name in DENOISERS if name in found}


def encoders(pipe: DiffusionPipeline) -> dict[str, torch.nn.Module]:
    """The components that read prompts and pictures, by name."""
    return {name: part for name, part in modules(pipe).items() if name.startswith(_ENCODERS)}


def autoencoders(pipe: DiffusionPipeline) -> dict[str, torch.nn.Module]:
    """The components that turn latents into pictures or sound, by name."""
    return {name: part for name, part in modules(pipe).items() if name.endswith(_AUTOENCODERS)}


def lora_parts(pipe: DiffusionPipeline) -> dict[str, torch.nn.Module]:
    """The components that the pipeline's own loader can put adapters into, by name; none for pipelines without one."""
    if not isinstance(pipe, LoraBaseMixin):
        return {}
    found = modules(pipe)
    return {name: found[name] for name in pipe._lora_loadable_modules if name in found}


def unusual_lora(pipe: DiffusionPipeline, folder: str, file: str) -> str | None:
    """What an adapter would change beside adding to layers, for good and for everybody: norms and input sizes, as Flux's
    control adapters do. None if nothing."""
    norms = vars(type(pipe)).get("_control_lora_supported_norm_keys") or next(
        (
            vars(cls)["_control_lora_supported_norm_keys"]
            for cls in type(pipe).__mro__
            if "_control_lora_supported_norm_keys" in vars(cls)
        ),
        None,
    )
    if norms is None:
        return None
    keys = pipe.lora_state_dict(folder, weight_name=file, local_files_only=True)
    state = keys[0] if isinstance(keys, tuple) else keys
    norm = next((key for key in state if any(word in key for word in norms)), None)
    if norm is not None:
        return f"it replaces {norm}"
    for key, weight in state.items():
        name, _, end = key.partition(".lora_A.")
        part, _, path = name.partition(".")
        module = modules(pipe).get(part)
        if not end or module is None:
            continue
        layer = dict(module.named_modules()).get(path)
        if isinstance(layer, torch.nn.Linear) and weight.shape[1] > layer.in_features:
            return f"{name} would need {weight.shape[1]} inputs instead of {layer.in_features}"
    return None


def recast(module: torch.nn.Module) -> bool:
    """Whether pipelines change the module's dtype for the time of a call: half-precision VAEs that would overflow. Others
    must not come in between."""
    return bool(setting(module, "force_upcast")) and next(module.parameters()).dtype is torch.float16


def is_inert(site: str, value: Json) -> bool:
    """Whether an object among a call's arguments changes nothing: GLM-Image's cache when nothing is to be cached, and the
    generator that decoders take for the sake of one that draws noise."""
    if isinstance(value, torch.Generator):
        return site.endswith(".decode")
    if isinstance(value, GlmImageKVCache):
        return all(layer.mode is None for layer in value.caches)
    return False


def use_vae(pipe: DiffusionPipeline, *, slicing: bool, tiling: bool) -> list[str]:
    """Turn the VAE's memory savers on. Returns those that it does not have."""
    found = autoencoders(pipe).values()
    missing = []
    for wanted, switch in ((slicing, "enable_slicing"), (tiling, "enable_tiling")):
        able = [part for part in found if switch in dir(part)]
        if wanted and not able:
            missing.append(switch.removeprefix("enable_"))
        for part in able if wanted else ():
            getattr(part, switch)()
    return missing


def guides(pipe: DiffusionPipeline) -> bool:
    """Whether the running call, at its start, computes an unconditional half beside the conditional one."""
    said = getattr(pipe, "do_classifier_free_guidance", None)
    return bool(said) if said is not None else float(attribute(pipe, "_guidance_scale") or 0) > 1


def attribute(pipe: DiffusionPipeline, *names: str) -> Json:
    """The first of the pipeline's own attributes that exists, or None."""
    own = vars(pipe)
    return next((own[name] for name in names if own.get(name) is not None), None)


def setting(component: Json, *names: str) -> Json:
    """The first of the names that a component's config has a value for, or None. None for a missing component."""
    if component is None:
        return None
    config = vars(component).get("config") or vars(component).get("_internal_dict")
    values = config if isinstance(config, Mapping) else config.to_dict() if config is not None else {}
    return next((values[name] for name in names if values.get(name) is not None), None)


def denoiser_setting(pipe: DiffusionPipeline, *names: str) -> Json:
    """`setting` of the main denoiser."""
    found = denoisers(pipe)
    return setting(next(iter(found.values())), *names) if found else None


def scale_factor(pipe: DiffusionPipeline) -> int:
    """Pixels per latent, along one side."""
    return int(attribute(pipe, *_SPATIAL) or 1)


def unpacked(
    pipe: DiffusionPipeline, latents: torch.Tensor, height: int | None, width: int | None
) -> torch.Tensor | None:
    """Latents of tokens as the decoder has them, for pipelines that pack 2 x 2 of them; None for others."""
    unpack = getattr(pipe, "_unpack_latents", None)
    if unpack is None or height is None or width is None:
        return None
    result = unpack(latents, height, width, scale_factor(pipe))
    return result if isinstance(result, torch.Tensor) else None


def frame_step(pipe: DiffusionPipeline) -> int:
    """Frames per latent frame: videos have k * frame_step + 1 frames."""
    return int(attribute(pipe, *_TEMPORAL) or 1)


def patch_size(pipe: DiffusionPipeline) -> int:
    """Latents per token of the denoiser, along one side."""
    size = denoiser_setting(pipe, "patch_size")
    if isinstance(size, (list, tuple)):
        return int(size[-1])
    return int(size or 1)


def processor_factor(pipe: DiffusionPipeline) -> int:
    """What the pipeline's own image or video processor rounds sizes to, in pixels."""
    return int(setting(attribute(pipe, "image_processor", "video_processor"), "vae_scale_factor") or 1)


def sample_rate(pipe: DiffusionPipeline) -> int | None:
    """Hz of the audio that leaves the last component that has to do with sound, or None if there is none."""
    parts = pipe.components
    said = [setting(parts.get(name), *_SAMPLE_RATES) for name in ("vocoder", "audio_vae", "vae", "unet")]
    rate = next((rate for rate in said if rate is not None), attribute(pipe, "sample_rate", "audio_sampling_rate"))
    return None if rate is None else int(rate)


def planned_steps(pipe: DiffusionPipeline, scheduler: SchedulerMixin | None) -> int:
    """How many steps the running call will make: what the pipeline says, else what its scheduler was set to."""
    said = vars(pipe).get("_num_timesteps")
    if said:
        return int(said)
    if scheduler is None:
        return 0
    state = vars(scheduler)
    timesteps = state.get("timesteps")
    return 0 if timesteps is None else len(timesteps) - int(state.get("_begin_index") or 0)
