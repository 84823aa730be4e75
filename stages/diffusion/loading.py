"""From a pipeline folder to a `Painter`: the pipeline on its device, and all that is known about it.

Only local files are read, and code in a folder is run only where the deploy says so (`stages.diffusion.own_code`).
"""

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import diffusers
import torch
import transformers
from diffusers import DiffusionPipeline
from safetensors import safe_open

from proto.deploy import INPUTS, DiffusionStage, ModelSpec, Offload
from proto.errors import StartError
from proto.ids import StageName
from proto.messages import StageInfo
from proto.params import Json
from stages.demo.models import resolve_model
from stages.devices import usable_device
from stages.diffusion import library, quantization, switches
from stages.diffusion.builtin_pipelines import builtin_model, builtin_pipeline
from stages.diffusion.families import corrected
from stages.diffusion.own_code import OwnCode, find_own_code, own_pipeline_class, private_modules
from stages.diffusion.recipes import Recipe, recipe_for
from stages.diffusion.residence import Residence, find_residence
from stages.diffusion.sharing import sharding
from stages.diffusion.signature import FRAME_RATES, CallSignature, read_signature
from stages.diffusion.step_caches import StepCaches
from stages.engine import LoadContext

_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_STORED: Final = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float32}
_ABSENT: Final = [None, None]
"""What an index says of a component that the folder has not. A stage that gets embeddings needs no text encoder."""
_NEGATIVES: Final = ("negative_prompt_embeds", "negative_generated_prompt_embeds", "negative_kv")  # from companions
_INPUTS: Final = (*INPUTS["diffusion"], *_NEGATIVES)


@dataclass(frozen=True, slots=True)
class Painter:
    """A loaded pipeline. `pipe` is shared: it is copied for each request, and its modules are never changed."""

    stage: StageName
    pipe: DiffusionPipeline
    signature: CallSignature
    recipe: Recipe
    device: torch.device
    dtype: torch.dtype
    info: StageInfo
    step_caches: StepCaches | None = None
    offloaded: bool = False  # hooks of the library move the weights: nobody else may
    residence: Residence | None = None


def load_painter(context: LoadContext) -> Painter:
    """Load the stage's pipeline folder. Raises `StartError` saying what is wrong with the folder or the deploy."""
    assert isinstance(context.spec, DiffusionStage)
    model = context.spec.model
    folder, index = read_index(context)
    code = find_own_code(context.stage, model, folder, index)
    device = usable_device(context)
    dtype = _dtype(context.stage, model, folder, index, device)
    quantizers = quantization.configs(context.stage, model, folder, index, device)
    with private_modules(code):
        pipeline_class = _pipeline_class(context.stage, model, index, code)
        try:
            shared, trusted = sharding(context.spec.parallel), bool(code.files)
            pipe = _load(folder, index, pipeline_class, dtype, context.report, quantizers, shared, trusted=trusted)
        except (OSError, ValueError, RuntimeError) as error:
            raise StartError(
                f"stage {context.stage}: {pipeline_class.__name__} cannot be loaded from {model.path!r}: {error}",
                stage=context.stage,
            ) from error
    step_caches = _throw_switches(pipe, context, device, dtype)
    signature = read_signature(type(pipe))
    recipe = corrected(context.stage, pipe, recipe_for(pipe, signature), context.spec.engine.recipe)
    if "audio" in recipe.media and recipe.sample_rate is None:
        raise StartError(
            f"stage {context.stage}: no component of {model.path!r} says its sample rate", stage=context.stage
        )
    info = _describe(pipe, signature, recipe, device, dtype)
    assert isinstance(context.spec, DiffusionStage)
    offloaded = context.spec.engine.offload is not Offload.NONE
    residence = None if offloaded else find_residence(pipe)
    return Painter(context.stage, pipe, signature, recipe, device, dtype, info, step_caches, offloaded, residence)


