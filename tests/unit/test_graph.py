"""The graph of stages: order, ancestors, and every way in which links can be wrong."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni.graph import Edge, Graph, graph_findings
from omni.graph_checks import find_cycles
from proto.deploy import ArStage, Deploy, DiffusionStage, Kind, Link, StageSpec
from proto.errors import DeployError
from proto.ids import StageName


def ar(output: Kind | None = Kind.TEXT, **inputs: str) -> ArStage:
    return ArStage(inputs={name: Link(source=source) for name, source in inputs.items()}, output=output)


def diffusion(output: Kind | None = Kind.IMAGE, **inputs: str) -> DiffusionStage:
    return DiffusionStage(inputs={name: Link(source=source) for name, source in inputs.items()}, output=output)


def build(**stages: StageSpec) -> Graph:
    return Graph.build(Deploy(name="test", stages=stages))


def told(**stages: StageSpec) -> list[str]:
    return [str(finding) for finding in graph_findings({StageName(name): stage for name, stage in stages.items()})]


def test_order_puts_sources_first_and_else_keeps_the_deploys_order() -> None:
    graph = build(painter=diffusion(prompt="thinker.text", kv="second.kv"), thinker=ar(), other=ar(), second=ar())
    assert graph.order == ("thinker", "other", "second", "painter")
    assert graph.entries == ("thinker", "other", "second")
    assert graph.visible == ("thinker", "other", "second", "painter")


def test_edges_say_what_goes_where_and_of_which_kind() -> None:
    graph = build(
        thinker=ar(output=None),
        painter=DiffusionStage(
            inputs={"kv": Link(source="thinker.kv", companion="negative_prompt")}, output=Kind.IMAGE
        ),
    )
    edge = Edge(StageName("thinker"), "kv", StageName("painter"), "kv", Kind.KV, "negative_prompt")
    assert graph.edges == graph.into(StageName("painter")) == graph.out_of(StageName("thinker")) == (edge,)
    assert graph.visible == ("painter",)
    assert edge.name == "thinker.kv -> painter.kv"


def test_publishes_each_output_once_however_many_stages_take_it() -> None:
    graph = build(
        a=ar(),
        b=diffusion(prompt="a.text"),
        c=diffusion(prompt="a.text", prompt_embeds="a.hidden"),
        d=ar(prompt="a.text"),
    )
    assert graph.publishes(StageName("a")) == ("text", "hidden")
    assert graph.publishes(StageName("b")) == ()


def test_ancestors_are_only_what_is_needed() -> None:
    graph = build(a=ar(), b=ar(prompt="a.text"), c=diffusion(prompt="b.text"), d=diffusion(prompt="a.text"))
    assert graph.ancestors([StageName("d")]) == ("a", "d")
    assert graph.ancestors([StageName("c"), StageName("a")]) == ("a", "b", "c")
    assert graph.ancestors([]) == ()


@pytest.mark.parametrize(
    ("stages", "finding"),
    [
        (
            {"a": ar(), "b": diffusion(prompt="aa.text")},
            "stages.b.inputs.prompt: there is no stage 'aa'; did you mean 'a'?",
        ),
        (
            {"a": ar(), "b": diffusion(prompt="nobody.text")},
            "stages.b.inputs.prompt: there is no stage 'nobody'; stages: a, b",
        ),
        (
            {"a": ar(), "b": diffusion(prompt="a")},
            "stages.b.inputs.prompt: 'a' is not of the form stage.output, such as 'a.text'",
        ),
        (
            {"a": ar(), "b": diffusion(kv="a.kv.k")},
            "stages.b.inputs.kv: 'a.kv.k' is not of the form stage.output, such as 'a.kv'",
        ),
        (
            {"a": ar(), "b": diffusion(prompt="a.txt")},
            "stages.b.inputs.prompt: stage a (kind ar) has no output 'txt'; did you mean 'text'?",
        ),
        (
            {"a": ar(), "b": diffusion(prompt="a.image")},
            "stages.b.inputs.prompt: stage a (kind ar) has no output 'image'; its outputs: text, tokens, hidden, kv",
        ),
        (
            {"a": ar(), "b": diffusion(promt="a.text")},
            "stages.b.inputs.promt: a stage of kind diffusion has no input 'promt'; did you mean 'prompt'?",
        ),
        (
            {"a": ar(), "b": ar(kv="a.kv")},
            "stages.b.inputs.kv: a stage of kind ar has no input 'kv'; its inputs: prompt, tokens, prompt_embeds",
        ),
        (
            {"a": ar(), "b": diffusion(prompt="a.kv")},
            "stages.b.inputs.prompt: a.kv is of kind kv, but input 'prompt' takes text; use a.text",
        ),
        (
            {"a": diffusion(), "b": diffusion(kv="a.image")},
            "stages.b.inputs.kv: a.image is of kind image, but input 'kv' takes kv",
        ),
        (
            {"a": ar(output=Kind.IMAGE)},
            "stages.a.output: a stage of kind ar cannot give 'image'; it can give text, tokens, hidden, kv",
        ),
        (
            {"a": diffusion(output=Kind.TEXT)},
            "stages.a.output: a stage of kind diffusion cannot give 'text'; it can give image, latents, audio, video",
        ),
        (
            {"a": ar(prompt="a.text")},
            "stages.a.inputs.prompt: the links form a cycle: a -> a; take one of them away",
        ),
        (
            {"a": ar(prompt="c.text"), "b": ar(prompt="a.text"), "c": ar(prompt="b.text")},
            "stages.a.inputs.prompt: the links form a cycle: a -> b -> c -> a; take one of them away",
        ),
        (
            {"a": ar(output=None), "b": diffusion(output=None, prompt="a.text")},
            "stages: no stage has a visible output, so nothing could be asked for; "
            "give at least one stage an `output`, such as `output: text` or `output: image`",
        ),
    ],
)
def test_every_wrong_link_is_told_with_its_remedy(stages: dict[str, StageSpec], finding: str) -> None:
    assert told(**stages) == [finding]
    with pytest.raises(DeployError, match="stages"):
        build(**stages)


@pytest.mark.parametrize(
    ("link", "target", "finding"),
    [
        (Link(source="a.kv", companion="prompt"), DiffusionStage, "is not a field with a companion's prompt"),
        (Link(source="a.text", companion="negative_prompt"), ArStage, "only inputs of diffusion stages"),
        (Link(source="c.image", companion="negative_prompt"), DiffusionStage, "needs a source of kind ar"),
    ],
)
def test_companions_are_for_diffusion_inputs_from_ar_stages(
    link: Link, target: type[ArStage] | type[DiffusionStage], finding: str
) -> None:
    key = {"a.kv": "kv", "a.text": "prompt", "c.image": "image"}[link.source]
    (only,) = told(a=ar(), c=diffusion(), b=target(inputs={key: link}))
    assert only.startswith(f"stages.b.inputs.{key}.companion: ")
    assert finding in only


def test_links_to_a_stage_that_could_not_be_read_are_taken_on_trust() -> None:
    assert not graph_findings({StageName("b"): diffusion(prompt="a.text")}, broken={"a"})


def test_disjoint_cycles_are_told_one_by_one() -> None:
    stages = {"a": ar(prompt="b.text"), "b": ar(prompt="a.text"), "c": ar(prompt="d.text"), "d": ar(prompt="c.text")}
    assert len(told(**stages, e=ar(prompt="d.text"))) == 2


Links = dict[int, set[int]]


def deploy_of(links: Links, order: list[int]) -> dict[StageName, StageSpec]:
    """Stage i takes from every stage in links[i]; input names do not matter to order and cycles."""
    return {
        StageName(f"s{at}"): DiffusionStage(
            inputs={f"in{source}": Link(source=f"s{source}.image") for source in sorted(links.get(at, ()))},
            output=Kind.IMAGE,
        )
        for at in order
    }


@st.composite
def dags(draw: st.DrawFn) -> tuple[Links, list[int]]:
    size = draw(st.integers(1, 12))
    links = {at: draw(st.sets(st.integers(0, at - 1), max_size=4)) for at in range(1, size)}
    return links, draw(st.permutations(range(size)))


@given(dags())
def test_topological_order_of_any_dag(dag: tuple[Links, list[int]]) -> None:
    links, order = dag
    stages = deploy_of(links, order)
    assert find_cycles(stages) == []
    graph = Graph.build(Deploy(name="x", stages=_with_real_inputs(stages)))
    position = {name: at for at, name in enumerate(graph.order)}
    assert sorted(graph.order) == sorted(stages)
    assert all(position[edge.source] < position[edge.target] for edge in graph.edges)
    for name in graph.order:
        needed = graph.ancestors([name])
        assert needed[-1] == name
        assert all(edge.source in needed for stage in needed for edge in graph.into(stage))
    assert graph == Graph.build(Deploy(name="x", stages=_with_real_inputs(stages)))


def _with_real_inputs(stages: dict[StageName, StageSpec]) -> dict[StageName, StageSpec]:
    """The same shape with at most two links a stage, on inputs that exist: image and latents."""
    made: dict[StageName, StageSpec] = {}
    for name, stage in stages.items():
        sources = [link.source.partition(".")[0] for link in stage.inputs.values()][:2]
        inputs = {
            key: Link(source=f"{source}.{key}") for key, source in zip(("image", "latents"), sources, strict=False)
        }
        made[name] = DiffusionStage(inputs=inputs, output=Kind.IMAGE)
    return made


@given(dags(), st.randoms(use_true_random=False))
def test_an_edge_back_makes_a_cycle_that_is_found_and_real(dag: tuple[Links, list[int]], rng: random.Random) -> None:
    links, order = dag
    size = len(order)
    target = rng.randrange(size)
    above = {at for at in range(size) if _reaches(links, at, target)}
    links = {**links, target: {*links.get(target, set()), rng.choice(sorted(above))}}
    cycles = find_cycles(deploy_of(links, order))
    assert cycles
    for cycle in cycles:
        numbers = [int(name[1:]) for name in cycle]
        after = [*numbers[1:], numbers[0]]
        assert all(source in links[taker] for source, taker in zip(numbers, after, strict=True))


def _reaches(links: Links, start: int, goal: int) -> bool:
    """Whether `start` takes from `goal`, directly or not, or is it."""
    return start == goal or any(_reaches(links, source, goal) for source in links.get(start, ()))
