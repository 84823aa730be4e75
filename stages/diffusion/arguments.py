"""From a job to the pipeline's arguments. `check` refuses before any work; `build` makes them, tensors on the device.

Precedence, strongest first: the job's inputs, its params, its `extra`, the recipe's `fixed`, the pipeline's own defaults.
An argument that nobody set is not passed at all, so that the pipeline's default stands; a 0 is passed like any other value.
"""

import secrets
from collections.abc import Hashable, Mapping

import msgspec
import torch

from proto.errors import InvalidRequest
from proto.messages import Chat, Images, Text
from proto.params import MAX_SEED, DiffusionParams, Json, set_fields
from proto.suggest import hint
from stages.diffusion import tensor_inputs
from stages.diffusion.budget import Amount
from stages.diffusion.loading import Painter
from stages.engine import Job

_SAME_NAME = ("width", "height", "num_inference_steps", "strength")
_FRAMES = ("num_frames", "video_length")
_SEED_RANGE = 2**31


def check(job: Job, painter: Painter) -> DiffusionParams:
    """The job's params. Raises `InvalidRequest` naming the field, if the pipeline could not do what the job asks."""
    if not isinstance(job.params, DiffusionParams):
        raise _refusal(painter, "takes the parameters of a diffusion stage, not of an AR stage", "params")
    _check_params(job.params, painter)
    _check_outputs(job, painter)
    _check_inputs(job, painter)
    return job.params


def choose_seeds(params: DiffusionParams) -> tuple[int, ...]:
    """One seed an image: `seed + k`, from a random start if none was asked for."""
    first = secrets.randbelow(_SEED_RANGE) if params.seed is None else params.seed
    return tuple(range(first, first + (params.num_images or 1)))


def pixels(params: DiffusionParams, painter: Painter, given: int = 0) -> int:
    """Of all that the request draws: width x height x frames x images. 0 for what has no size. `given`: see `amount`."""
    return amount(params, painter, given).total if _size(params, painter) or given else 0


def amount(params: DiffusionParams, painter: Painter, given: int = 0) -> Amount:
    """Pixels of all images and the frames of each; of what has no size, how many there are of it. `given` are the pixels of
    the picture whose size the drawn ones get (`given_pixels`)."""
    asked = (params.extra or {}).get("num_frames", painter.signature.defaults.get("num_frames"))
    frames = asked if isinstance(asked, int) and asked > 0 else 1
    return Amount((given or _size(params, painter) or 1) * (params.num_images or 1), frames)


def given_pixels(job: Job, painter: Painter) -> int:
    """Of the job's largest picture, where what is drawn gets the size of the picture that it starts from; else 0."""
    if not painter.recipe.sized_by_image:
        return 0
    return max((height * width for height, width in tensor_inputs.picture_sizes(job, "image")), default=0)


def _size(params: DiffusionParams, painter: Painter) -> int:
    width, height = painter.recipe.default_size or (0, 0)
    return (params.width or width) * (params.height or height)


def kind(job: Job) -> Hashable:
    """Equal for requests whose calls go together from the first to the last: all but words, seeds and how many."""
    params = job.params
    if not isinstance(params, DiffusionParams):
        return None
    same = msgspec.structs.replace(params, seed=None, num_images=None, negative_prompt=None)
    negative = bool(params.negative_prompt) or "negative_prompt" in job.inputs
    sizes = tuple(tensor_inputs.picture_sizes(job, "image"))
    words = msgspec.msgpack.encode(same, order="deterministic")
    return words, negative, sizes, frozenset(job.inputs), frozenset(job.payloads)


def build(job: Job, params: DiffusionParams, seeds: tuple[int, ...], painter: Painter) -> dict[str, Json]:
    """Keyword arguments for the pipeline's `__call__`, but for its output type and callback."""
    arguments: dict[str, Json] = {**painter.recipe.fixed, **_extra(params, painter)}
    arguments.update({n: v for n, v in set_fields(params).items() if n in _SAME_NAME})
    if params.guidance_scale is not None and painter.recipe.guidance is not None:
        arguments[painter.recipe.guidance] = params.guidance_scale
    arguments.update(tensor_inputs.build(job, painter))
    _add_texts(arguments, job, params, painter)
    if "generator" in painter.signature:
        generators = [torch.Generator("cpu").manual_seed(seed) for seed in seeds]
        arguments["generator"] = generators[0] if len(generators) == 1 else generators
    if len(seeds) > 1:
        _ask_for_several(arguments, len(seeds), painter)
    return arguments if painter.recipe.prepare is None else painter.recipe.prepare(arguments)


# --- checks -----------------------------------------------------------------------------------------------------------


def _refusal(painter: Painter, problem: str, field: str) -> InvalidRequest:
    return InvalidRequest(f"stage {painter.stage}: {painter.info.model} {problem}", stage=painter.stage, field=field)


def _check_params(params: DiffusionParams, painter: Painter) -> None:
    known = painter.info.params or ()
    for name in set_fields(params):
        if name not in known and not (name == "num_images" and params.num_images == 1):
            raise _refusal(painter, f"has no use for {name}; leave it out", name)
    for name in params.extra or {}:
        if name not in painter.signature.plain:
            words = f"takes no extra argument {name!r}; {hint(name, painter.info.accepts, 'arguments')}"
            raise _refusal(painter, words, f"extra.{name}")
        _check_no_scale(name, (params.extra or {})[name], painter)
        _check_frames(name, (params.extra or {})[name], painter)
    multiple = painter.info.size_multiple
    for name, value in (("width", params.width), ("height", params.height)):
        if value is not None and value % multiple:
            below = value - value % multiple
            near_sizes = f"{below} or {below + multiple}" if below else f"{multiple}"
            raise _refusal(painter, f"needs a {name} that is a multiple of {multiple}, not {value}: {near_sizes}", name)
    usual = painter.recipe.default_size
    if painter.recipe.one_size and usual and (params.width or usual[0], params.height or usual[1]) != usual:
        asked = f"{params.width or usual[0]} x {params.height or usual[1]}"
        raise _refusal(painter, f"draws {usual[0]} x {usual[1]} pixels only, not {asked}", "width")
    if params.seed is not None and params.seed + (params.num_images or 1) - 1 > MAX_SEED:
        raise _refusal(painter, f"cannot use seeds beyond {MAX_SEED}; lower the seed {params.seed}", "seed")


