"""A request at work gets other words, and draws what the stock pipeline draws whose embeddings are exchanged between two steps.

The reference is a stock pipeline with a hook on its denoiser, which from step k on puts the arguments of a run with the other prompt
in the place of its own: by their names, which are written down here for each family.
"""

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import pytest
import torch

from proto.errors import InvalidRequest
from proto.ids import EventId, RequestId
from proto.messages import MoreInput, Progress, PromptChange, Text, Updated, UpdateState
from proto.params import Json
from stages.diffusion import arguments, library
from stages.diffusion.engine import DiffusionEngine
from stages.engine import Emit, Event, Finished, Job
from tests.pipeline.batching_cases import CASES, Stock, ends, latents_of, load, request

STARTED, COMPLETED, REFUSED = UpdateState.STARTED, UpdateState.COMPLETED, UpdateState.REFUSED
STEPS = 6
OLD, NEW = "a red fox in the snow", "an old lighthouse"

WORDS: Mapping[str, tuple[str, ...]] = {
    "sd": ("encoder_hidden_states",),
    "sdxl": ("encoder_hidden_states", "added_cond_kwargs"),
    "sd3": ("encoder_hidden_states", "pooled_projections"),
    "flux": ("encoder_hidden_states", "pooled_projections", "txt_ids"),
    "qwen_image": ("encoder_hidden_states", "encoder_hidden_states_mask"),
    "lumina2": ("encoder_hidden_states", "encoder_attention_mask"),
    "sana": ("encoder_hidden_states", "encoder_attention_mask"),
    "z_image": ("cap_feats",),
    "wan": ("encoder_hidden_states",),
}
"""Arguments of each family's denoiser that hang on the prompt."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("update-families")
    return functools.cache(lambda name: CASES[name].build(root / name))


@pytest.fixture(scope="session")
def loaded(folder: Callable[[str], Path]) -> Iterator[Callable[[str], DiffusionEngine]]:
    engines: dict[str, DiffusionEngine] = {}

    def take(name: str) -> DiffusionEngine:
        if name not in engines:
            engines[name] = load(folder(name))
        return engines[name]

    yield take
    for engine in engines.values():
        assert not engine.has_work
        engine.close()


@pytest.fixture(scope="session")
def stocks(folder: Callable[[str], Path]) -> Callable[[str], Stock]:
    return functools.cache(lambda name: Stock(folder(name), CASES[name]))


# --- the reference ----------------------------------------------------------------------------------------------------


@dataclass
class Swap:
    """From step `first` on the words of `calls`, after a transition of `steps` steps."""

    calls: Sequence[Mapping[str, Json]]
    first: int
    steps: int = 1


def _mixed(old: Json, new: Json, weight: float) -> Json:
    if isinstance(old, dict):
        return {name: _mixed(old[name], new[name], weight) for name in old}
    if isinstance(old, list):
        return [_mixed(one, other, weight) for one, other in zip(old, new, strict=True)]
    if weight >= 1 or old is None or not old.is_floating_point():
        return new
    return torch.lerp(old, new, weight)


@contextmanager
def hooked(stock: Stock, hook: Callable[..., Json]) -> Iterator[None]:
    (module,) = library.denoisers(stock.pipe).values()
    names = list(inspect.signature(module.forward).parameters)

    def named(_: torch.nn.Module, args: tuple[Json, ...], kwargs: dict[str, Json]) -> Json:
        return (), hook({**dict(zip(names, args, strict=False)), **kwargs})

    handle = module.register_forward_pre_hook(named, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def recorded(stock: Stock, engine: DiffusionEngine, job: Job) -> list[Mapping[str, Json]]:
    """The arguments of all calls of the stock pipeline's denoiser."""
    calls: list[Mapping[str, Json]] = []

    def note(given: dict[str, Json]) -> Json:
        calls.append(given)
        return given

    with hooked(stock, note):
        stock.latents(job, engine._loaded())
    return calls


def reference(stock: Stock, engine: DiffusionEngine, job: Job, names: Sequence[str], *swaps: Swap) -> torch.Tensor:
    """The stock pipeline's latents, with its words exchanged."""
    count = 0

    def exchange(given: dict[str, Json]) -> Json:
        nonlocal count
        for swap in swaps:
            calls_a_step = len(swap.calls) // STEPS
            step, call = divmod(count, calls_a_step)
            weight = (step - swap.first + 1) / swap.steps
            if weight > 0:
                new = swap.calls[call]
                given |= {name: _mixed(given[name], new[name], weight) for name in names}
        count += 1
        return given

    with hooked(stock, exchange):
        return stock.latents(job, engine._loaded())


