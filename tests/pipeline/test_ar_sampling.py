"""How tokens are picked: the distribution is transformers', each row is its own, and what is forbidden never comes."""

import json
from collections.abc import Sequence

import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from proto.deploy import ArEngineSpec, ArStage, LimitsSpec, ModelSpec
from proto.errors import InvalidRequest
from proto.ids import RequestId, StageName
from proto.messages import TextDelta, TokenLogprobs, Tokens
from proto.params import SamplingParams
from stages.ar.engine import ArEngine
from stages.ar.sampler import argmax, sample, top
from stages.ar.sampling import Picker, SamplingRule, decide, picker
from stages.engine import Emit, Finished, Job, LoadContext
from tests.models.tiny_ar import build_tiny_llama, build_tiny_tokenizer

VOCABULARY = 5003
DRAWS = 4000


def logits(rows: int, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * spread


def transformers_distribution(scores: torch.Tensor, rule: SamplingRule, tokens: Sequence[int]) -> torch.Tensor:
    steps = LogitsProcessorList()
    if rule.repetition_penalty != 1:
        steps.append(RepetitionPenaltyLogitsProcessor(rule.repetition_penalty))
    steps.append(TemperatureLogitsWarper(rule.temperature))
    if rule.top_k:
        steps.append(TopKLogitsWarper(rule.top_k))
    if rule.top_p < 1:
        steps.append(TopPLogitsWarper(rule.top_p))
    if rule.min_p:
        steps.append(MinPLogitsWarper(rule.min_p))
    if rule.typical_p < 1:
        steps.append(TypicalLogitsWarper(rule.typical_p))
    return steps(torch.tensor([list(tokens)]), scores.clone()).softmax(-1)[0]


@pytest.mark.parametrize(
    "rule",
    [
        SamplingRule(temperature=1.0),
        SamplingRule(temperature=0.7, top_k=20),
        SamplingRule(temperature=1.3, top_p=0.9),
        SamplingRule(temperature=1.0, top_p=0.3),
        SamplingRule(temperature=2.0, top_p=0.99),  # needs more than the few likeliest
        SamplingRule(temperature=0.9, top_k=50, top_p=0.8, repetition_penalty=1.3),
        SamplingRule(temperature=1.0, min_p=0.05),
        SamplingRule(temperature=1.0, top_p=0.95, min_p=0.1),
        SamplingRule(temperature=1.0, typical_p=0.5),
    ],
    ids=str,
)
def test_draws_follow_transformers_distribution(rule: SamplingRule) -> None:
    scores = logits(1, spread=2.0)
    tokens = [1, 2, int(scores.argmax())]
    wanted = transformers_distribution(scores, rule, tokens)
    pickers = [picker(SamplingRule(**{**_fields(rule), "seed": seed}), list(tokens)) for seed in range(DRAWS)]
    found = torch.tensor(sample(scores.expand(DRAWS, -1), pickers).tokens)
    assert bool((wanted[found] > 0).all()), "a token came that transformers would not draw"
    share = torch.bincount(found, minlength=VOCABULARY) / DRAWS
    likely = wanted > 0.01
    assert bool(((share - wanted)[likely].abs() < 0.03).all())
    assert abs(float(share[~likely].sum() - wanted[~likely].sum())) < 0.03


def _fields(rule: SamplingRule) -> dict[str, object]:
    return {name: getattr(rule, name) for name in SamplingRule.__dataclass_fields__}


def rules() -> list[SamplingRule]:
    return [
        SamplingRule(),
        SamplingRule(temperature=1.0, seed=1),
        SamplingRule(temperature=0.7, top_k=5, seed=2),
        SamplingRule(temperature=1.0, top_p=0.9, seed=3, repetition_penalty=1.2),
        SamplingRule(temperature=1.5, top_p=0.995, seed=4),
        SamplingRule(temperature=1.0, min_p=0.1, seed=5, presence_penalty=1.0, frequency_penalty=0.5),
        SamplingRule(temperature=1.0, typical_p=0.6, seed=6),
        SamplingRule(logit_bias={17: 30.0}, min_tokens=3, ends=frozenset({4})),
        SamplingRule(temperature=1.0, top_k=500, top_p=0.8, seed=7, bad_words=((9,), (1, 2))),
    ]


def walk(chosen: Sequence[SamplingRule], steps: int = 6) -> list[list[int]]:
    """The tokens of each rule, all in one batch; each row's logits depend on its own rule and step only."""
    numbers = [rules().index(one) for one in chosen]
    pickers = [picker(one, [1, 2, 3, 1]) for one in chosen]
    for step in range(steps):
        rows = torch.stack([logits(1, seed=100 * number + step)[0] for number in numbers])
        for one, token in zip(pickers, sample(rows, pickers).tokens, strict=True):
            assert token is not None
            one.tokens.append(token)
    return [one.tokens[4:] for one in pickers]


def test_a_row_gets_the_same_tokens_whoever_shares_its_batch() -> None:
    alone = [walk([one])[0] for one in rules()]
    assert walk(rules()) == alone
    assert walk(rules()[::-1]) == alone[::-1]
    assert walk(rules()[2:5]) == alone[2:5]


def test_the_largest_is_found_as_torch_finds_it_ties_and_short_blocks_included() -> None:
    for size in (500, 1024 * 4, 1024 * 4 + 1, 5000, 49152, 49155):
        scores = torch.randn(5, size, generator=torch.Generator().manual_seed(size)).bfloat16()
        scores[2, -1] = scores[3, 7] = scores[3, 2000 % size] = 9.0
        best = scores.max(-1).values
        assert torch.equal(argmax(scores)[0], (scores == best[:, None]).int().argmax(-1))
        assert torch.equal(argmax(scores)[1], best)
        values, tokens = top(scores, 20)
        assert torch.equal(values, scores.topk(20, -1).values)
        assert torch.equal(scores.gather(1, tokens), values)


def test_a_row_that_is_not_a_number_is_told_from_the_others() -> None:
    scores = logits(3)
    scores[1, 7] = float("nan")
    picked = sample(scores, [picker(SamplingRule(), [1]) for _ in range(3)])
    assert [token is None for token in picked.tokens] == [False, True, False]


def test_bias_penalties_and_forbidden_tokens_do_what_they_say() -> None:
    scores = torch.zeros(1, VOCABULARY)
    scores[0, [10, 11, 12]] = torch.tensor([3.0, 2.0, 1.0])

    def pick(one: Picker) -> int | None:
        return sample(scores, [one]).tokens[0]

    assert pick(picker(SamplingRule(), [1])) == 10
    assert pick(picker(SamplingRule(logit_bias={10: -100.0}), [1])) == 11
    assert pick(picker(SamplingRule(ends=frozenset({10}), min_tokens=1), [1])) == 11
    assert pick(picker(SamplingRule(bad_words=((10,),)), [1])) == 11
    answered = picker(SamplingRule(bad_words=((5, 10),)), [1])
    assert pick(answered) == 10
    answered.tokens.append(5)
    assert pick(answered) == 11
    for rule, wanted in (
        (SamplingRule(presence_penalty=1.5), 11),
        (SamplingRule(frequency_penalty=0.6), 11),
        (SamplingRule(frequency_penalty=0.4), 10),
    ):
        one = picker(rule, [10, 10])  # the prompt does not count for these two
        assert pick(one) == 10
        one.tokens += [10, 10]
        assert pick(one) == wanted
    assert pick(picker(SamplingRule(repetition_penalty=2.0), [10])) == 11


def test_logprobs_are_the_models_own() -> None:
    scores = logits(2)
    wanted = scores.log_softmax(-1)
    pickers = [picker(SamplingRule(logprobs=3, logit_bias={5: 100.0}), [1]), picker(SamplingRule(), [1])]
    picked = sample(scores, pickers)
    first = picked.logprobs[0]
    assert first is not None
    assert picked.tokens[0] == 5
    assert first.token == pytest.approx(float(wanted[0, 5]))
    assert [token for token, _ in first.top] == wanted[0].topk(3).indices.tolist()
    assert picked.logprobs[1] is None


def test_bad_words_are_forbidden_with_and_without_a_space_before_them() -> None:
    tokenizer = build_tiny_tokenizer()
    rule = decide(
        SamplingParams(bad_words=("boat",)), GenerationConfig(), encode=lambda text: tokenizer(text)["input_ids"]
    )
    assert {tokenizer.decode(word) for word in rule.bad_words} == {"boat", " boat"}


# --- through the engine -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> ArEngine:
    made = ArEngine()
    path = build_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")
    stage = ArStage(model=ModelSpec(path=str(path), dtype="float32"), engine=ArEngineSpec())
    made.load(LoadContext(StageName("t"), stage, LimitsSpec(), "cpu", (), lambda note, done: None))
    return made


def say(engine: ArEngine, *many: SamplingParams) -> list[Finished]:
    for number, params in enumerate(many):
        job = Job(RequestId(str(number)), {"tokens": Tokens(ids=(5, 6, 7))}, params, emit=("text", "tokens"))
        engine.submit(job)
    ends: dict[str, Finished] = {}
    while engine.has_work:
        ends |= {event.request: event for event in engine.step() if isinstance(event, Finished)}
    return [ends[str(number)] for number in range(len(many))]


def test_the_ways_in_which_an_answer_may_end(engine: ArEngine) -> None:
    free = say(engine, SamplingParams(max_tokens=12, ignore_eos=True))[0].outputs["tokens"].ids
    stop = free[4]
    ended, late = say(
        engine,
        SamplingParams(max_tokens=12, stop_token_ids=(stop,), ignore_eos=True),
        SamplingParams(max_tokens=12, stop_token_ids=(stop,), ignore_eos=True, min_tokens=8),
    )
    assert ended.outputs["tokens"].ids == free[: free.index(stop) + 1]
    assert ended.finish_reason == "stop"
    assert len(late.outputs["tokens"].ids) >= 8
    assert stop not in late.outputs["tokens"].ids[:8]


def test_logprobs_of_every_token_are_told_once_and_the_same_streamed_or_not(engine: ArEngine) -> None:
    params = SamplingParams(max_tokens=12, logprobs=2, ignore_eos=True, stop=("never said",))
    engine.submit(Job(RequestId("0"), {"tokens": Tokens(ids=(5, 6, 7))}, params, emit=("text", "tokens")))
    streamed: list[TokenLogprobs] = []
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, Emit) and isinstance(event.part, TextDelta):
                streamed += event.part.logprobs
            if isinstance(event, Finished):
                whole = event.outputs["text"].logprobs
                ids = event.outputs["tokens"].ids
    assert len(whole) == len(ids) == 12
    assert list(whole[: len(streamed)]) == streamed
    assert all(one.logprob == one.top[0].logprob and one.token == one.top[0].token for one in whole)  # it was greedy
    assert all(one.top[0].logprob >= one.top[1].logprob for one in whole)


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (SamplingParams(stop_token_ids=(384,)), "stop_token_ids"),
        (SamplingParams(logit_bias={"384": 1.0}), "logit_bias"),
        (SamplingParams(regex="("), "regex"),
        (SamplingParams(json_schema={"type": "nonsense"}), "json_schema"),
        (SamplingParams(grammar="start: nobody"), "grammar"),
        (SamplingParams(grammar="start: /a/", regex="a"), "grammar"),
    ],
)
def test_settings_that_this_model_cannot_follow_are_refused(
    engine: ArEngine, params: SamplingParams, field: str
) -> None:
    if field in ("regex", "json_schema", "grammar"):
        pytest.importorskip("llguidance")
    with pytest.raises(InvalidRequest) as refusal:
        say(engine, params)
    assert refusal.value.info.field == field


