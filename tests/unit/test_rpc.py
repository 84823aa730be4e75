"""Calls are read strictly: what is unknown, missing or of the wrong type is named, with the nearest right name."""

import pytest

from proto.calls import LoadLora, Method, NoArgs, offering
from proto.errors import InvalidRequest
from proto.ids import StageName
from proto.params import Json
from stages.rpc import Calls, Handler


@pytest.fixture
def calls() -> Calls:
    def load(args: LoadLora) -> Json:
        return [args.name, args.path, args.weight_name]

    methods = {Method.LOAD_LORA: Handler(LoadLora, load), Method.SLEEP: Handler(NoArgs, lambda _: {"asleep": True})}
    return Calls(StageName("painter"), methods)


def test_arguments_reach_the_method(calls: Calls) -> None:
    assert calls.call("load_lora", {"name": "fox", "path": "/a"}) == ["fox", "/a", None]
    assert calls.call("sleep", {}) == {"asleep": True}


@pytest.mark.parametrize(
    ("method", "args", "field", "words"),
    [
        ("load_loras", {}, "method", "there is no method 'load_loras'; did you mean 'load_lora'?"),
        ("sing", {}, "method", "there is no method 'sing'; methods: load_lora, sleep"),
        ("load_lora", {"name": "fox"}, "path", "needs 'path'"),
        ("load_lora", {"name": "fox", "pth": "/a"}, "pth", "takes no 'pth'; did you mean 'path'?"),
        ("load_lora", {"name": "fox", "path": 7}, "path", "path: Expected `str`, got `int`, got 7"),
        ("load_lora", {"name": "../fox", "path": "/a"}, "name", "got '../fox'"),
        ("load_lora", {"name": "fox", "path": ""}, "path", "got ''"),
        ("sleep", {"level": 1}, "level", "takes no 'level'; there are no arguments"),
    ],
)
def test_a_bad_call_names_the_field_and_the_remedy(
    calls: Calls, method: str, args: dict[str, Json], field: str, words: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        calls.call(method, args)
    assert refused.value.info.field == field
    assert "stage painter" in refused.value.info.message
    assert words in refused.value.info.message


def test_only_calls_that_change_what_is_offered_are_read_as_an_offer() -> None:
    assert offering("load_lora", {"loras": {"fox": {}}, "asleep": False}) == (("fox",), False)
    assert offering("sleep", {"loras": {}, "asleep": True, "more": 1}) == ((), True)
    assert offering("list_loras", {"loras": {"fox": {}}, "asleep": False}) is None
    for value in (None, {}, {"loras": ["fox"], "asleep": False}, {"loras": {}}):
        assert offering("wake", value) is None