# --- the engine -------------------------------------------------------------------------------------------------------


@dataclass
class Asked:
    """An update of `job`, sent when `step` of its steps are done."""

    job: Job
    step: int
    change: PromptChange
    event: str = "u1"
    sent: bool = field(default=False)


def drive(engine: DiffusionEngine, jobs: Sequence[Job], *asked: Asked) -> list[Event]:
    events: list[Event] = []
    for job in jobs:
        engine.submit(job)
    while engine.has_work:
        for one in asked:
            if not one.sent and steps_done(events, one.job) >= one.step:
                one.sent = True
                engine.update(one.job.request, EventId(one.event), one.change)
        events += engine.step()
    return events


def steps_done(events: list[Event], job: Job) -> int:
    return sum(isinstance(e, Emit) and isinstance(e.part, Progress) and e.request == job.request for e in events)


def told(events: list[Event], job: Job) -> list[Updated]:
    return [e.part for e in events if isinstance(e, Emit) and isinstance(e.part, Updated) and e.request == job.request]


def close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float) -> bool:
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1.0)) <= tolerance


def asks(name: str, prompt: str = OLD, number: int = 1, **more: Json) -> Job:
    """With guidance and a negative prompt, where the family has one."""
    job = request(CASES[name], number, STEPS, size=CASES[name].sizes[0], **more)
    return replace(job, inputs={"prompt": Text(text=prompt)})


# --- what is promised -------------------------------------------------------------------------------------------------


slow = pytest.mark.slow
QUICK = ("sd", "sd3", "flux", "qwen_image")
EVERY = [pytest.param(name, step, marks=() if name in QUICK and step else slow) for name in WORDS for step in (0, 3)]


@pytest.mark.parametrize(("name", "step"), EVERY)
def test_an_update_draws_what_exchanged_embeddings_draw(
    name: str, step: int, loaded: Callable[[str], DiffusionEngine], stocks: Callable[[str], Stock]
) -> None:
    engine, stock, family = loaded(name), stocks(name), CASES[name]
    job = asks(name)
    events = drive(engine, [job], Asked(job, step, PromptChange(prompt=NEW)))
    assert [(one.event, one.state, one.step) for one in told(events, job)] == [
        ("u1", STARTED, step), ("u1", COMPLETED, step + 1),
    ]  # fmt: skip
    assert steps_done(events, job) == STEPS
    new = recorded(stock, engine, replace(job, inputs={"prompt": Text(text=NEW)}))
    expected = reference(stock, engine, job, WORDS[name], Swap(new, step))
    ours = latents_of(ends(events)[job.request])
    assert close(ours, expected, family.tolerance)
    assert not close(ours, stock.latents(job, engine._loaded()), family.tolerance)


@pytest.mark.parametrize(
    ("name", "prompt"),
    [
        ("sd3", NEW),  # padded to one length by the pipeline
        pytest.param("sd", NEW, marks=slow),
        pytest.param("flux", NEW, marks=slow),
        ("qwen_image", "a big dog in the rain"),  # as many tokens
        pytest.param("sdxl", NEW, marks=slow),
    ],
)
def test_a_transition_is_linear_over_its_steps(
    name: str, prompt: str, loaded: Callable[[str], DiffusionEngine], stocks: Callable[[str], Stock]
) -> None:
    engine, stock = loaded(name), stocks(name)
    job = asks(name)
    new_job = replace(job, inputs={"prompt": Text(text=prompt)})
    events = drive(engine, [job], Asked(job, 1, PromptChange(prompt=prompt, transition_steps=3)))
    assert [(one.state, one.step) for one in told(events, job)] == [(STARTED, 1), (COMPLETED, 4)]
    expected = reference(stock, engine, job, WORDS[name], Swap(recorded(stock, engine, new_job), 1, 3))
    assert close(latents_of(ends(events)[job.request]), expected, CASES[name].tolerance)