def test_answers_have_the_form_that_is_asked_for_in_one_batch_with_free_ones(engine: ArEngine) -> None:
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 5}, "n": {"enum": [1, 2]}},
        "required": ["name", "n"],
        "additionalProperties": False,
    }
    free = SamplingParams(max_tokens=20)
    alone = say(engine, free)[0].outputs["tokens"]
    number, thing, choice, other = say(
        engine,
        SamplingParams(regex="[0-9]{3}-[a-f]+x", max_tokens=60, temperature=1.0, seed=1),
        SamplingParams(json_schema=schema, max_tokens=300, temperature=0.7, seed=2),
        SamplingParams(grammar='start: "yes" | "no"', max_tokens=20),
        free,
    )
    text = number.outputs["text"].text
    assert text[:3].isdigit()
    assert text[3] == "-"
    made = json.loads(thing.outputs["text"].text)
    assert set(made) == {"name", "n"}
    assert choice.outputs["text"].text in ("yes", "no")
    assert choice.finish_reason == "stop"
    assert other.outputs["tokens"] == alone


def test_without_the_library_a_form_is_refused_in_words(engine: ArEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InvalidRequest, match=r"pip install 'omni-pipeline\[grammar\]'"):
        say(engine, SamplingParams(regex="a"))


def test_what_the_request_says_holds_else_the_models_own() -> None:
    own = GenerationConfig(do_sample=True, temperature=0.5, top_k=7, min_p=0.2, typical_p=0.9)
    rule = decide(SamplingParams(top_k=0), own, frozenset({2}))
    assert (rule.temperature, rule.top_k, rule.min_p, rule.typical_p, rule.ends) == (0.5, 0, 0.2, 0.9, {2})
    assert decide(SamplingParams(ignore_eos=True), own, frozenset({2})).ends == frozenset()
