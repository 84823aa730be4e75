"""What can be wrong with the links between stages. Pure: every check returns findings, none raises.

A finding names its dotted key path in the deploy, so that whoever read the YAML can add file and line.
"""

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass

from proto.deploy import INPUTS, OUTPUTS, Kind, Link, StageSpec, kind_of
from proto.ids import StageName
from proto.suggest import hint

Stages = Mapping[StageName, StageSpec]

COMPANION_FIELDS = ("negative_prompt",)
"""Request fields that a companion may take its prompt from."""


@dataclass(frozen=True, slots=True)
class Finding:
    """`derived` means that it may only follow from another mistake in the same `section`, such as a misspelt key: it is
    not to be told before those are mended."""

    path: str
    message: str
    derived: bool = False

    @property
    def section(self) -> str:
        """The stage or other top-level key that it is about."""
        keys = self.path.split(".")
        return ".".join(keys[: 2 if keys[0] == "stages" else 1])

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


def split_link(source: str) -> tuple[StageName, str]:
    """`stage.output` as its two parts; the second is empty if there is no dot."""
    stage, _, output = source.partition(".")
    return StageName(stage), output


def graph_findings(stages: Stages, broken: Set[str] = frozenset()) -> list[Finding]:
    """Everything that is wrong with the links and outputs of `stages`.

    `broken` names further stages of the same deploy that could not be read: links to them are taken on trust.
    """
    found = [finding for name in stages for finding in _stage_findings(stages, name, broken)]
    found += [_cycle_finding(stages, cycle) for cycle in find_cycles(stages)]
    if not broken and all(stage.output is None for stage in stages.values()):
        remedy = "give at least one stage an `output`, such as `output: text` or `output: image`"
        found.append(Finding("stages", f"no stage has a visible output, so nothing could be asked for; {remedy}", True))
    return found


def find_cycles(stages: Stages) -> list[tuple[StageName, ...]]:
    """Disjoint cycles, each from its first stage in the deploy's order; empty if and only if the graph has none.

    In a cycle (a, b, c), b takes from a, c from b and a from c. Links to stages that are not there are ignored.
    """
    sources = {name: [split_link(link.source)[0] for link in stage.inputs.values()] for name, stage in stages.items()}
    cycles = []
    left = _feeding_in_circles(sources, list(stages))
    while left:
        trail = [left[0]]
        while (source := next(one for one in sources[trail[-1]] if one in left)) not in trail:
            trail.append(source)
        cycle = trail[trail.index(source) :]
        first = cycle.index(min(cycle, key=left.index))
        cycles.append((cycle[first], *reversed(cycle[first + 1 :] + cycle[:first])))
        left = _feeding_in_circles(sources, [name for name in left if name not in cycle])
    return cycles


def _feeding_in_circles(sources: Mapping[StageName, list[StageName]], names: list[StageName]) -> list[StageName]:
    """What is left of `names` when stages that none of the others feed are taken away until there are no more of them."""
    while True:
        kept = [name for name in names if any(source in names for source in sources[name])]
        if len(kept) == len(names):
            return kept
        names = kept


def _cycle_finding(stages: Stages, cycle: tuple[StageName, ...]) -> Finding:
    source, target = cycle[-1], cycle[0]
    name = next(key for key, link in stages[target].inputs.items() if split_link(link.source)[0] == source)
    drawn = " -> ".join((*cycle, target))
    return Finding(f"stages.{target}.inputs.{name}", f"the links form a cycle: {drawn}; take one of them away")


def _stage_findings(stages: Stages, name: StageName, broken: Set[str]) -> Iterator[Finding]:
    stage = stages[name]
    kind = kind_of(stage)
    if stage.output is not None and stage.output not in OUTPUTS[kind].values():
        can = ", ".join(output.value for output in OUTPUTS[kind].values())
        message = f"a stage of kind {kind} cannot give {stage.output.value!r}; it can give {can}"
        yield Finding(f"stages.{name}.output", message)
    for key, link in stage.inputs.items():
        path = f"stages.{name}.inputs.{key}"
        takes = INPUTS[kind].get(key)
        if takes is None:
            message = f"a stage of kind {kind} has no input {key!r}; {hint(key, INPUTS[kind], 'its inputs')}"
            yield Finding(path, message)
        for message in _link_messages(stages, link, broken, key, takes):
            yield Finding(path, message)
        for message in _companion_messages(stages, kind, link):
            yield Finding(f"{path}.companion", message)


def _link_messages(
    stages: Stages, link: Link, broken: Set[str], key: str, takes: tuple[Kind, ...] | None
) -> Iterator[str]:
    source, output = split_link(link.source)
    if not source or not output or "." in output:
        yield f"{link.source!r} is not of the form stage.output, such as {_example(stages, source, takes)!r}"
    elif source not in stages:
        if source not in broken:
            yield f"there is no stage {source!r}; {hint(source, stages, 'stages')}"
    else:
        kind = kind_of(stages[source])
        given = OUTPUTS[kind].get(output)
        if given is None:
            end = hint(output, OUTPUTS[kind], "its outputs")
            yield f"stage {source} (kind {kind}) has no output {output!r}; {end}"
        elif takes is not None and given not in takes:
            wanted = " or ".join(one.value for one in takes)
            yield f"{link.source} is of kind {given.value}, but input {key!r} takes {wanted}{_fitting(stages, source, takes)}"


def _example(stages: Stages, source: StageName, takes: tuple[Kind, ...] | None) -> str:
    stage = source if source in stages else next(iter(stages))
    outputs = OUTPUTS[kind_of(stages[stage])]
    fitting = [name for name, kind in outputs.items() if takes is None or kind in takes]
    return f"{stage}.{(fitting or list(outputs))[0]}"


def _fitting(stages: Stages, source: StageName, takes: tuple[Kind, ...]) -> str:
    outputs = OUTPUTS[kind_of(stages[source])]
    fitting = [f"{source}.{name}" for name, kind in outputs.items() if kind in takes]
    return f"; use {' or '.join(fitting)}" if fitting else ""


def _companion_messages(stages: Stages, kind: str, link: Link) -> Iterator[str]:
    if link.companion is None:
        return
    if link.companion not in COMPANION_FIELDS:
        yield f"{link.companion!r} is not a field with a companion's prompt; write {COMPANION_FIELDS[0]}"
    if kind != "diffusion":
        yield f"only inputs of diffusion stages may have a companion, and this stage is of kind {kind}"
    source = stages.get(split_link(link.source)[0])
    if source is not None and kind_of(source) != "ar":
        yield f"a companion needs a source of kind ar, and that of {link.source} is {kind_of(source)}"
