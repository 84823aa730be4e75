"""diffusers' step caches with several requests in flight: each gets what diffusers gives it alone with the same cache on."""

import functools
import gc
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from proto.errors import ErrorCode, StartError
from proto.ids import RequestId
from proto.step_cache import (
    FasterCache,
    FirstBlockCache,
    MagCache,
    PyramidAttentionBroadcast,
    StepCacheSpec,
    TaylorSeer,
)
from stages.diffusion import library
from stages.diffusion.engine import DiffusionEngine
from stages.diffusion.step_caches import library_config
from stages.engine import Failed, Finished, Job
from tests.pipeline import batching_cases
from tests.pipeline.batching_cases import CASES, Stock, drive, ends, latents_of, request
from tests.pipeline.switch_cases import DEEP

Folder = Callable[[str], Path]

load = functools.partial(batching_cases.load, memory_profile=False)

FIRST_BLOCK = FirstBlockCache(threshold=0.8)
MAG = MagCache(ratios=(1.0,) * 10, threshold=0.5, max_skip_steps=2)
TAYLOR = TaylorSeer(cache_interval=3, disable_cache_before_step=2, factors_dtype="float32")
LITE = TaylorSeer(cache_interval=3, disable_cache_before_step=2, factors_dtype="float32", use_lite_mode=True)
PAB = PyramidAttentionBroadcast()
SPECS: Mapping[str, StepCacheSpec] = {
    "first_block": FIRST_BLOCK,
    "mag": MAG,
    "taylorseer": TAYLOR,
    "taylorseer_lite": LITE,
    "pab": PAB,
    "faster": FasterCache(tensor_format="BFCHW"),
    "faster_distilled": FasterCache(is_guidance_distilled=True),
}
ALIKE = (  # families of which diffusers alone keeps one request's two halves of guidance apart
    ("flux", "first_block"),
    ("flux", "mag"),
    ("flux", "taylorseer"),
    ("flux", "pab"),
    ("flux", "faster_distilled"),
    ("qwen_image", "first_block"),
    ("qwen_image", "mag"),
    ("wan", "first_block"),
    ("wan", "taylorseer_lite"),
    ("cogvideox", "pab"),
    ("cogvideox", "faster"),
)

METHODS = ("first_block", "pab", *(pytest.param(one, marks=pytest.mark.slow) for one in ("mag", "taylorseer")))
QUICK = (
    ("flux", "first_block"),
    ("flux", "taylorseer"),
    ("qwen_image", "mag"),
    ("wan", "first_block"),
    ("cogvideox", "pab"),
    ("cogvideox", "faster"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """The folder of a tiny pipeline, built once."""
    root = tmp_path_factory.mktemp("deep")
    cases = {**CASES, **DEEP}
    return lambda name: found if (found := root / name).exists() else cases[name].build(found)


@pytest.fixture(scope="module")
def stock(folder: Folder) -> Callable[[str], Stock]:
    return functools.cache(lambda name: Stock(folder(name), DEEP[name]))


def cached_alone(stock: Stock, spec: StepCacheSpec, job: Job, engine: DiffusionEngine) -> torch.Tensor:
    """What diffusers gives this one request with its own `enable_cache`."""
    denoisers = list(library.denoisers(stock.pipe).values())
    steps = job.params.num_inference_steps  # type: ignore[union-attr]
    for module in denoisers:
        module.enable_cache(library_config(spec, steps, lambda: stock.pipe.current_timestep))
    try:
        return stock.latents(job, engine._loaded())
    finally:
        for module in denoisers:
            module.disable_cache()


def three(name: str, steps: tuple[int, ...] = (6, 7, 8)) -> dict[int, Job]:
    """Three requests that come one after the other, of different sizes, guidance and numbers of steps."""
    jobs = [request(DEEP[name], number, count) for number, count in enumerate(steps)]
    return {0: jobs[0], 6: jobs[1], 10: jobs[2]}


@pytest.mark.parametrize(
    ("name", "method"), [one if one in QUICK else pytest.param(*one, marks=pytest.mark.slow) for one in ALIKE]
)
def test_staggered_requests_each_get_what_diffusers_gives_them_alone_with_the_cache_on(
    name: str, method: str, folder: Folder, stock: Callable[[str], Stock]
) -> None:
    spec, jobs = SPECS[method], three(name)
    engine = load(folder(name), step_cache=spec)
    found = ends(drive(engine, jobs))
    for job in jobs.values():
        mine = latents_of(found[job.request])
        torch.testing.assert_close(mine, cached_alone(stock(name), spec, job, engine), atol=1e-5, rtol=0)
    plain = stock(name).latents(job, engine._loaded())
    assert not torch.allclose(mine, plain, atol=1e-4, rtol=0)  # or the cache has never answered, and nothing is shown
    engine.close()


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("wan", "pab"),
        pytest.param("qwen_image", "pab", marks=pytest.mark.slow),
        pytest.param("wan", "faster_distilled", marks=pytest.mark.slow),
    ],
)
def test_the_halves_of_guidance_never_share_a_memory_and_company_changes_nothing(
    name: str, method: str, folder: Folder
) -> None:
    engine = load(folder(name), step_cache=SPECS[method])
    jobs = three(name)
    together = ends(drive(engine, jobs))
    for job in jobs.values():
        alone = ends(drive(engine, {0: job}))
        assert torch.equal(latents_of(together[job.request]), latents_of(alone[job.request]))
    unguided = request(DEEP[name], 1, 6, guidance_scale=1.0, negative_prompt=None)
    guided = request(DEEP[name], 1, 6, guidance_scale=5.0, negative_prompt="grey and dull")
    plain = load(folder(name))
    for job in (unguided, guided):
        mine, exact = (latents_of(ends(drive(one, {0: job}))[job.request]) for one in (engine, plain))
        assert float((mine - exact).norm() / exact.norm()) < 0.1  # a half that answered for the other would be far off
    engine.close()
    plain.close()


