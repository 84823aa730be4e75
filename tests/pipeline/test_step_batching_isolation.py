"""In company: a request's fault, abort, seed and memory are its own; encodes and decodes are shared work like steps."""

import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from proto.errors import ErrorCode, InvalidRequest, StartError
from proto.ids import RequestId
from proto.messages import Images, Preview, Progress, Started, Tensor, Text
from proto.numpy_tensors import from_wire
from proto.numpy_tensors import to_wire as numpy_to_wire
from proto.params import DiffusionParams, Json
from proto.torch_tensors import to_wire
from stages.diffusion import library, previews
from stages.diffusion.engine import DiffusionEngine
from stages.engine import Emit, Event, Failed, Finished, Job
from tests.models.tiny_diffusion import build_tiny_ddim, build_tiny_sd
from tests.models.tiny_diffusion_families import build_tiny_qwen_image
from tests.pipeline.batching_cases import drive, ends, forwards, latents_of, load

Load = Callable[..., DiffusionEngine]
SLACK = 2e-5


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    root = tmp_path_factory.mktemp("isolation")
    return {"sd": build_tiny_sd(root / "sd"), "qwen_image": build_tiny_qwen_image(root / "qwen_image")}


@pytest.fixture
def engines(folders: Mapping[str, Path]) -> Iterator[Load]:
    """Loads engines; the test must leave them with nothing to do."""
    loaded: list[DiffusionEngine] = []

    def load_new(name: str = "sd", **spec: Json) -> DiffusionEngine:
        loaded.append(load(folders[name], **spec))
        return loaded[-1]

    yield load_new
    for engine in loaded:
        assert not engine.has_work
        engine.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("paint-")]


def job(name: str, steps: int = 4, prompt: str = "a red fox", latents: torch.Tensor | None = None, **more: Json) -> Job:
    given = {} if latents is None else {"latents": Tensor(tensor=0)}
    tensors = [] if latents is None else [to_wire(latents)]
    params = DiffusionParams(num_inference_steps=steps, **{"width": 32, "height": 32, "seed": 7, **more})
    return Job(
        RequestId(name), {"prompt": Text(text=prompt), **given}, params, emit=("image", "latents"), tensors=tensors
    )


def part(engine: DiffusionEngine, name: str) -> torch.nn.Module:
    return library.modules(engine._loaded().pipe)[name]


def before_forward(module: torch.nn.Module, act: Callable[[torch.Tensor], None]) -> torch.utils.hooks.RemovableHandle:
    """`act` sees the first argument of every forward that is really made."""
    return module.register_forward_pre_hook(lambda _, args, kwargs: act(args[0]), with_kwargs=True)


def close(end: Event, other: Event) -> bool:
    return torch.allclose(latents_of(end), latents_of(other), rtol=0, atol=SLACK * float(latents_of(other).abs().max()))


def stats(engine: DiffusionEngine) -> dict[str, Any]:
    return engine.call("stats", {})


def until_step(engine: DiffusionEngine, name: str, step: int) -> None:
    while not any(
        isinstance(event, Emit) and event.request == name and event.part == Progress(step=step, total=event.part.total)
        for event in engine.step()
        if isinstance(event, Emit) and isinstance(event.part, Progress)
    ):
        pass


def alone(engine: DiffusionEngine, one: Job) -> Finished:
    end = drive(engine, {0: one})[-1]
    assert isinstance(end, Finished), end
    return end


# --- faults -----------------------------------------------------------------------------------------------------------

BROKEN = torch.full((1, 4, 4, 4), torch.nan)
"""Latents that make a forward raise in these tests."""