def _throw_switches(
    pipe: DiffusionPipeline, context: LoadContext, device: torch.device, dtype: torch.dtype
) -> StepCaches | None:
    assert isinstance(context.spec, DiffusionStage)
    try:
        return switches.throw(pipe, context.spec.engine, device, dtype, context.report)
    except switches.Refused as error:
        raise StartError(f"stage {context.stage}: {error}", stage=context.stage, field=error.field) from error


def load_denoisers(context: LoadContext) -> dict[str, torch.nn.Module]:
    """Only the pipeline's denoisers, on their device, by name: what a rank needs that is not the first."""
    folder, index = read_index(context)
    device = usable_device(context)
    dtype = _dtype(context.stage, context.spec.model, folder, index, device)
    assert isinstance(context.spec, DiffusionStage)
    further, attention = sharding(context.spec.parallel), context.spec.engine.attention
    denoisers: dict[str, torch.nn.Module] = {
        name: cls.from_pretrained(folder, subfolder=name, local_files_only=True, dtype=dtype, **further).to(device)
        for name, cls in denoiser_classes(index).items()
    }
    if attention is not None:
        switches.set_attention(denoisers, attention, device, dtype)
    return denoisers


def denoiser_classes(index: Mapping[str, Json]) -> dict[str, Json]:
    """The classes of the denoisers, by name. Not of those whose code is the folder's own."""
    named = {name: index[name] for name in library.DENOISERS if isinstance(index.get(name), list)}
    return {name: found for name, entry in named.items() if (found := _model_class(entry)) is not None}


def read_index(context: LoadContext) -> tuple[Path, Mapping[str, Json]]:
    """The pipeline's folder, and what its model_index.json says. Raises `StartError`."""
    stage, path = context.stage, context.spec.model.path
    if path is None:
        raise StartError(f"stage {stage}: model.path is not set; name a diffusers pipeline folder", stage=stage)
    folder = resolve_model(path, context.report)
    file = folder / "model_index.json"
    if not file.is_file():
        raise StartError(
            f"stage {stage}: model.path {path!r} is no diffusers pipeline folder: it has no model_index.json",
            stage=stage,
        )
    return folder, json.loads(file.read_text(encoding="utf-8"))


def _pipeline_class(
    stage: StageName, model: ModelSpec, index: Mapping[str, Json], code: OwnCode
) -> type[DiffusionPipeline]:
    if code.pipeline is not None and model.pipeline_class is None:
        return own_pipeline_class(stage, code)
    name = model.pipeline_class or index.get("_class_name")
    if not isinstance(name, str):
        raise StartError(
            f"stage {stage}: {model.path!r} names its pipeline as {name!r}, which is neither a class nor [file, class]",
            stage=stage,
        )
    found = getattr(diffusers, name, None) if name in dir(diffusers) else builtin_pipeline(name)
    if not (isinstance(found, type) and issubclass(found, DiffusionPipeline)):
        origin = "model.pipeline_class" if model.pipeline_class else "model_index.json"
        raise StartError(
            f"stage {stage}: {origin} names {name!r}, which is no pipeline of diffusers {diffusers.__version__}",
            stage=stage,
        )
    return found


def _dtype(
    stage: StageName, model: ModelSpec, folder: Path, index: Mapping[str, Json], device: torch.device
) -> torch.dtype:
    """The deploy's, or for `auto` that of the denoiser's weights; a CPU gets float32 for float16, which it is slow at."""
    if model.dtype != "auto":
        return _DTYPES[model.dtype]
    for name in (*library.DENOISERS, *sorted(set(index) - set(library.DENOISERS))):
        for file in sorted((folder / name).glob("*.safetensors")):
            with safe_open(file, framework="pt") as weights:
                stored = weights.get_slice(next(iter(weights.keys()))).get_dtype()
            if stored not in _STORED:
                raise StartError(
                    f"stage {stage}: {name} is stored as {stored}; set model.dtype to one of {', '.join(_DTYPES)}",
                    stage=stage,
                )
            dtype = _STORED[stored]
            return torch.float32 if device.type == "cpu" and dtype is torch.float16 else dtype
    return torch.float32


