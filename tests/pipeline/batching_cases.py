"""Families of pipelines for the tests of step batching: what to ask of each, and the same asked of the stock pipeline."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from diffusers import DiffusionPipeline

from proto.deploy import DiffusionEngineSpec, DiffusionStage, Kind, LimitsSpec, ModelSpec
from proto.ids import Epoch, LeaseId, RequestId, StageName
from proto.messages import Payload, Text
from proto.params import DiffusionParams, Json
from proto.torch_tensors import from_wire, to_wire
from stages.diffusion import arguments, library
from stages.diffusion.engine import DiffusionEngine
from stages.diffusion.loading import Painter
from stages.engine import Event, Failed, Finished, Job, LoadContext, PulledPayload
from tests.models import tiny_diffusion as tiny
from tests.models.tiny_diffusion import Builder
from tests.models.tiny_diffusion_families import FAMILIES as MORE


@dataclass(frozen=True)
class Family:
    """`base`: asked of every request. `sizes`: (width, height), the usual one first. `ragged`: all sizes go into one
    forward. `inputs`: payloads instead of a prompt's encoding. `absent`: components the folder has not."""

    build: Builder
    base: Mapping[str, Json] = field(default_factory=dict)
    sizes: tuple[tuple[int, int], ...] = ((32, 32), (48, 32))
    guidance: tuple[float, ...] = (1.0, 3.0, 5.0)
    negative: bool = True
    several: bool = True
    output: str = "image"
    ragged: bool = False
    payloads: Callable[[int, tuple[int, int]], Mapping[str, PulledPayload]] | None = None
    absent: tuple[str, ...] = ()
    tolerance: float = 1e-5


def payload(name: str, tensor: torch.Tensor) -> PulledPayload:
    kind = Kind.TOKENS if tensor.dtype is torch.int64 else Kind.HIDDEN
    descriptor = Payload(
        lease=LeaseId(1), source=StageName("thinker"), replica=0, epoch=Epoch(1), kind=kind.value, items=()
    )
    return PulledPayload(descriptor, {name: to_wire(tensor)})


def _flux2_payloads(number: int, size: tuple[int, int]) -> Mapping[str, PulledPayload]:
    embeds = torch.randn((7, 32), generator=torch.Generator().manual_seed(number))
    return {"prompt_embeds": payload("prompt_embeds", embeds)}


