"""A checkpoint folder (or GGUF file) as a one-stage deploy, so that a model can be served without writing YAML.

The kind of stage is read from the folder's own files, never from its name: `model_index.json` makes a diffusion stage,
a `config.json` of a causal language model or a `.gguf` file an AR stage. Nothing is imported and no weights are opened.
The result is a tree like that of a YAML file, so that overrides and checks apply to it in the same way.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from launch.origins import Layer, Origin, Problem, refusal
from launch.yaml_tree import Entry, MapNode, Node, Scalar
from proto.deploy import Kind
from proto.params import Json

STAGE: Final = "model"
"""The name of the one stage: `--set stages.model.replicas=2`."""

NEEDED: Final = (
    "needed is a diffusers folder (model_index.json), a causal language model (config.json whose `architectures` end in "
    "ForCausalLM), a .gguf file, or a deploy file (.yaml)"
)

_VIDEO = re.compile(
    "Video|2V|V2V|^(Allegro|AnimateDiff|AnyFlow|CogVideo|ConsisID|ChronoEdit|Cosmos(?!2TextToImage)|EasyAnimate|Helios|"
    "I2VGen|Latte|LTX|LucyEdit|Mochi|PIA|SanaWM|SkyReels|Wan)"
)
_AUDIO = re.compile("Audio|Music|^(AceStep|DanceDiffusion|SpectrogramDiffusion)")
_WEIGHT_SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
_PARTS_OF_A_FOLDER: Final = ("config.json", "model_index.json")


def is_bare_model(path: Path) -> bool:
    """Whether `path` is for this module to judge: a folder, or a file that is a checkpoint by its name."""
    return path.is_dir() or path.suffix in (".gguf", *_WEIGHT_SUFFIXES) or path.name in _PARTS_OF_A_FOLDER


def tree_for(path: Path) -> Node:
    """The one-stage deploy of a model, as a tree; each value's origin says from what it was concluded.

    Raises `DeployError` that says what was found and what is needed.
    """
    path = path.absolute()
    if path.is_file():
        if path.suffix != ".gguf":
            raise _refusal(path, f"is one file of a model; give the folder that it lies in: {path.parent}")
        return _tree(path.stem, path, "ar", Kind.TEXT, f"the file {path.name}")
    index = path / "model_index.json"
    if index.is_file():
        name = _pipeline_class(index)
        return _tree(path.name, path, "diffusion", output_kind(name), f"model_index.json: {name}")
    return _language_model(path)


def output_kind(pipeline_class: str) -> Kind:
    """What a diffusers pipeline makes, guessed from the name of its class: image, unless the name speaks of video
    (Video, T2V, I2V, or a family such as Wan, LTX or Mochi) or of sound (Audio, Music, AceStep)."""
    if _VIDEO.search(pipeline_class):
        return Kind.VIDEO
    return Kind.AUDIO if _AUDIO.search(pipeline_class) else Kind.IMAGE


def _language_model(path: Path) -> Node:
    ggufs = sorted(path.glob("*.gguf"))
    has_weights = any(any(path.glob(f"*{suffix}")) for suffix in _WEIGHT_SUFFIXES)
    if ggufs and not has_weights:
        if len(ggufs) > 1:
            listed = ", ".join(file.name for file in ggufs[:8])
            raise _refusal(path, f"holds {len(ggufs)} .gguf files ({listed}); give one of them")
        return _tree(path.name, ggufs[0], "ar", Kind.TEXT, f"the file {ggufs[0].name}")
    config = path / "config.json"
    if not config.is_file():
        names = sorted(file.name for file in path.iterdir())
        seen = f"holds {', '.join(names[:8])}{' and more' if len(names) > 8 else ''}" if names else "is empty"
        raise _refusal(path, f"{seen}; {NEEDED}")
    architectures = _json(config).get("architectures") or []
    for name in architectures if isinstance(architectures, list) else []:
        if isinstance(name, str) and (name.endswith("ForCausalLM") or "LMHeadModel" in name):
            return _tree(path.name, path, "ar", Kind.TEXT, f"config.json: {name}")
    seen = f"architectures {architectures}" if architectures else "no `architectures`"
    raise _refusal(path, f"has a config.json with {seen}, which is no causal language model; {NEEDED}")


def _pipeline_class(index: Path) -> str:
    name = _json(index).get("_class_name")
    if isinstance(name, list) and name:  # custom pipelines: [file, class]
        name = name[-1]
    if not isinstance(name, str) or not name:
        raise _refusal(index, "has no `_class_name`, so it does not say which pipeline it is")
    return name


def _json(path: Path) -> Mapping[str, Json]:
    try:
        data = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _refusal(path, f"cannot be read as JSON: {error}") from error
    if not isinstance(data, dict):
        raise _refusal(path, "is not a JSON object")
    return data


def _tree(name: str, model: Path, kind: str, output: Kind, seen: str) -> Node:
    origin = Origin(Layer.FOLDER, seen)

    def mapping(**values: Node) -> MapNode:
        return MapNode(origin, {key: Entry(origin, value) for key, value in values.items()})

    stage = mapping(
        kind=Scalar(origin, kind), model=mapping(path=Scalar(origin, str(model))), output=Scalar(origin, output.value)
    )
    return mapping(name=Scalar(origin, _name(name)), stages=mapping(**{STAGE: stage}))


def _name(folder: str) -> str:
    """The folder's name, made to fit the rules for a deploy's name: it begins with a letter and has no odd characters."""
    name = re.sub(r"[^A-Za-z0-9_-]", "-", folder)
    return (name if name[:1].isalpha() else f"model-{name}")[:64]


def _refusal(path: Path, message: str) -> Exception:
    return refusal([Problem(Origin(Layer.FOLDER, str(path)), "", message)])