def _load(
    folder: Path,
    index: Mapping[str, Json],
    pipeline_class: type[DiffusionPipeline],
    dtype: torch.dtype,
    report: Callable[[str, float | None], None],
    quantizers: Mapping[str, quantization.Quantized],
    shared: Mapping[str, Json],
    *,
    trusted: bool = False,
) -> DiffusionPipeline:
    """Load the components that have weights one by one, so that a long load shows its progress; then the rest. `shared` are
    further arguments for the denoisers."""
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    wanted = inspect.signature(pipeline_class.__init__).parameters
    classes = {
        name: found
        for name, entry in index.items()
        if name in wanted and isinstance(entry, list) and (found := _model_class(entry)) is not None
    }
    parts: dict[str, torch.nn.Module] = {}
    for done, (name, cls) in enumerate(classes.items()):
        report(f"loading {name} ({cls.__name__})", 0.9 * done / len(classes))
        if name in quantizers:
            parts[name] = quantizers[name].load(folder, name, cls, dtype)
            continue
        further = shared if name in library.DENOISERS else {}
        parts[name] = cls.from_pretrained(folder, subfolder=name, local_files_only=True, dtype=dtype, **further)
    report(f"assembling {pipeline_class.__name__}", 0.9)
    absent = dict.fromkeys(name for name in wanted if index.get(name) == _ABSENT and _is_required(wanted[name]))
    pipe = pipeline_class.from_pretrained(
        folder, dtype=dtype, local_files_only=True, trust_remote_code=trusted, **parts, **absent
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _is_required(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD


def _model_class(entry: Json) -> Json:
    """The class of a component with weights; None for what the pipeline loads itself."""
    library_name, name = entry
    for module, base in ((diffusers, diffusers.ModelMixin), (transformers, transformers.PreTrainedModel)):
        if library_name == module.__name__ and name in dir(module):
            found = getattr(module, name)
            return found if isinstance(found, type) and issubclass(found, base) else None
    return builtin_model(library_name, name)


def _describe(
    pipe: DiffusionPipeline, signature: CallSignature, recipe: Recipe, device: torch.device, dtype: torch.dtype
) -> StageInfo:
    width, height = recipe.default_size or (None, None)
    steps = signature.defaults.get("num_inference_steps")
    return StageInfo(
        model=type(pipe).__name__,
        parameters=sum(p.numel() for module in library.modules(pipe).values() for p in module.parameters()),
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        inputs=tuple(name for name in _INPUTS if name in signature),
        outputs=(*recipe.media, *(("latents",) if recipe.latents else ())),
        accepts=tuple(sorted(signature.plain)),
        params=(*_params(signature, recipe), *(("lora", "lora_scale") if library.lora_parts(pipe) else ())),
        size_multiple=recipe.size_multiple if "width" in signature or "height" in signature else 1,
        default_width=width,
        default_height=height,
        default_steps=steps if isinstance(steps, int) else None,
        fps=_fps(signature, recipe) if "video" in recipe.media else None,
        frame_step=library.frame_step(pipe) if "num_frames" in signature else 1,
    )


def _fps(signature: CallSignature, recipe: Recipe) -> float:
    """The pipeline's own frame rate, where its call has one, else its family's."""
    name = signature.first(*FRAME_RATES)
    own = signature.defaults.get(name) if name is not None else None
    return float(own) if isinstance(own, int | float) else recipe.fps


def _params(signature: CallSignature, recipe: Recipe) -> tuple[str, ...]:
    same_name = ("width", "height", "num_inference_steps", "negative_prompt", "strength")
    several = recipe.count or signature.first("prompt", "batch_size")
    return (
        *(name for name in same_name if name in signature),
        *(("guidance_scale",) if recipe.guidance else ()),
        *(("seed",) if "generator" in signature else ()),
        *(("num_images",) if several else ()),
        *(("extra",) if signature.plain else ()),
        *(("previews",) if {"image", "video"} & set(recipe.media) else ()),
    )
