"""Which names a deploy answers to as `model`, and which stage a route means by one. Pure data and lookups.

The deploy's own name stands for the furthest stage that gives what the route returns; `deploy/stage` names one.
"""

from typing import Final

from omni.graph import Graph
from proto.deploy import OUTPUTS, Deploy, Kind, kind_of
from proto.errors import NotServable, UnknownModel
from proto.ids import StageName


class Catalog:
    def __init__(self, deploy: Deploy) -> None:
        self._deploy: Final = deploy
        self._graph: Final = Graph.build(deploy)
        self._visible: Final = {
            StageName(n): spec.output for n, spec in deploy.stages.items() if spec.output is not None
        }

    @property
    def names(self) -> list[str]:
        """Every accepted `model`: the deploy, then `deploy/stage` for each stage with a visible output."""
        return [self._deploy.name, *(f"{self._deploy.name}/{stage}" for stage in self._visible)]

    def check(self, model: str) -> None:
        """Raises `UnknownModel` for a name that is not served here."""
        if model not in self.names:
            raise UnknownModel(
                f"model {model[:100]!r} is not served here; served are: {', '.join(self.names)}", field="model"
            )

    def stage_for(self, model: str | None, wanted: Kind, route: str) -> StageName:
        """The stage that answers `route` for `model` (None: the deploy).

        Raises `UnknownModel`, or `NotServable` saying which kind of stage the deploy would need.
        """
        if model is not None:
            self.check(model)
        fitting = [stage for stage, output in self._visible.items() if output is wanted]
        if model is not None and model != self._deploy.name:
            stage = StageName(model.partition("/")[2])
            if stage not in fitting:
                raise self._not_servable(wanted, route, f"{model} gives {self._visible[stage].value}")
            return stage
        if not fitting:
            has = ", ".join(f"{n} ({o.value})" for n, o in self._visible.items()) or "no visible output"
            raise self._not_servable(wanted, route, f"deploy {self._deploy.name} has: {has}")
        inner = {before for stage in fitting for before in self.ancestors(stage)}
        return next(stage for stage in fitting if stage not in inner)

    def ancestors(self, stage: StageName) -> list[StageName]:
        """The stages whose outputs `stage` needs, directly or not."""
        return [name for name in self._graph.ancestors([stage]) if name != stage]

    def writer_for(self, stage: StageName) -> StageName | None:
        """The stage that writes the prompt of `stage`, if callers may see its text."""
        writers = (edge.source for edge in self._graph.into(stage) if edge.input == "prompt")
        return next((name for name in writers if self._visible.get(name) is Kind.TEXT), None)

    def leads_to(self, writer: StageName, stage: StageName) -> bool:
        """Whether what `writer` writes reaches `stage` as text, directly or not."""
        needed = self._graph.ancestors([stage])
        return any(edge.kind is Kind.TEXT and edge.target in needed for edge in self._graph.out_of(writer))

    def _not_servable(self, wanted: Kind, route: str, has: str) -> NotServable:
        kinds = [kind for kind, outputs in OUTPUTS.items() if wanted in outputs.values()]
        served = {kind_of(spec) for spec in self._deploy.stages.values()}
        hint = "" if served & set(kinds) else ", and it has no stage of that kind"
        return NotServable(
            f"{route} needs a stage of kind {' or '.join(kinds)} with `output: {wanted.value}`; {has}{hint}",
            field="model",
        )