@pytest.mark.parametrize("method", METHODS)
def test_an_abort_in_the_middle_disturbs_nobody(method: str, folder: Folder) -> None:
    engine = load(folder("flux"), step_cache=SPECS[method])
    jobs = list(three("flux").values())
    alone = ends(drive(engine, {0: jobs[0]}))
    engine.submit(jobs[0])
    engine.submit(jobs[1])
    events = [event for _ in range(15) for event in engine.step()]
    engine.abort(jobs[1].request)
    events += drive(engine, {0: jobs[2]})
    found = ends(events)
    assert set(found) == {jobs[0].request, jobs[2].request}
    assert torch.equal(latents_of(found[jobs[0].request]), latents_of(alone[jobs[0].request]))
    engine.close()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("how", ["ends", "aborts"])
def test_what_a_request_remembered_is_freed_when_it(how: str, method: str, folder: Folder) -> None:
    engine = load(folder("flux"), step_cache=SPECS[method])
    job = request(DEEP["flux"], 0, 6)
    engine.submit(job)
    for _ in range(6):
        engine.step()
    session = engine._requests[job.request]._remembered
    assert session is not None
    kept = [state for memory in session._memories.values() for state in memory if state is not None]
    tensors = [
        weakref.ref(value) for state in kept for value in _tensors(vars(state)) if isinstance(value, torch.Tensor)
    ]
    assert tensors
    del session, kept
    if how == "aborts":
        engine.abort(job.request)
    else:
        drive(engine, {})
    gc.collect()
    assert not [one for one in tensors if one() is not None]
    engine.close()


def _tensors(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


def test_a_forward_that_raised_has_changed_nothing_of_the_others(folder: Folder) -> None:
    engine = load(folder("flux"), step_cache=FIRST_BLOCK)
    jobs = list(three("flux").values())[:2]
    alone = {job.request: ends(drive(engine, {0: job}))[job.request] for job in jobs}
    block = engine._loaded().pipe.transformer.transformer_blocks[1]
    calls = 0

    def break_once(module: torch.nn.Module, args: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("this block is broken, as the test asked")

    handle = block.register_forward_pre_hook(break_once)
    found = ends(drive(engine, {0: jobs[0], 1: jobs[1]}))
    handle.remove()
    (done,) = [name for name, end in found.items() if isinstance(end, Finished)]
    assert torch.equal(latents_of(found[done]), latents_of(alone[done]))
    engine.close()


def test_a_pipeline_that_names_no_contexts_keeps_the_calls_of_a_step_apart(folder: Folder) -> None:
    """GLM-Image calls its denoiser twice a step without saying which call it is."""
    family = CASES["glm_image"]
    engine = load(folder("glm_image"), step_cache=PAB)
    jobs = [request(family, number, 7, guidance_scale=4.0) for number in range(2)]
    together = ends(drive(engine, {0: jobs[0], 5: jobs[1]}))
    plain = load(folder("glm_image"))
    for job in jobs:
        mine = latents_of(together[job.request])
        assert torch.equal(mine, latents_of(ends(drive(engine, {0: job}))[job.request]))
        exact = latents_of(ends(drive(plain, {0: job}))[job.request])
        assert not torch.equal(mine, exact)
        assert float((mine - exact).norm() / exact.norm()) < 0.1
    engine.close()
    plain.close()


def test_a_request_without_guidance_is_refused_where_the_cache_reads_its_two_halves(folder: Folder) -> None:
    engine = load(folder("cogvideox"), step_cache=SPECS["faster"])
    end = ends(drive(engine, {0: request(DEEP["cogvideox"], 0, 3, guidance_scale=1.0)}))[RequestId("r0")]
    assert isinstance(end, Failed)
    assert end.error.code is ErrorCode.INVALID_REQUEST
    assert "guidance_scale" in end.error.message
    engine.close()


def test_caches_leave_the_modules_as_they_were(folder: Folder) -> None:
    engine = load(folder("flux"), step_cache=TAYLOR)
    module = engine._loaded().pipe.transformer
    engine.close()
    assert not module.is_cache_enabled
    assert "cache_context" not in vars(module)


@pytest.mark.parametrize(
    ("name", "spec", "said"),
    [
        ("sd", FIRST_BLOCK, "diffusers has no step caches for UNet2DConditionModel"),
        ("sana", TAYLOR, "diffusers has no step caches for SanaTransformer2DModel"),
        ("flux2", FIRST_BLOCK, "return different things; take another method"),
        ("qwen_image", MagCache(), "needs `ratios` measured for its model"),
        ("wan", TAYLOR, "name modules in `cache_identifiers`"),
        ("wan", FasterCache(), "set `is_guidance_distilled: true`"),
    ],
)
def test_a_cache_that_a_pipeline_cannot_have_is_refused_at_the_start(
    name: str, spec: StepCacheSpec, said: str, folder: Folder
) -> None:
    with pytest.raises(StartError) as error:
        load(folder(name), step_cache=spec)
    assert error.value.info.field == "engine.step_cache"
    assert said in str(error.value)


def test_flux_has_ratios_of_its_own(folder: Folder) -> None:
    engine = load(folder("flux"), step_cache=MagCache())
    assert isinstance(ends(drive(engine, {0: request(DEEP["flux"], 0, 4)}))[RequestId("r0")], Finished)
    engine.close()