def test_a_transition_between_lengths_ends_with_the_new_words_where_there_is_a_mask(
    loaded: Callable[[str], DiffusionEngine], stocks: Callable[[str], Stock]
) -> None:
    """In between, the shorter embeddings are zeros where they end; from the last step of the transition on there are the new
    ones alone. A transition over all steps but the first draws something else than a change at once."""
    engine, stock = loaded("qwen_image"), stocks("qwen_image")
    job = asks("qwen_image", guidance_scale=1.0, negative_prompt=None)
    lengths = {
        prompt: recorded(stock, engine, replace(job, inputs={"prompt": Text(text=prompt)}))[0]["encoder_hidden_states"]
        for prompt in (OLD, NEW)
    }
    assert lengths[OLD].shape != lengths[NEW].shape
    drawn = {}
    for steps in (0, 4):
        events = drive(engine, [job], Asked(job, 1, PromptChange(prompt=NEW, transition_steps=steps)))
        assert [one.state for one in told(events, job)] == [STARTED, COMPLETED]
        drawn[steps] = latents_of(ends(events)[job.request])
    assert not close(drawn[0], drawn[4], 1e-4)
    assert drawn[4].isfinite().all()


def test_a_transition_between_lengths_is_refused_where_there_is_no_mask(
    loaded: Callable[[str], DiffusionEngine], stocks: Callable[[str], Stock]
) -> None:
    engine, stock = loaded("z_image"), stocks("z_image")
    job = asks("z_image")
    longer = " ".join([NEW] * 20)
    events = drive(engine, [job], Asked(job, 1, PromptChange(prompt=longer, transition_steps=3)))
    (refused,) = told(events, job)
    assert refused.state is REFUSED
    assert "set transition_steps to 0" in refused.reason
    assert close(latents_of(ends(events)[job.request]), stock.latents(job, engine._loaded()), 1e-5)


@pytest.mark.parametrize("name", ["sd3", "qwen_image"])
def test_negative_words_change_too_and_later_updates_go_on_from_earlier_ones(
    name: str, loaded: Callable[[str], DiffusionEngine], stocks: Callable[[str], Stock]
) -> None:
    engine, stock = loaded(name), stocks(name)
    job = asks(name)
    first = replace(job, inputs={"prompt": Text(text=NEW)})
    second = replace(first, params=msgspec.structs.replace(job.params, negative_prompt="a crowd"))
    events = drive(
        engine,
        [job],
        Asked(job, 1, PromptChange(prompt=NEW)),
        Asked(job, 1, PromptChange(negative_prompt="a crowd"), event="u2"),  # waits for the first
    )
    assert [(one.event, one.state, one.step) for one in told(events, job)] == [
        ("u1", STARTED, 1), ("u1", COMPLETED, 2), ("u2", STARTED, 2), ("u2", COMPLETED, 3),
    ]  # fmt: skip
    swaps = [Swap(recorded(stock, engine, one), step) for one, step in ((first, 1), (second, 2))]
    expected = reference(stock, engine, job, WORDS[name], *swaps)
    assert close(latents_of(ends(events)[job.request]), expected, CASES[name].tolerance)


def test_an_update_with_the_same_words_changes_nothing(
    loaded: Callable[[str], DiffusionEngine], stocks: Callable[[str], Stock]
) -> None:
    engine, job = loaded("sd3"), asks("sd3")
    events = drive(engine, [job], Asked(job, 2, PromptChange(prompt=OLD, transition_steps=2)))
    assert [(one.state, one.step) for one in told(events, job)] == [(STARTED, 2), (COMPLETED, 4)]
    assert close(latents_of(ends(events)[job.request]), stocks("sd3").latents(job, engine._loaded()), 1e-5)


def test_company_draws_as_without_the_update_and_nobody_makes_more_forwards(
    loaded: Callable[[str], DiffusionEngine], stocks: Callable[[str], Stock]
) -> None:
    engine, stock = loaded("sd3"), stocks("sd3")
    job, *others = [asks("sd3"), asks("sd3", "two cats", 3), asks("sd3", "a bowl of fruit", 5)]
    events = drive(engine, [job, *others], Asked(job, 2, PromptChange(prompt=NEW)))
    for end in ends(events).values():
        assert isinstance(end, Finished)
        assert end.detail["forwards"] == STEPS
    for other in others:
        assert close(latents_of(ends(events)[other.request]), stock.latents(other, engine._loaded()), 1e-5)
        assert not told(events, other)
    new = recorded(stock, engine, replace(job, inputs={"prompt": Text(text=NEW)}))
    expected = reference(stock, engine, job, WORDS["sd3"], Swap(new, 2))
    assert close(latents_of(ends(events)[job.request]), expected, 1e-5)