@pytest.mark.parametrize(
    ("where", "broken"),
    [
        ("unet.conv_in", {"latents": BROKEN}),
        ("text_encoder.embeddings", {"prompt": "raise!"}),
        ("vae.decoder", {"latents": BROKEN}),
    ],
)
def test_request_that_raises_in_a_shared_call_fails_alone(where: str, broken: dict[str, Json], engines: Load) -> None:
    engine = engines()
    good = [job("a", seed=1), job("b", seed=2, steps=5)]
    expected = [alone(engine, one) for one in good]
    engine.call("clear_cache", {})
    name, _, inner = where.partition(".")
    module = part(engine, name).get_submodule(inner)
    tokens = part_tokens(engine, "raise!")

    def act(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        first = args[0] if args else kwargs["input_ids"]
        bad = (
            bool(torch.isnan(first).any())
            if first.is_floating_point()
            else any(torch.equal(row, tokens) for row in first)
        )
        if bad:
            raise ArithmeticError("it does not add up")

    handle = module.register_forward_pre_hook(lambda _, args, kwargs: act(args, kwargs), with_kwargs=True)
    bad = job("bad", **broken)
    events = drive(engine, {0: good[0], 0.1: bad, 0.2: good[1]})
    handle.remove()
    ended = ends(events)
    failed = ended["bad"]
    assert isinstance(failed, Failed)
    assert failed.error.code is ErrorCode.STAGE_FAILED
    assert failed.error.message == "stage painter: ArithmeticError: it does not add up"
    assert all(close(ended[one.request], end) for one, end in zip(good, expected, strict=True))
    assert stats(engine)["failed"] == 1


def part_tokens(engine: DiffusionEngine, prompt: str) -> torch.Tensor:
    tokenizer = engine._loaded().pipe.components["tokenizer"]
    return tokenizer(prompt, padding="max_length", max_length=77, return_tensors="pt").input_ids[0]


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("not enough memory: 9 GB")]
)
def test_lack_of_memory_makes_groups_smaller_and_nobody_fails(error: RuntimeError, engines: Load) -> None:
    engine = engines()
    jobs = [job("a", seed=1), job("b", seed=2, steps=6), job("c", seed=3, num_images=3)]
    expected = [alone(engine, one) for one in jobs]
    seen: list[int] = []

    def act(sample: torch.Tensor) -> None:
        if len(sample) > 3:
            raise error
        seen.append(len(sample))

    handle = before_forward(part(engine, "unet").get_submodule("conv_in"), act)
    ended = ends(drive(engine, dict(enumerate(jobs))))
    handle.remove()
    assert all(close(ended[one.request], end) for one, end in zip(jobs, expected, strict=True))
    assert max(seen) <= 3


