"""From what was typed behind `omni-master launch` to a checked deploy. The one way in: `load_deploy`.

Precedence: `--set`, then the YAML file (or what the model folder says), then the structs' defaults, then the model's own.
Invariant: what is returned can be started; everything that is wrong is said at once, each problem with its place.
"""

import io
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from launch import bare_model, builtin_configs, overrides
from launch.deploy_checks import deploy_findings
from launch.deploy_reader import DeployReader
from launch.flatten import Leaf, flatten
from launch.origins import Layer, Origin, Problem, refusal
from launch.yaml_tree import MAX_CHARS, Node, parse
from omni.graph import Finding, graph_findings
from proto.deploy import Deploy, StageSpec
from proto.ids import StageName
from proto.suggest import hint, nearest

_OF_THE_MODEL = re.compile(
    r"^stages\.[^.]+\.(defaults\.(?!extra|seed|negative_prompt)\w+|engine\.max_model_len|model\.pipeline_class)$"
)
"""Keys where null means that the model's own value applies."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """A deploy that passed every check. `origins` has each of its values by dotted key path, in order; `path` is the
    YAML file or the model."""

    deploy: Deploy
    origins: Mapping[str, Origin]
    path: Path


def load_deploy(source: Path | str, overrides: Sequence[str] = (), check_paths: bool = True) -> Resolved:
    """Read a YAML file, a bare model (folder or GGUF file), or a built-in config by its name, such as "demo".

    `overrides` are `KEY=VALUE` texts of `--set`. Without `check_paths` the models need not be on this machine.
    Raises `DeployError` with every problem found, one a line.
    """
    problems: list[Problem] = []
    try:
        path = _locate(source)
        if bare_model.is_bare_model(path):
            tree, label = bare_model.tree_for(path), str(path)
        else:
            label = str(source) if Path(source) == path else str(path)
            tree = parse(_text(path, label), label, problems)
    except OSError as error:
        message = f"cannot be read: {error.strerror or error}"
        raise refusal([Problem(Origin(Layer.FILE, f"{source!s:.200}", 0), "", message)]) from error
    return _resolve(tree, overrides, problems, path, check_paths)


def _resolve(tree: Node, sets: Sequence[str], problems: list[Problem], path: Path, check_paths: bool) -> Resolved:
    reader = DeployReader(problems)
    deploy = reader.read(overrides.apply(tree, sets, problems))
    if deploy is not None:
        deploy = _with_model_paths(deploy, reader.origins, Path(os.path.abspath(path)).parent)
        broken = {key.split(".")[1] for key in reader.broken if key.startswith("stages.") and key.count(".") == 1}
        findings = [*graph_findings(deploy.stages, broken), *deploy_findings(deploy, check_paths)]
        problems += [_placed(one, reader.origins, tree.origin) for one in findings if not _follows(one, problems)]
    if problems or deploy is None:
        raise refusal(problems)
    return Resolved(deploy, {leaf.path: _origin(leaf, reader.origins) for leaf in flatten(deploy)}, path)


def _locate(source: Path | str) -> Path:
    """The file or folder that is meant. A bare word that names a built-in config is that; `./demo` is a folder."""
    names = builtin_configs.names()
    if isinstance(source, str) and source in names:
        return builtin_configs.path_of(source)
    path = expanded(source)
    if path.exists():
        return path
    beside = [one.name for one in path.parent.iterdir() if one.name != path.name] if path.parent.is_dir() else []
    near = nearest(path.name, beside)
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        end = f"; did you mean {str(path.with_name(near))!r}?" if near else ""
    else:
        end = f", nor a built-in config; {hint(str(source), names, 'built-in configs')}"
    raise refusal([Problem(Origin(Layer.FILE, str(source), 0), "", f"no such file or folder{end}")])


def expanded(path: Path | str) -> Path:
    """With "~" written out, unless it is nobody's: then it is taken for what it is, a name."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def _text(path: Path, label: str) -> str:
    """The file's text. No more of it is read than a deploy can have, since a device has no end. Raises OSError."""
    with path.open("rb") as file:
        data = file.read(4 * MAX_CHARS + 1)
    if len(data) > 4 * MAX_CHARS:
        raise refusal([Problem(Origin(Layer.FILE, label, 1), "", f"larger than {4 * MAX_CHARS} bytes: no deploy file")])
    try:
        return io.TextIOWrapper(io.BytesIO(data), "utf-8-sig").read()  # with any line ends
    except UnicodeDecodeError as error:
        message = f"cannot be read as text: {error}"
        raise refusal([Problem(Origin(Layer.FILE, label, 1), "", message)]) from error


def _with_model_paths(deploy: Deploy, origins: Mapping[str, Origin], folder: Path) -> Deploy:
    """Relative paths of models and adapters are meant from the YAML's folder, those of `--set` from the current one."""

    def full(path: str, key: str) -> str:
        origin = origins.get(key)
        base = Path.cwd() if origin is not None and origin.layer is Layer.SET else folder
        return os.path.abspath(base / expanded(path))

    def absolute(name: StageName, stage: StageSpec) -> StageSpec:
        path = stage.model.path
        if stage.engine.use != "builtin":
            return stage
        loras = {
            one: msgspec.structs.replace(lora, path=full(lora.path, f"stages.{name}.engine.loras.{one}.path"))
            for one, lora in stage.engine.loras.items()
        }
        if loras:
            stage = msgspec.structs.replace(stage, engine=msgspec.structs.replace(stage.engine, loras=loras))
        if path is None or "://" in path:
            return stage
        model = msgspec.structs.replace(stage.model, path=full(path, f"stages.{name}.model.path"))
        if model.custom_pipeline is not None:
            code = full(model.custom_pipeline, f"stages.{name}.model.custom_pipeline")
            model = msgspec.structs.replace(model, custom_pipeline=code)
        return msgspec.structs.replace(stage, model=model)

    return msgspec.structs.replace(deploy, stages={name: absolute(name, one) for name, one in deploy.stages.items()})


def _follows(finding: Finding, problems: Sequence[Problem]) -> bool:
    """Whether the finding says again, or may only follow from, what a problem says already."""
    section = finding.section if finding.derived else finding.path
    return any(f"{problem.path}.".startswith(f"{section}.") for problem in problems)


def _placed(finding: Finding, origins: Mapping[str, Origin], root: Origin) -> Problem:
    """The finding at the place of its key, or of the nearest key above that was written."""
    path = finding.path.partition("[")[0]
    while path and path not in origins:
        path = path.rpartition(".")[0]
    return Problem(origins.get(path, root), finding.path, finding.message)


def _origin(leaf: Leaf, written: Mapping[str, Origin]) -> Origin:
    origin = written.get(leaf.path)
    if origin is not None:
        return origin
    return Origin(Layer.MODEL if leaf.value is None and _OF_THE_MODEL.match(leaf.path) else Layer.DEFAULT)