def test_guidance_changes_where_the_pipeline_reads_it_at_each_step(
    loaded: Callable[[str], DiffusionEngine], stocks: Callable[[str], Stock]
) -> None:
    engine, stock = loaded("sd3"), stocks("sd3")
    job = asks("sd3", guidance_scale=3.0)
    events = drive(engine, [job], Asked(job, 2, PromptChange(guidance_scale=7.0)))
    assert [one.state for one in told(events, job)] == [STARTED, COMPLETED]

    def raise_guidance(pipe: Json, step: int, _: Json, tensors: dict[str, Json]) -> dict[str, Json]:
        if step == 1:
            pipe._guidance_scale = 7.0
        return tensors

    kwargs = arguments.build(job, job.params, (job.params.seed,), engine._loaded())  # type: ignore[arg-type]
    with torch.inference_mode():
        expected = stock.pipe(**kwargs, output_type="latent", callback_on_step_end=raise_guidance).images
    assert close(latents_of(ends(events)[job.request]), expected, 1e-5)


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("qwen_image", PromptChange(guidance_scale=2.0), "before the first step"),
        ("sd3", PromptChange(guidance_scale=1.0), "turn guidance on or off"),
        ("flux", PromptChange(negative_prompt="a crowd"), "changes nothing here"),
    ],
)
def test_what_a_request_at_work_cannot_do_is_refused_and_it_draws_as_before(
    name: str,
    change: PromptChange,
    reason: str,
    loaded: Callable[[str], DiffusionEngine],
    stocks: Callable[[str], Stock],
) -> None:
    engine, job = loaded(name), asks(name, guidance_scale=3.0)
    events = drive(engine, [job], Asked(job, 2, change))
    (refused,) = told(events, job)
    assert (refused.event, refused.state) == ("u1", REFUSED)
    assert reason in refused.reason
    assert close(latents_of(ends(events)[job.request]), stocks(name).latents(job, engine._loaded()), 1e-5)


def test_guidance_that_is_off_is_not_turned_on_and_the_refusal_says_so(
    loaded: Callable[[str], DiffusionEngine], stocks: Callable[[str], Stock]
) -> None:
    """A first step with guidance has twice the rows of what the request knows of its own."""
    engine, job = loaded("sd3"), asks("sd3", guidance_scale=1.0, num_images=3)
    events = drive(engine, [job], Asked(job, 2, PromptChange(prompt=NEW, guidance_scale=3.0)))
    (refused,) = told(events, job)
    assert refused.state is REFUSED
    assert "turn guidance on or off" in refused.reason
    assert close(latents_of(ends(events)[job.request]), stocks("sd3").latents(job, engine._loaded()), 1e-5)


def test_what_comes_after_the_last_step_or_has_no_end_is_refused_before_the_request_ends(
    loaded: Callable[[str], DiffusionEngine],
) -> None:
    engine, job = loaded("sd3"), asks("sd3")
    events = drive(
        engine,
        [job],
        Asked(job, 4, PromptChange(prompt=NEW, transition_steps=50)),
        Asked(job, STEPS - 1, PromptChange(prompt=OLD), event="u2"),
    )
    assert [(one.event, one.state) for one in told(events, job)] == [("u1", STARTED), ("u1", REFUSED), ("u2", REFUSED)]
    assert "after 2 of the 50 steps" in told(events, job)[1].reason
    assert isinstance(events[-1], Finished)


def test_further_input_and_unknown_requests_are_refused_at_once(loaded: Callable[[str], DiffusionEngine]) -> None:
    engine, job = loaded("sd3"), asks("sd3")
    engine.submit(job)
    with pytest.raises(InvalidRequest, match="takes no further input"):
        engine.update(job.request, EventId("u1"), MoreInput(close=True))
    with pytest.raises(InvalidRequest, match="is over"):
        engine.update(RequestId("nobody"), EventId("u1"), PromptChange(prompt=NEW))
    engine.abort(job.request)


@pytest.mark.parametrize("units", range(4))
def test_an_abort_ends_a_request_whatever_is_rehearsed_for_it(
    units: int, loaded: Callable[[str], DiffusionEngine]
) -> None:
    """After so many units of work from the update on."""
    engine, job, other = loaded("sd3"), asks("sd3"), asks("sd3", "two cats", 3)
    engine.call("clear_cache", {})
    events = []
    for one in (job, other):
        engine.submit(one)
    while steps_done(events, job) < 2:
        events += engine.step()
    engine.update(job.request, EventId("u1"), PromptChange(prompt=f"{NEW} {units}"))
    for _ in range(units):
        events += engine.step()
    engine.abort(job.request)
    assert engine.stats().running == 1
    while engine.has_work:
        events += engine.step()
    assert isinstance(ends(events)[other.request], Finished)
    assert job.request not in ends(events)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("paint-")]