def _glm_payloads(number: int, size: tuple[int, int]) -> Mapping[str, PulledPayload]:
    width, height = size
    count = (width // 4) * (height // 4)
    ids = torch.randint(0, 32, (count,), generator=torch.Generator().manual_seed(number))
    return {"prior_token_ids": payload("prior_token_ids", ids)}


CASES: Mapping[str, Family] = {
    "sd": Family(tiny.build_tiny_sd),
    "sd_pndm": Family(MORE["sd_pndm"]),
    "sd_dpm": Family(MORE["sd_dpm"]),
    "sdxl": Family(MORE["sdxl"], tolerance=1e-4),
    "sd3": Family(tiny.build_tiny_sd3),
    "flux": Family(tiny.build_tiny_flux, negative=False),
    "flux2": Family(
        MORE["flux2"], negative=False, several=False, payloads=_flux2_payloads, absent=("text_encoder", "tokenizer")
    ),
    "qwen_image": Family(MORE["qwen_image"]),
    "z_image": Family(MORE["z_image"], guidance=(0.0, 3.0, 5.0), ragged=True),
    "lumina2": Family(MORE["lumina2"]),
    "sana": Family(MORE["sana"], base={"extra": {"complex_human_instruction": None}}, sizes=((32, 32), (64, 32))),
    "pixart": Family(tiny.build_tiny_pixart),
    "wan": Family(tiny.build_tiny_wan, base={"extra": {"num_frames": 5}}, sizes=((32, 16), (16, 16)), output="video"),
    "glm_image": Family(
        MORE["glm_image"],
        negative=False,
        several=False,
        payloads=_glm_payloads,
        absent=("processor", "vision_language_encoder"),
    ),
    "stable_audio": Family(
        MORE["stable_audio"], base={"extra": {"audio_end_in_s": 2.0}}, sizes=(), output="audio", tolerance=1e-4
    ),
}

PROMPTS = ("a red fox", "an old lighthouse in a storm", "two cats", "a bowl of fruit on a wooden table")


def request(family: Family, number: int, steps: int, **more: Json) -> Job:
    """The `number`-th request of a mixed lot. Words that are not given vary with the number."""
    size = more.pop("size", family.sizes[number % 2 if len(family.sizes) > 1 else 0] if family.sizes else None)
    asked: dict[str, Json] = {
        "seed": 100 + 10 * number,
        "num_inference_steps": steps,
        "guidance_scale": family.guidance[number % len(family.guidance)],
        **family.base,
        **({} if size is None else {"width": size[0], "height": size[1]}),
        **({"negative_prompt": "grey and dull"} if family.negative and number % 2 else {}),
        **({"num_images": 2} if family.several and number == 2 else {}),
        **more,
    }
    payloads = {} if family.payloads is None else family.payloads(number, size or (0, 0))
    texts = {} if "prompt_embeds" in payloads else {"prompt": Text(text=PROMPTS[number % len(PROMPTS)])}
    return Job(
        RequestId(f"r{number}"), texts, DiffusionParams(**asked), emit=(family.output, "latents"), payloads=payloads
    )


def load(folder: Path, pipeline_class: str | None = None, **spec: Json) -> DiffusionEngine:
    """Without a memory profile, unless it is asked for: most tests need none."""
    engine = DiffusionEngine()
    model = ModelSpec(path=str(folder), pipeline_class=pipeline_class)
    stage = DiffusionStage(model=model, engine=DiffusionEngineSpec(**{"memory_profile": False, **spec}))
    engine.load(LoadContext(StageName("painter"), stage, LimitsSpec(), "cpu", (), lambda note, done: None))
    return engine


class Stock:
    """The same pipeline as the library gives it, with its denoisers' forwards counted."""

    def __init__(self, folder: Path, family: Family) -> None:
        absent = dict.fromkeys(family.absent)
        self.pipe = DiffusionPipeline.from_pretrained(folder, local_files_only=True, **absent)
        self.pipe.set_progress_bar_config(disable=True)
        self.forwards = 0
        for module in library.denoisers(self.pipe).values():
            module.register_forward_pre_hook(self._count)

    def _count(self, module: torch.nn.Module, inputs: tuple[Json, ...]) -> None:
        self.forwards += 1

    def latents(self, job: Job, painter: Painter) -> torch.Tensor:
        """Of the request alone. `painter` says which arguments the job means; nothing of it is run."""
        assert isinstance(job.params, DiffusionParams)
        kwargs = arguments.build(job, job.params, arguments.choose_seeds(job.params), painter)
        with torch.inference_mode():
            return next(iter(self.pipe(**kwargs, output_type="latent").values()))

    def decoded(self, job: Job, painter: Painter) -> Json:
        assert isinstance(job.params, DiffusionParams)
        kwargs = arguments.build(job, job.params, arguments.choose_seeds(job.params), painter)
        with torch.inference_mode():
            return next(iter(self.pipe(**kwargs).values()))


def drive(engine: DiffusionEngine, arrivals: Mapping[int, Job]) -> list[Event]:
    """Submit each job after so many steps of the engine; run until all have ended."""
    waiting = dict(sorted(arrivals.items()))
    events: list[Event] = []
    done = 0
    while waiting or engine.has_work:
        while waiting and next(iter(waiting)) <= done:
            engine.submit(waiting.pop(next(iter(waiting))))
        if engine.has_work:
            events += engine.step()
        done += 1
    return events


def ends(events: list[Event]) -> dict[str, Finished | Failed]:
    return {event.request: event for event in events if isinstance(event, Finished | Failed)}


def latents_of(end: Finished | Failed) -> torch.Tensor:
    """The job's second output."""
    assert isinstance(end, Finished), end
    return from_wire(end.tensors[1])


def forwards(engine: DiffusionEngine) -> int:
    return engine.call("stats", {})["forwards"]