def test_lack_of_memory_for_a_single_row_is_that_requests_failure(engines: Load) -> None:
    engine = engines()

    def act(sample: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("out of memory")

    handle = before_forward(part(engine, "unet").get_submodule("conv_in"), act)
    end = drive(engine, {0: job("a", num_images=4)})[-1]
    handle.remove()
    assert isinstance(end, Failed)
    assert "out of memory" in end.error.message
    assert isinstance(alone(engine, job("b")), Finished)


# --- aborts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["queue", "encode", "denoise", "decode"])
def test_abort_anywhere_takes_effect_at_once_and_others_do_not_notice(where: str, engines: Load) -> None:
    engine = engines(max_num_seqs=1 if where == "queue" else 8)
    expected = alone(engine, job("stays", seed=3, steps=5))
    engine.call("clear_cache", {})
    if where == "queue":
        engine.submit(job("stays", seed=3, steps=5))
        engine.step()
        engine.submit(job("leaves"))
    else:
        engine.submit(job("leaves", steps=1 if where == "decode" else 9, prompt="two cats"))
        until_parked(engine, "leaves", where)
        engine.submit(job("stays", seed=3, steps=5))
    made = forwards(engine)
    engine.abort(RequestId("leaves"))
    events = drive(engine, {})
    assert {event.request for event in events} == {"stays"}
    assert forwards(engine) - made == 5
    assert close(events[-1], expected)
    assert stats(engine)["aborted"] == 1


def until_parked(engine: DiffusionEngine, name: str, phase: str) -> None:
    while (call := engine._requests[RequestId(name)].call) is None or call.site.phase.value != phase:
        engine.step()


def test_abort_in_the_middle_of_a_shared_step_lets_the_others_go_on(engines: Load) -> None:
    engine = engines()
    expected = alone(engine, job("stays", seed=3, steps=6))
    for name in ("leaves", "stays"):
        engine.submit(job(name, seed=3 if name == "stays" else 4, steps=6))
    until_step(engine, "stays", 3)
    engine.abort(RequestId("leaves"))
    assert close(drive(engine, {})[-1], expected)


# --- company ----------------------------------------------------------------------------------------------------------


def test_seed_draws_the_same_alone_and_in_company(engines: Load) -> None:
    engine = engines()
    one = job("x", seed=7, steps=6)
    before = alone(engine, one)
    company = [
        job("y", seed=8, steps=3, prompt="two cats"),
        job("z", seed=9, steps=9, width=48, guidance_scale=1.0),
        job("w", seed=10, steps=4, negative_prompt="grey"),
    ]
    ended = ends(drive(engine, {0: company[0], 2: company[1], 4: one, 6: company[2]}))
    assert close(ended["x"], before)
    off = np.abs(from_wire(ended["x"].tensors[0]).astype(int) - from_wire(before.tensors[0]).astype(int))
    assert off.max() <= 1


def test_batch_invariant_results_are_the_same_to_the_bit_and_share_nothing(engines: Load) -> None:
    engine = engines(batch_invariant=True)
    jobs = [job("a", seed=1), job("b", seed=2), job("c", seed=3)]
    expected = [alone(engine, one) for one in jobs]
    made = forwards(engine)
    ended = ends(drive(engine, dict(enumerate(jobs))))
    assert forwards(engine) - made == 12
    for one, end in zip(jobs, expected, strict=True):
        assert torch.equal(latents_of(ended[one.request]), latents_of(end))
        assert ended[one.request].detail["rows_shared"] == 0


def test_without_step_batching_and_company_requests_run_one_after_the_other(engines: Load) -> None:
    engine = engines(step_batching=False, max_num_seqs=1)
    events = drive(engine, {0: job("a"), 0.1: job("b"), 0.2: job("c")})
    order = list(dict.fromkeys(event.request for event in events))
    assert order == ["a", "b", "c"]
    starts = [at for at, event in enumerate(events) if isinstance(event, Emit) and isinstance(event.part, Started)]
    finishes = [at for at, event in enumerate(events) if isinstance(event, Finished)]
    assert starts[1:] == [at + 1 for at in finishes[:-1]]


def test_pipeline_that_changes_its_modules_while_it_runs_has_them_to_itself(engines: Load) -> None:
    engine = engines(pipeline_class="StableDiffusionPAGPipeline")
    usual, guided = job("a", extra={"pag_scale": 0.0}), job("b", seed=8, extra={"pag_scale": 3.0})
    expected = [alone(engine, usual), alone(engine, guided)]
    ended = ends(drive(engine, {0: guided, 1: usual}))
    assert torch.equal(latents_of(ended["a"]), latents_of(expected[0]))
    assert torch.equal(latents_of(ended["b"]), latents_of(expected[1]))


def test_pictures_to_start_from_are_each_requests_own(engines: Load) -> None:
    engine = engines(pipeline_class="StableDiffusionImg2ImgPipeline")
    jobs = []
    for number in range(3):
        picture = np.random.default_rng(number).integers(0, 256, (1, 32, 32, 3), dtype=np.uint8)
        params = DiffusionParams(num_inference_steps=6, strength=0.5, seed=number)
        inputs = {"prompt": Text(text="a red fox"), "image": Images(tensor=0)}
        tensors = [numpy_to_wire(picture)]
        jobs.append(Job(RequestId(f"r{number}"), inputs, params, emit=("image", "latents"), tensors=tensors))
    expected = [alone(engine, one) for one in jobs]
    made = forwards(engine)
    ended = ends(drive(engine, {number / 10: one for number, one in enumerate(jobs)}))
    assert all(close(ended[one.request], end) for one, end in zip(jobs, expected, strict=True))
    assert forwards(engine) - made == 3


def test_rows_and_requests_stay_within_the_deploys_limits(engines: Load) -> None:
    engine = engines(max_num_seqs=3, max_rows=4)
    seen: list[int] = []
    handle = before_forward(part(engine, "unet").get_submodule("conv_in"), lambda sample: seen.append(len(sample)))
    running = 0
    for number in range(5):
        engine.submit(job(f"r{number}", seed=number))
    while engine.has_work:
        engine.step()
        running = max(running, engine.stats().running)
    handle.remove()
    assert (max(seen), running) == (4, 3)


def test_request_beyond_the_pixels_of_the_deploy_is_refused_with_the_numbers(engines: Load) -> None:
    engine = engines(max_pixels=32 * 32 * 2)
    with pytest.raises(InvalidRequest, match=r"at most 2048 pixels.*not 3072"):
        engine.submit(job("a", num_images=3))
    ended = ends(drive(engine, {0: job("b", num_images=2), 0.1: job("c")}))
    assert all(isinstance(end, Finished) for end in ended.values())


def test_request_waits_for_company_when_the_deploy_says_so(engines: Load) -> None:
    engine = engines(admission_wait=3600.0, max_num_seqs=2)
    engine.submit(job("a"))
    assert engine.step() == []
    assert engine.stats().queued == 1
    engine.submit(job("b", seed=8))
    ended = ends(drive(engine, {}))
    assert all(end.detail["rows_shared"] == end.detail["rows"] for end in ended.values())


def test_model_whose_rows_see_one_another_is_found_out_and_not_shared(engines: Load) -> None:
    engine = engines()
    jobs = [job("a", seed=1), job("b", seed=2, prompt="two cats"), job("c", seed=3, prompt="a bowl of fruit")]
    conv = part(engine, "unet").get_submodule("conv_in")
    handle = conv.register_forward_hook(lambda module, args, out: out + out[:1])  # the first row leaks into all others
    expected = [alone(engine, one) for one in jobs]
    made = forwards(engine)
    ended = ends(drive(engine, dict(enumerate(jobs))))
    handle.remove()
    assert all(close(ended[one.request], end) for one, end in zip(jobs, expected, strict=True))
    assert forwards(engine) - made == 12 + 1  # the group that was found out, and then each by itself


def test_shared_calls_are_checked_once_and_the_same_for_all_later_requests(engines: Load) -> None:
    engine = engines()
    for _ in range(3):
        drive(engine, {0: job("a"), 0.1: job("b", seed=2)})
    assert stats(engine)["checks"] == 2  # the denoiser and the decoder


def test_pipeline_whose_denoiser_is_not_known_still_stops_at_its_steps(
    engines: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "DENOISERS", ("transformer",))
    engine = engines()
    one, other = job("a", seed=1), job("b", seed=2)
    expected = [alone(engine, one), alone(engine, other)]
    events: list[Event] = []
    engine.submit(one)
    engine.submit(other)
    while engine.has_work:
        new = engine.step()
        assert all(sum(event.request == name for event in new if isinstance(event, Emit)) <= 2 for name in ("a", "b"))
        events += new
    assert torch.equal(latents_of(ends(events)["a"]), latents_of(expected[0]))
    assert torch.equal(latents_of(ends(events)["b"]), latents_of(expected[1]))
    assert forwards(engine) == 0


# --- encoding and decoding --------------------------------------------------------------------------------------------


def test_encoding_and_decoding_of_one_request_come_between_the_steps_of_another(engines: Load) -> None:
    engine = engines(prompt_cache=0)
    engine.submit(job("long", steps=30))
    until_step(engine, "long", 2)
    engine.submit(job("short", steps=1, prompt="two cats", width=48))
    since_step: list[int] = [0]
    while RequestId("short") in engine._requests:
        events = engine.step()
        stepped = any(isinstance(e, Emit) and e.request == "long" and isinstance(e.part, Progress) for e in events)
        since_step = [*since_step, 0] if stepped else [*since_step[:-1], since_step[-1] + 1]
    engine.abort(RequestId("long"))
    assert max(since_step) <= 2  # the start of the other and one call of its


def test_decodes_of_one_shape_are_one_call(engines: Load) -> None:
    engine = engines()
    before = stats(engine)["decode_calls"]
    drive(engine, {0: job("a"), 0.1: job("b", seed=9), 0.2: job("c", seed=10)})
    assert stats(engine)["decode_calls"] - before == 1


def test_prompts_are_encoded_once(engines: Load) -> None:
    engine = engines()
    first = alone(engine, job("a"))
    encoded = stats(engine)["encode_calls"]
    again = alone(engine, job("a"))
    assert stats(engine)["encode_calls"] == encoded
    assert torch.equal(latents_of(first), latents_of(again))
    assert (first.detail["cache_hits"], again.detail["cache_hits"]) == (0, 2)  # the prompt and the empty one
    alone(engine, job("b", prompt="two cats"))
    assert stats(engine)["encode_calls"] == encoded + 1
    assert stats(engine)["prompt_bytes"] > 0
    engine.call("clear_cache", {})
    assert (stats(engine)["prompts_kept"], stats(engine)["prompt_bytes"]) == (0, 0)
    alone(engine, job("c"))
    assert stats(engine)["encode_calls"] == encoded + 3


def test_equal_prompts_that_come_together_are_encoded_once(engines: Load) -> None:
    engine = engines(prompt_cache=0)
    ended = ends(drive(engine, {0: job("a", seed=1), 0.1: job("b", seed=2), 0.2: job("c", seed=3)}))
    assert stats(engine)["encode_calls"] == 2
    assert [ended[name].detail["cache_hits"] for name in "abc"] == [0, 2, 2]


def test_cache_keeps_no_more_than_it_may(engines: Load) -> None:
    engine = engines(prompt_cache=50_000)
    for number in range(8):
        alone(engine, job(f"r{number}", steps=1, prompt=f"{number} cats"))
        assert stats(engine)["prompt_bytes"] <= 50_000
    assert stats(engine)["prompts_kept"] > 0


# --- what callers see -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sd", "qwen_image"])
def test_previews_are_small_pictures_every_so_many_steps(name: str, engines: Load) -> None:
    engine = engines(name, preview_every=2)
    factor, side = (8, 384) if name == "sd" else (4, 256)
    one = job("a", steps=6, width=side, height=side // 2)
    events = drive(engine, {0: one})
    drawn = [event for event in events if isinstance(event, Emit) and isinstance(event.part, Preview)]
    assert [event.part.step for event in drawn] == [2, 4]
    for event in drawn:
        (pixels,) = (from_wire(tensor) for tensor in event.tensors)
        assert (pixels.dtype, pixels.shape) == (np.uint8, (1, 16 * factor, 32 * factor, 3))
    assert torch.equal(latents_of(events[-1]), latents_of(alone(engines(name), one)))


def test_time_is_shared_by_rows_and_adds_up(engines: Load) -> None:
    engine = engines()
    ended = ends(drive(engine, {0: job("a"), 0.1: job("b", seed=9, num_images=3, steps=8)}))
    one, three = ended["a"].detail, ended["b"].detail
    assert (one["steps"], one["forwards"], one["rows"]) == (4, 4, 8)
    assert (three["steps"], three["forwards"], three["rows"], three["rows_shared"]) == (8, 8, 48, 24)
    assert one["rows_shared"] == 8
    assert all(detail[phase] > 0 for detail in (one, three) for phase in ("queue", "encode", "denoise", "decode"))


def test_vae_that_cannot_tile_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"vae_tiling.*DDIMPipeline has no VAE"):
        load(build_tiny_ddim(tmp_path), vae_tiling=True)


def test_vae_switches_give_the_same_picture(engines: Load) -> None:
    usual, saving = engines(), engines(vae_slicing=True, vae_tiling=True)
    one = job("a", num_images=2)
    np.testing.assert_allclose(
        from_wire(alone(usual, one).tensors[0]).astype(int), from_wire(alone(saving, one).tensors[0]), atol=1
    )


@pytest.mark.parametrize(("count", "steps"), [(0, []), (1, [4]), (2, [3, 6]), (3, [2, 4, 6]), (20, list(range(1, 8)))])
def test_a_request_says_how_many_previews_it_wants(count: int, steps: list[int], engines: Load) -> None:
    events = drive(engines("sd", preview_every=3), {0: job("a", steps=8, previews=count)})
    drawn = [event for event in events if isinstance(event, Emit) and isinstance(event.part, Preview)]
    assert [event.part.step for event in drawn] == steps  # type: ignore[union-attr]


def test_different_prompts_share_a_language_models_call(engines: Load) -> None:
    """It would give its KV cache too, which cannot be split, and which no pipeline reads."""
    engine = engines("qwen_image", prompt_cache=0)
    before = stats(engine)["encode_calls"]
    drive(engine, {0: job("a", prompt="a red fox"), 0.1: job("b", prompt="a raw fax")})
    assert stats(engine)["encode_calls"] - before == 1
    assert not engine._runner.alone


def test_a_preview_that_fails_is_missed_by_its_own_request_alone(
    engines: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = previews.draw_small

    def fail_for_a(latents: torch.Tensor, request: Any, painter: Any) -> torch.Tensor | None:
        if request.job.request == "a":
            raise RuntimeError("no picture")
        return real(latents, request, painter)

    monkeypatch.setattr(previews, "draw_small", fail_for_a)
    engine = engines(preview_every=2)
    events = drive(engine, {0: job("a", steps=6), 0.1: job("b", steps=6)})
    drawn = [event.request for event in events if isinstance(event, Emit) and isinstance(event.part, Preview)]
    assert drawn == ["b", "b"]
    assert all(isinstance(end, Finished) for end in ends(events).values())
