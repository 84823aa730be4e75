"""The collator: which calls may be made as one, how their arguments are joined, and whose part of the result is whose."""

from typing import NamedTuple

import pytest
import torch
from diffusers.models.transformers.transformer_glm_image import GlmImageKVCache
from transformers.modeling_outputs import BaseModelOutput

from proto.params import Json
from stages.diffusion import collate
from stages.diffusion.collate import CannotSplit
from stages.diffusion.forms import Forms, classify
from stages.diffusion.parking import Call, Site
from stages.diffusion.prompt_cache import PromptCache, prompt_key
from stages.diffusion.scheduler import Phase
from stages.diffusion.traits import Traits

TRAITS = Traits(lists=frozenset({"x"}), masked={"text": "text_mask"})
SITE = Site("transformer", Phase.DENOISE, lambda **_: None, ("hidden_states", "x", "timestep"), TRAITS)


def call(*args: Json, rows: int = 2, site: Site = SITE, **kwargs: Json) -> Call:
    given = {} if args or "x" in kwargs else {"hidden_states": torch.randn(rows, 4, 3)}
    return Call(site, args, {**given, **kwargs})


def together(one: Call, other: Call) -> bool:
    first, second = classify(one), classify(other)
    return first.rules is not None and second.rules is not None and first.bucket == second.bucket


def joined(*calls: Call) -> dict[str, Json]:
    return collate.join(calls, [classify(one) for one in calls])


# --- what goes together -----------------------------------------------------------------------------------------------


def test_different_timesteps_go_together_and_are_spread_over_the_rows() -> None:
    one, other = call(timestep=torch.tensor(9.0)), call(rows=1, timestep=torch.tensor([5.0]))
    assert together(one, other)
    assert joined(one, other)["timestep"].tolist() == [9.0, 9.0, 5.0]
    expanded = call(timestep=torch.tensor([3.0, 3.0]))
    assert together(one, expanded)
    assert joined(one, expanded)["timestep"].tolist() == [9.0, 9.0, 3.0, 3.0]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"hidden_states": torch.zeros(2, 4, 3)}, {"hidden_states": torch.zeros(2, 5, 3)}),
        ({"hidden_states": torch.zeros(2, 4, 3)}, {"hidden_states": torch.zeros(2, 4, 3, dtype=torch.float64)}),
        ({"return_dict": False}, {"return_dict": True}),
        ({"scale": 1}, {"scale": 1.5}),
        ({"scale": True}, {"scale": 1}),
        ({"img_ids": torch.zeros(4, 3)}, {"img_ids": torch.ones(4, 3)}),
        ({"img_ids": torch.zeros(2, 3)}, {"img_ids": torch.ones(2, 3)}),  # shaped like rows, but read once for all
        ({"rope": (torch.zeros(9, 3), torch.zeros(9, 3))}, {"rope": (torch.zeros(9, 3), torch.ones(9, 3))}),
        ({"img_shapes": [[(1, 4, 4)]] * 2}, {"img_shapes": [[(1, 2, 8)]] * 2}),
        ({"text": torch.zeros(2, 5, 3)}, {"text": torch.zeros(2, 5, 3), "text_mask": torch.ones(2, 5)}),
        ({"kwargs": {"a": torch.zeros(2, 3)}}, {"kwargs": {"a": torch.zeros(2, 4)}}),
        ({"kwargs": {"a": 1}}, {"kwargs": {"b": 1}}),
        ({"unmasked": torch.zeros(2, 5, 3)}, {"unmasked": torch.zeros(2, 6, 3)}),
    ],
)  # fmt: skip
def test_what_one_row_would_force_on_another_keeps_calls_apart(one: dict[str, Json], other: dict[str, Json]) -> None:
    assert together(call(**one), call(**one))
    assert not together(call(**one), call(**other))


