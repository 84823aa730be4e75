"""An AR stage on two ranks says what it says on one, token for token in float32, and gives other stages the same tensors."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoConfig, LlamaConfig

from proto.deploy import ArEngineSpec, ArParallelSpec, ArStage, LimitsSpec, ModelSpec
from proto.errors import InvalidRequest, StageUnavailable, StartError
from proto.ids import StageName
from proto.messages import Tensor
from proto.params import SamplingParams
from proto.torch_tensors import from_wire, to_wire
from stages.ar.engine import ArEngine
from stages.ar.ranks import check_plan
from stages.engine import Event, LoadContext, Publish
from tests.models.tiny_ar import build_tiny_llama
from tests.models.tiny_families import FAMILIES, build_family
from tests.pipeline.test_ar_engine import finished, job, run, tokens

SPEC = ArEngineSpec(max_num_batched_tokens=16, max_num_seqs=4, block_size=4)
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=7, max_tokens=20, ignore_eos=True)
PROMPTS = ("What is the capital of France?", "List three fruits: apple, pear and plum.", "a", "What is the capital?")
TENSORS = ("kv", "hidden")


def stage(path: Path, ranks: int) -> ArStage:
    model, parallel = ModelSpec(path=str(path), dtype="float32"), ArParallelSpec(tensor=ranks, timeout=120)
    return ArStage(model=model, engine=SPEC, parallel=parallel)


def context(path: Path, ranks: int) -> LoadContext:
    spec = stage(path, ranks)
    devices = ("cpu",) * ranks if ranks > 1 else ()
    return LoadContext(StageName("t"), spec, LimitsSpec(), "cpu", TENSORS, lambda note, done: None, devices)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ArEngine, ArEngine]]:
    """The same model on one rank and on two."""
    path = build_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")
    one, two = ArEngine(), ArEngine()
    try:
        one.load(context(path, 1))
        two.load(context(path, 2))
        yield one, two
    finally:
        two.close()
        one.close()


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "seeded"])
def test_two_ranks_say_what_one_says_alone_and_in_company(
    engines: tuple[ArEngine, ArEngine], params: SamplingParams
) -> None:
    one, two = engines
    alone = {prompt: tokens(run(one, [job("r", prompt, params)])["r"]) for prompt in PROMPTS}
    jobs = [job(str(number), prompt, params) for number, prompt in enumerate(PROMPTS)]
    for stagger in (0, 3):
        together = run(two, jobs, stagger=stagger)
        assert [tokens(together[str(number)]) for number in range(len(PROMPTS))] == [alone[p] for p in PROMPTS]


def test_an_abort_and_a_known_prefix_leave_the_ranks_in_step(engines: tuple[ArEngine, ArEngine]) -> None:
    one, two = engines
    expected = tokens(run(one, [job("r", PROMPTS[0], GREEDY)])["r"])
    two.submit(job("gone", PROMPTS[1], GREEDY))
    for _ in range(4):
        two.step()
    two.abort("gone")  # type: ignore[arg-type]
    for name in ("first", "second"):
        assert tokens(run(two, [job(name, PROMPTS[0], GREEDY)])[name]) == expected


def test_other_stages_get_the_keys_and_values_of_all_heads_and_the_same_hidden_states(
    engines: tuple[ArEngine, ArEngine],
) -> None:
    found = [published(run(engine, [job("r", PROMPTS[1], GREEDY, publish=TENSORS)])["r"]) for engine in engines]
    assert found[0].keys() == found[1].keys()
    for name, expected in found[0].items():
        assert found[1][name].shape == expected.shape
        assert np.abs(found[1][name] - expected).max() < 1e-4


def test_given_embeddings_and_chances_of_a_prompt_go_through_all_ranks(engines: tuple[ArEngine, ArEngine]) -> None:
    embeds = torch.randn(11, 64, generator=torch.Generator().manual_seed(5))
    inputs = {"inputs": {"prompt_embeds": Tensor(tensor=0)}, "tensors": (to_wire(embeds),)}
    scored = msgspec.structs.replace(GREEDY, prompt_logprobs=1)
    for one in (job("r", "unused", GREEDY, **inputs), job("r", PROMPTS[1], scored)):
        found = [finished(run(engine, [one])["r"]).outputs for engine in engines]
        assert found[0]["tokens"] == found[1]["tokens"]
        chances = [[chance.logprob for chance in one["text"].prompt_logprobs] for one in found]  # type: ignore[union-attr]
        assert chances[0] == pytest.approx(chances[1], abs=1e-4)


def test_all_ranks_sleep_and_wake_and_take_no_adapters(engines: tuple[ArEngine, ArEngine], tmp_path: Path) -> None:
    one, two = engines
    expected = tokens(run(one, [job("r", PROMPTS[1], GREEDY)])["r"])
    assert two.call("sleep", {})["cache_freed_bytes"] > 0
    with pytest.raises(StageUnavailable, match="asleep"):
        two.submit(job("r", PROMPTS[1], GREEDY))
    two.call("wake", {})
    assert tokens(run(two, [job("r", PROMPTS[1], GREEDY)])["r"]) == expected
    with pytest.raises(InvalidRequest, match="ranks"):
        two.call("load_lora", {"name": "fox", "path": str(tmp_path)})


def published(events: list[Event]) -> dict[str, np.ndarray]:
    payloads = [event.payload for event in events if isinstance(event, Publish)]
    return {name: from_wire(wire).numpy() for payload in payloads for name, wire in payload.tensors.items()}


def test_a_model_without_a_plan_is_refused_before_any_rank_is_started(tmp_path: Path) -> None:
    path = build_family(tmp_path / "gpt2", "gpt2")
    engine = ArEngine()
    with pytest.raises(
        StartError, match=r"stage t: parallel.tensor: .*no plan to share GPT2LMHeadModel out"
    ) as refused:
        engine.load(context(path, 2))
    assert refused.value.info.field == "parallel.tensor"
    engine.close()


def test_heads_that_cannot_be_shared_evenly_are_refused_with_the_degrees_that_can(tmp_path: Path) -> None:
    LlamaConfig(num_attention_heads=9, num_key_value_heads=3, hidden_size=72, vocab_size=32).save_pretrained(tmp_path)
    with pytest.raises(StartError, match=r"has 3 key-value heads, which 2 ranks cannot share evenly; use one of 1, 3"):
        check_plan(context(tmp_path, 2), str(tmp_path), stage(tmp_path, 2))
    check_plan(context(tmp_path, 3), str(tmp_path), stage(tmp_path, 3))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma2", "mistral", "glm4"])
def test_every_family_with_a_plan_says_on_two_ranks_what_it_says_on_one(tmp_path: Path, family: str) -> None:
    path = build_family(tmp_path / family, family)
    assert AutoConfig.from_pretrained(path).model_type
    said = []
    for ranks in (1, 2):
        engine = ArEngine()
        try:
            engine.load(context(path, ranks))
            events = run(engine, [job(str(n), prompt, GREEDY) for n, prompt in enumerate(PROMPTS)])
            said.append([tokens(events[str(n)]) for n in range(len(PROMPTS))])
        finally:
            engine.close()
    assert said[0] == said[1]


assert {"qwen2", "qwen3", "gemma2", "mistral", "glm4"} < set(FAMILIES)
