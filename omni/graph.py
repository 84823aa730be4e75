"""The graph of stages: who feeds whom, in which order, and what a set of wanted outputs needs. Pure and immutable.

`graph_findings` says everything that is wrong with the links of a deploy; `Graph.build` makes the graph of one that has
nothing wrong. Invariant: `order` lists every stage once, sources before their targets, and stages that could come in any
order in the order of the deploy; so the same deploy always gives the same graph.
"""

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace

from omni.graph_checks import Finding, Stages, graph_findings, split_link
from proto.deploy import OUTPUTS, Deploy, Kind, kind_of
from proto.errors import DeployError
from proto.ids import StageName

__all__ = ["Edge", "Finding", "Graph", "graph_findings"]


@dataclass(frozen=True, slots=True)
class Edge:
    """`source.output` goes to `target.input`. `companion` is as in `proto.deploy.Link`."""

    source: StageName
    output: str
    target: StageName
    input: str
    kind: Kind
    companion: str | None = None

    @property
    def name(self) -> str:
        return f"{self.source}.{self.output} -> {self.target}.{self.input}"


@dataclass(frozen=True, slots=True)
class Graph:
    """`order` is topological; `entries` have no linked input, `visible` have an `output` that a caller may ask for, `usual`
    are those of them whose output is given when none is asked for by name: all but a stage that feeds another visible one
    something else, and would do its own output on top. All of them, and `edges` by their target, are in that order."""

    order: tuple[StageName, ...]
    edges: tuple[Edge, ...]
    entries: tuple[StageName, ...]
    visible: tuple[StageName, ...]
    usual: tuple[StageName, ...]
    _into: Mapping[StageName, tuple[Edge, ...]]
    _out_of: Mapping[StageName, tuple[Edge, ...]]
    _published: Mapping[StageName, tuple[str, ...]]

    @staticmethod
    def build(deploy: Deploy) -> "Graph":
        """The graph of a deploy. Raises `DeployError` with every finding, one a line."""
        findings = graph_findings(deploy.stages)
        if findings:
            raise DeployError("\n".join(map(str, findings)), field=findings[0].path)
        return _build(deploy.stages)

    def into(self, stage: StageName) -> tuple[Edge, ...]:
        """The edges that feed a stage, in the order of its `inputs`."""
        return self._into[stage]

    def out_of(self, stage: StageName) -> tuple[Edge, ...]:
        """The edges that a stage feeds, by the order of their targets."""
        return self._out_of[stage]

    def publishes(self, stage: StageName) -> tuple[str, ...]:
        """The outputs that some edge takes from a stage, each once, in the order of `proto.deploy.OUTPUTS`."""
        return self._published[stage]

    def ancestors(self, stages: Iterable[StageName]) -> tuple[StageName, ...]:
        """The given stages and all that they need, directly or not, in topological order. KeyError for an unknown one."""
        needed: set[StageName] = set()
        waiting = list(stages)
        while waiting:
            stage = waiting.pop()
            if stage not in needed:
                needed.add(stage)
                waiting.extend(edge.source for edge in self._into[stage])
        return tuple(stage for stage in self.order if stage in needed)


def _build(stages: Stages) -> Graph:
    order = _topological(stages)
    edges = tuple(edge for target in order for edge in _edges_into(stages, target))
    out_of = {name: tuple(edge for edge in edges if edge.source == name) for name in order}
    visible = tuple(name for name in order if stages[name].output is not None)
    published = {name: _published(stages, name, {edge.output for edge in out_of[name]}) for name in order}
    graph = Graph(
        order=order,
        edges=edges,
        entries=tuple(name for name in order if not stages[name].inputs),
        visible=visible,
        usual=visible,
        _into={name: tuple(edge for edge in edges if edge.target == name) for name in order},
        _out_of=out_of,
        _published=published,
    )
    inner = {before for name in visible for before in graph.ancestors([name]) if before != name}
    taken = {name for name in visible if (output := stages[name].output) and output.value in published[name]}
    usual = tuple(name for name in visible if name not in inner or name in taken)
    return replace(graph, usual=usual)


def _edges_into(stages: Stages, target: StageName) -> Iterable[Edge]:
    for name, link in stages[target].inputs.items():
        source, output = split_link(link.source)
        kind = OUTPUTS[kind_of(stages[source])][output]
        yield Edge(source, output, target, name, kind, link.companion)


def _published(stages: Stages, name: StageName, taken: Set[str]) -> tuple[str, ...]:
    return tuple(output for output in OUTPUTS[kind_of(stages[name])] if output in taken)


def _topological(stages: Stages) -> tuple[StageName, ...]:
    """Kahn's algorithm; of the stages that are free, the first of the deploy comes first."""
    sources = {name: {split_link(link.source)[0] for link in stage.inputs.values()} for name, stage in stages.items()}
    order: dict[StageName, None] = {}
    while len(order) < len(sources):
        order[next(name for name, need in sources.items() if name not in order and need <= order.keys())] = None
    return tuple(order)