def test_equal_content_in_other_objects_goes_together() -> None:
    one = call(img_ids=torch.arange(12.0).view(4, 3), img_shapes=[[(1, 4, 4)]] * 2)
    other = call(rows=1, img_ids=torch.arange(12.0).view(4, 3), img_shapes=[[(1, 4, 4)]])
    assert together(one, other)
    made = joined(one, other)
    assert made["img_shapes"] == [[(1, 4, 4)]] * 3
    assert made["img_ids"].shape == (4, 3)


def test_dicts_are_joined_inside() -> None:
    one = call(added={"ids": torch.zeros(2, 6), "kind": "x"})
    other = call(rows=1, added={"ids": torch.ones(1, 6), "kind": "x"})
    added = joined(one, other)["added"]
    assert added["ids"].tolist() == [[0.0] * 6, [0.0] * 6, [1.0] * 6]
    assert added["kind"] == "x"


def test_lists_of_rows_of_any_shape_are_concatenated_and_split_again() -> None:
    one, other = call(x=[torch.zeros(3, 4)]), call(x=[torch.ones(3, 9), torch.ones(3, 2)])
    made = joined(one, other)
    assert [entry.shape[1] for entry in made["x"]] == [4, 9, 2]
    result = [torch.full((3, 1), float(row)) for row in range(3)]  # as many channels as rows: still one a row
    first, second = collate.split((result,), [classify(one), classify(other)])
    assert [entry.mean().item() for entry in first[0]] == [0.0]
    assert [entry.mean().item() for entry in second[0]] == [1.0, 2.0]


def test_masked_embeddings_are_padded_where_lengths_differ() -> None:
    one = call(text=torch.ones(2, 3, 5), text_mask=torch.ones(2, 3, dtype=torch.int64))
    other = call(rows=1, text=torch.ones(1, 4, 5), text_mask=torch.tensor([[1, 1, 1, 0]]))
    assert together(one, other)
    assert classify(one).exact != classify(other).exact
    made = joined(one, other)
    assert made["text"].shape == (3, 4, 5)
    assert made["text_mask"].tolist() == [[1, 1, 1, 0]] * 3
    assert made["text"][:2, 3].abs().sum() == 0


def test_masks_that_nobody_gave_are_made_only_where_lengths_differ() -> None:
    one, same, longer = (call(rows=1, text=torch.ones(1, n, 5), text_mask=None) for n in (3, 3, 4))
    assert joined(one, same)["text_mask"] is None
    assert joined(one, longer)["text_mask"].tolist() == [[True, True, True, False], [True] * 4]


class Pair(NamedTuple):
    left: int
    right: int


@pytest.mark.parametrize("value", [object(), torch.Generator(), Pair(1, 2), {"deep": [object()]}, lambda: None])
def test_what_cannot_be_read_is_made_alone(value: Json) -> None:
    assert classify(call(cache=value)).rules is None


def test_positions_beyond_the_named_ones_are_made_alone_and_kept() -> None:
    site = Site("s", Phase.DENOISE, lambda a, *rest, **kw: (a, rest, kw), ("a",), Traits())
    odd = Call(site, (torch.zeros(1), 2, 3), {"b": 4})
    assert classify(odd).rules is None
    assert odd.make()[1:] == ((2, 3), {"b": 4})


# --- reading again ----------------------------------------------------------------------------------------------------


def test_form_is_read_again_when_anything_but_the_rows_has_changed() -> None:
    forms, ids = Forms(), torch.zeros(4, 3)
    first = forms.read(call(img_ids=ids, scale=1.0, kwargs={"a": 1}))
    assert forms.read(call(img_ids=ids, scale=1.0, kwargs={"a": 1})) is first
    for other in (
        call(img_ids=torch.ones(4, 3), scale=1.0, kwargs={"a": 1}),
        call(img_ids=ids, scale=2.0, kwargs={"a": 1}),
        call(img_ids=ids, scale=1.0, kwargs={"a": 2}),
        call(img_ids=ids, scale=1.0, kwargs={"a": 1}, more=None),
        call(rows=3, img_ids=ids, scale=1.0, kwargs={"a": 1}),
    ):
        assert forms.read(other) == classify(other)
        assert forms.read(other).bucket != first.bucket or forms.read(other).rows != first.rows