def _check_no_scale(name: str, value: Json, painter: Painter) -> None:
    """Pipelines apply such a scale to shared modules for as long as they like."""
    if name.endswith("attention_kwargs") and isinstance(value, dict) and "scale" in value:
        raise _refusal(
            painter, "takes the scale of an adapter as lora_scale, not in its attention arguments", f"extra.{name}"
        )


def _check_frames(name: str, value: Json, painter: Painter) -> None:
    """What a request takes is reckoned with this number."""
    if name in _FRAMES and (type(value) is not int or value < 1):
        raise _refusal(painter, f"takes as {name} a whole number from 1 on, not {value!r:.100}", f"extra.{name}")


def _check_outputs(job: Job, painter: Painter) -> None:
    wanted = {*job.emit, *job.publish}
    for name in sorted(wanted - set(painter.info.outputs)):
        raise _refusal(painter, f"has no output {name!r}, only {', '.join(painter.info.outputs)}", "outputs")
    if "latents" in wanted and len(wanted) > 1 and not painter.recipe.final_latents:
        raise _refusal(painter, "gives either latents or decoded outputs in one call; ask for one of them", "outputs")


def _check_inputs(job: Job, painter: Painter) -> None:
    given = {*job.inputs, *job.payloads}
    for name in sorted(given - set(painter.info.inputs)):
        raise _refusal(painter, f"has no input {name!r}, only {', '.join(painter.info.inputs)}", name)
    for name in ("prompt", "negative_prompt"):
        if name in job.payloads or not isinstance(job.inputs.get(name, Text(text="")), Text | Chat):
            raise _refusal(painter, f"takes its {name} as text", name)
    for name in tensor_inputs.PICTURES:
        if not isinstance(job.inputs.get(name, Images(tensor=0)), Images):
            raise _refusal(painter, f"takes its {name} as a picture", name)
    embeds = [name for name in given if name.endswith("prompt_embeds") and not name.startswith("negative_")]
    if painter.recipe.needs_prompt and "prompt" not in given and not embeds:
        raise _refusal(painter, "needs a prompt", "prompt")
    if "kv" in painter.signature and "kv" not in job.payloads:
        raise _refusal(painter, "draws from a prompt's keys and values; link its input kv to an AR stage's kv", "kv")
    if painter.recipe.needs_image and "image" not in given:
        raise _refusal(painter, "needs an image to start from", "image")
    if painter.recipe.needs_mask and "mask_image" not in given:
        raise _refusal(
            painter, "needs a mask: white, or transparent, where the image is to be painted anew", "mask_image"
        )
    least = painter.recipe.size_multiple
    for height, width in tensor_inputs.picture_sizes(job, "image") if painter.recipe.sized_by_image else ():
        if min(height, width) < least:
            raise _refusal(painter, f"needs an image of {least}x{least} pixels at least, not {width}x{height}", "image")
    pictures = tensor_inputs.count_pictures(job, "image")
    if pictures > 1 and not painter.recipe.several_images:
        raise _refusal(painter, f"starts from one image, not from {pictures}", "image")
    several = (job.params.num_images or 1) if isinstance(job.params, DiffusionParams) else 1
    if several > 1 and painter.recipe.count is None and embeds:
        raise _refusal(painter, "makes one item from given embeddings; num_images must be 1", "num_images")


# --- arguments --------------------------------------------------------------------------------------------------------


def _extra(params: DiffusionParams, painter: Painter) -> Mapping[str, Json]:
    """JSON has no tuples, but some pipelines add theirs to one another."""
    return {
        name: tuple(value) if name in painter.signature.tuples and isinstance(value, list) else value
        for name, value in (params.extra or {}).items()
    }


def _text(job: Job, name: str) -> str | None:
    """The input's text; of a chat, what the user said last."""
    value = job.inputs.get(name)
    if isinstance(value, Text):
        return value.text
    if isinstance(value, Chat):
        return next((m.content for m in reversed(value.messages) if m.role == "user"), "")
    return None


def _add_texts(arguments: dict[str, Json], job: Job, params: DiffusionParams, painter: Painter) -> None:
    """Pipelines refuse a text beside its embeddings, and some have a text as default: embeddings win, texts become None."""
    negative = _text(job, "negative_prompt")
    texts = {
        "prompt": _text(job, "prompt"),
        "negative_prompt": params.negative_prompt if negative is None else negative,
    }
    for name, text in texts.items():
        if name not in painter.signature:
            continue
        embedded = f"{name}_embeds" in arguments
        if text is not None and not embedded:
            arguments[name] = text
        elif name not in painter.signature.defaults or (embedded and painter.signature.defaults[name] is not None):
            arguments[name] = None


def _ask_for_several(arguments: dict[str, Json], count: int, painter: Painter) -> None:
    if painter.recipe.count is not None:
        arguments[painter.recipe.count] = count
    elif "prompt" in painter.signature:
        for name in ("prompt", "negative_prompt"):
            if isinstance(arguments.get(name), str):
                arguments[name] = [arguments[name]] * count
    else:
        arguments["batch_size"] = count
