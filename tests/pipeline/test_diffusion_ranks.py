"""A diffusion stage on two ranks draws what it draws on one, in batches too; what its model cannot share out is refused."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import pytest
import torch

from proto.deploy import (
    ContextParallelSpec,
    DiffusionEngineSpec,
    DiffusionParallelSpec,
    DiffusionStage,
    LimitsSpec,
    ModelSpec,
)
from proto.errors import InvalidRequest, StartError
from proto.ids import RequestId, StageName
from proto.messages import Text
from proto.params import DiffusionParams
from stages.diffusion.engine import DiffusionEngine
from stages.engine import Finished, Job, LoadContext
from stages.parallel.tensors import bundled
from tests.models.tiny_diffusion import build_tiny_flux, build_tiny_sd, build_tiny_wan
from tests.models.tiny_diffusion_families import build_tiny_qwen_image

BUILD: Final = {"flux": build_tiny_flux, "qwen": build_tiny_qwen_image, "wan": build_tiny_wan}
PROMPTS: Final = ("a small red boat", "a cat", "a blue lake, and the sun goes down behind the hills")
TOLERANCE: Final = 1e-4


def context(path: Path, ranks: int, parallel: DiffusionParallelSpec | None = None) -> LoadContext:
    shared = parallel or DiffusionParallelSpec(context=ContextParallelSpec(ulysses=ranks), timeout=120)
    stage = DiffusionStage(
        model=ModelSpec(path=str(path), dtype="float32"), engine=DiffusionEngineSpec(max_rows=4), parallel=shared
    )
    devices = ("cpu",) * ranks if ranks > 1 else ()
    return LoadContext(StageName("painter"), stage, LimitsSpec(), "cpu", (), lambda note, done: None, devices)


def drawn(engine: DiffusionEngine, size: int, prompts: tuple[str, ...] = PROMPTS) -> list[np.ndarray]:
    """Latents of one request for each prompt, of different step counts, all at once."""
    for number, prompt in enumerate(prompts):
        params = DiffusionParams(seed=number, num_inference_steps=2 + number, width=size, height=size)
        engine.submit(Job(RequestId(str(number)), {"prompt": Text(text=prompt)}, params, emit=("latents",)))
    found: dict[str, np.ndarray] = {}
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, Finished):
                found[event.request] = np.frombuffer(event.tensors[0].data, np.float32)
    return [found[str(number)] for number in range(len(prompts))]


@pytest.fixture(scope="module")
def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[DiffusionEngine, DiffusionEngine]]:
    """The same model on one rank and on two: Flux, or the family that a test names. A process can be in one group at a time."""
    family = getattr(request, "param", "flux")
    yield from pair(tmp_path_factory.mktemp("models") / family, family)


def pair(path: Path, family: str) -> Iterator[tuple[DiffusionEngine, DiffusionEngine]]:
    BUILD[family](path)
    one, two = DiffusionEngine(), DiffusionEngine()
    try:
        one.load(context(path, 1))
        two.load(context(path, 2))
        yield one, two
    finally:
        two.close()
        one.close()


def test_two_ranks_draw_what_one_draws_with_requests_in_company(
    engines: tuple[DiffusionEngine, DiffusionEngine],
) -> None:
    one, two = engines
    alone = [drawn(one, 64, PROMPTS[: number + 1])[number] for number in range(len(PROMPTS))]
    before = stats(two)
    together = drawn(two, 64)
    assert stats(two) - before < sum(range(2, 2 + len(PROMPTS)))  # they shared forwards
    for found, expected in zip(together, alone, strict=True):
        assert np.abs(found - expected).max() < TOLERANCE


def stats(engine: DiffusionEngine) -> int:
    return int(engine.call("stats", {})["forwards"])


def test_each_rank_computes_its_share_of_the_tokens_alone(engines: tuple[DiffusionEngine, DiffusionEngine]) -> None:
    seen = []
    for engine in engines:
        assert engine._painter is not None
        block = engine._painter.pipe.transformer.transformer_blocks[0]
        lengths: list[int] = []
        handle = block.register_forward_pre_hook(
            lambda module, args, kwargs, lengths=lengths: lengths.append(kwargs["hidden_states"].shape[1]),
            with_kwargs=True,
        )
        drawn(engine, 64, PROMPTS[:1])
        handle.remove()
        seen.append(set(lengths))
    (whole,), (half,) = seen
    assert half * 2 == whole


def test_an_abort_leaves_the_ranks_in_step(engines: tuple[DiffusionEngine, DiffusionEngine]) -> None:
    one, two = engines
    params = DiffusionParams(seed=1, num_inference_steps=8, width=64, height=64)
    two.submit(Job(RequestId("gone"), {"prompt": Text(text="gone")}, params, emit=("latents",)))
    for _ in range(5):
        two.step()
    two.abort(RequestId("gone"))
    assert np.abs(drawn(two, 64)[0] - drawn(one, 64)[0]).max() < TOLERANCE


@pytest.mark.parametrize("method", ["load_lora", "sleep"])
def test_what_would_change_one_rank_alone_is_refused(
    engines: tuple[DiffusionEngine, DiffusionEngine], method: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"call '{method}' is not possible with `parallel`"):
        engines[1].call(method, {})


@pytest.mark.slow
@pytest.mark.parametrize(("engines", "size"), [("qwen", 64), ("wan", 32)], indirect=["engines"])
def test_other_families_draw_on_two_ranks_what_they_draw_on_one(
    engines: tuple[DiffusionEngine, DiffusionEngine], size: int
) -> None:
    """QwenImage with prompts and heads that do not divide by two, Wan with frames."""
    one, two = engines
    for found, expected in zip(drawn(two, size), drawn(one, size), strict=True):
        assert np.abs(found - expected).max() < TOLERANCE


@pytest.mark.parametrize(
    ("parallel", "problem"),
    [
        (
            DiffusionParallelSpec(context=ContextParallelSpec(ulysses=2)),
            r"stage painter: parallel.context: diffusers has no plan to share the tokens of UNet2DConditionModel \(unet\)",
        ),
        (
            DiffusionParallelSpec(tensor=2),
            r"stage painter: parallel.tensor: diffusers has no plan to share the weights of UNet2DConditionModel \(unet\)",
        ),
    ],
)
def test_a_denoiser_without_a_plan_is_refused_before_any_rank_is_started(
    tmp_path: Path, parallel: DiffusionParallelSpec, problem: str
) -> None:
    with pytest.raises(StartError, match=problem):
        DiffusionEngine().load(context(build_tiny_sd(tmp_path / "sd"), 2, parallel))


def test_arguments_travel_in_two_parts_and_only_tensors_in_the_second() -> None:
    tensor, other = torch.arange(6.0).view(2, 3), torch.ones((), dtype=torch.bool)
    bundle, tensors = bundled(({"x": [tensor, None]}, {"deep": (other, "words", 2.5)}))
    assert [one is given for one, given in zip(tensors, (tensor, other), strict=True)] == [True, True]
    assert [(like.shape, like.dtype) for like in bundle.tensors] == [((2, 3), torch.float32), ((), torch.bool)]
    assert len(bundle.rest) < 200