def test_dict_that_its_owner_has_changed_is_read_again() -> None:
    forms, kwargs = Forms(), {"a": 1}
    first = forms.read(call(kwargs=kwargs))
    kwargs["a"] = 2
    assert forms.read(call(kwargs=kwargs)).bucket != first.bucket


def test_cache_object_is_inert_only_as_long_as_it_caches_nothing() -> None:
    forms, cache = Forms(), GlmImageKVCache(num_layers=1)
    assert forms.read(call(kv_caches=cache)).rules is not None
    assert together(call(kv_caches=cache), call(kv_caches=GlmImageKVCache(num_layers=1)))
    cache.set_mode("read")
    assert forms.read(call(kv_caches=cache)).rules is None


# --- results ----------------------------------------------------------------------------------------------------------


def test_results_of_every_form_are_split_by_rows() -> None:
    forms = [classify(call(rows=2)), classify(call(rows=1))]
    hidden = torch.arange(3.0).view(3, 1)
    first, second = collate.split(BaseModelOutput(last_hidden_state=hidden, hidden_states=(hidden, hidden + 1)), forms)
    assert isinstance(first, BaseModelOutput)
    assert first.last_hidden_state.tolist() == [[0.0], [1.0]]
    assert [layer.tolist() for layer in second.hidden_states] == [[[2.0]], [[3.0]]]
    assert collate.split((hidden, {}, None), forms)[1] == (hidden[2:], {}, None)


@pytest.mark.parametrize("result", [object(), torch.zeros(2, 1), torch.tensor(1.0), (torch.zeros(3), object())])
def test_result_that_does_not_say_whose_it_is_is_not_split(result: Json) -> None:
    with pytest.raises(CannotSplit):
        collate.split(result, [classify(call(rows=2)), classify(call(rows=1))])


def test_parts_of_one_call_make_the_whole() -> None:
    whole = call(
        rows=5, timestep=torch.tensor(3.0), added={"ids": torch.arange(5)}, img_ids=torch.zeros(4, 3), text_mask=None
    )
    form = classify(whole)
    parts = [collate.narrow(whole, form, start, min(start + 2, 5)) for start in (0, 2, 4)]
    assert [len(part["hidden_states"]) for part in parts] == [2, 2, 1]
    assert all(part["img_ids"].shape == (4, 3) and part["timestep"].ndim == 0 for part in parts)
    made = collate.concatenate([(part["hidden_states"], part["added"]) for part in parts])
    assert torch.equal(made[0], whole.arguments["hidden_states"])
    assert made[1]["ids"].tolist() == [0, 1, 2, 3, 4]


# --- prompts ----------------------------------------------------------------------------------------------------------


def test_prompts_are_known_by_their_content_and_handed_out_as_copies() -> None:
    cache = PromptCache(10_000)
    one = prompt_key(call(hidden_states=torch.arange(3)))
    assert one is not None
    assert cache.get(one) is None
    kept = BaseModelOutput(last_hidden_state=torch.zeros(3))
    cache.put(one, kept)
    kept.last_hidden_state += 1
    found = cache.get(prompt_key(call(hidden_states=torch.arange(3))))
    assert found.last_hidden_state.tolist() == [0.0] * 3
    found.last_hidden_state += 5
    assert cache.get(one).last_hidden_state.tolist() == [0.0] * 3
    assert cache.get(prompt_key(call(hidden_states=torch.arange(1, 4)))) is None
    assert prompt_key(call(cache=object())) is None
    assert (cache.hits, cache.misses) == (2, 2)


def test_prompt_used_longest_ago_goes_first() -> None:
    cache = PromptCache(100)
    for name in "ab":
        cache.put(name, torch.zeros(12))
    cache.get("a")
    cache.put("c", torch.zeros(12))
    assert cache.get("b") is None
    assert cache.get("a") is not None
    cache.put("too large", torch.zeros(26))
    assert (len(cache), cache.size) == (2, 96)
