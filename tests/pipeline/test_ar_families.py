"""Every family of models gives what transformers' own `generate` gives, token for token in float32: alone, in company, in
chunks, after a preemption, and on pages that another request has filled."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from proto.deploy import ArEngineSpec, ArStage, LimitsSpec, ModelSpec
from proto.errors import StartError
from proto.ids import RequestId, StageName
from proto.messages import Tokens
from proto.params import SamplingParams
from stages.ar.engine import ArEngine
from stages.engine import Finished, Job, LoadContext
from tests.models.tiny_families import FAMILIES, build_family

ANSWER = 20
PROMPTS = (
    tuple(range(40, 71)),
    (*range(40, 60), 7, 8, 9),  # starts like the first
    (5, 6, 7),
    tuple(range(90, 107)),
)
PAGE_BYTES = 3 * 4 * 2 * 16 * 2 * 4  # layers, tokens, heads, size, keys and values, float32


def engine_of(path: Path, **spec: object) -> ArEngine:
    made = ArEngine()
    stage = ArStage(model=ModelSpec(path=str(path), dtype="float32"), engine=ArEngineSpec(block_size=4, **spec))
    made.load(LoadContext(StageName("t"), stage, LimitsSpec(), "cpu", (), lambda note, done: None))
    return made


def answers(engine: ArEngine, prompts: tuple[tuple[int, ...], ...]) -> list[tuple[int, ...]]:
    for number, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=ANSWER)
        engine.submit(Job(RequestId(str(number)), {"tokens": Tokens(ids=prompt)}, params, emit=("tokens",)))
    found = {}
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, Finished):
                found[event.request] = event.outputs["tokens"].ids
    return [found[RequestId(str(number))] for number in range(len(prompts))]


def expected(path: Path) -> list[tuple[int, ...]]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    out = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=ANSWER, do_sample=False)
        out.append(tuple(made[0, len(prompt) :].tolist()))
    return out


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_equal_generate_however_they_are_scheduled(family: str, tmp_path: Path) -> None:
    path = build_family(tmp_path / family, family)
    wanted = expected(path)
    heads = 2 if family == "gpt2" else 1  # GPT-2 has as many KV heads as heads
    engine = engine_of(
        path, max_num_seqs=4, max_num_batched_tokens=9, kv_cache_bytes=30 * heads * PAGE_BYTES, prefix_caching=True
    )
    assert engine._loaded.runner.paged
    assert [answers(engine, (prompt,))[0] for prompt in PROMPTS] == wanted
    assert engine.call("reset_prefix_cache", {}) > 0
    assert answers(engine, PROMPTS) == wanted
    stats = engine.call("stats", {})
    assert stats["preemptions"] > 0
    assert stats["kv_pages_used"] == 0
    assert answers(engine, PROMPTS) == wanted
    assert engine.call("stats", {})["prefix_hit_tokens"] > stats["prefix_hit_tokens"] >= 16


def test_a_model_without_the_attention_interface_answers_too_one_sequence_at_a_time(tmp_path: Path) -> None:
    from transformers import BloomConfig, BloomForCausalLM, GenerationConfig

    from tests.models.tiny_ar import VOCABULARY, build_tiny_tokenizer

    torch.manual_seed(1)
    config = BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.15)
    config.eos_token_id = config.bos_token_id = config.pad_token_id = None
    config.seq_length = 128
    model = BloomForCausalLM(config)
    model.generation_config = GenerationConfig(pad_token_id=0)
    model.save_pretrained(tmp_path)
    tokenizer = build_tiny_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    wanted = expected(tmp_path)
    engine = engine_of(tmp_path, max_num_batched_tokens=9, max_num_seqs=4)
    assert not engine._loaded.runner.paged
    assert answers(engine, PROMPTS) == wanted


@pytest.mark.slow
def test_a_compiled_model_gives_the_same_answers(tmp_path: Path) -> None:
    pytest.importorskip("torch._inductor")
    path = build_family(tmp_path / "llama", "llama")
    engine = engine_of(path, max_num_batched_tokens=9, max_num_seqs=4, compile=True)
    assert answers(engine, PROMPTS) == expected(path)


def test_packed_weights_give_the_same_answers(tmp_path: Path) -> None:
    path = build_family(tmp_path / "qwen2", "qwen2")  # has biases
    engine = engine_of(path, max_num_batched_tokens=9, max_num_seqs=4, pack_weights=True)
    assert answers(engine, PROMPTS) == expected(path)
    with pytest.raises(StartError, match=r"does nothing with engine\.compile"):
        engine_of(path, pack_weights=True, compile=True)


def test_a_model_that_cannot_be_compiled_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = build_family(tmp_path / "llama", "llama")

    def broken(self: torch.nn.Module, **options: object) -> None:
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(torch.nn.Module, "compile", broken)
    with pytest.raises(StartError, match=r"no C\+\+ compiler.*leave engine.compile out") as refusal:
        engine_of(path, compile=True)
    assert refusal.value.info.field == "engine.compile"
