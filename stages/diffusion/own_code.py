"""Python code that comes with a model: found, refused unless the deploy trusts it, and then run by diffusers' own loader.

A folder names its own code where `model_index.json` gives a module instead of a library: `["pipeline", "MyPipeline"]` is
pipeline.py beside it, `["my_unet", "MyUNet"]` of component `unet` is unet/my_unet.py. `model.custom_pipeline` names such a
file from anywhere. Invariant: none of it is run without `model.trust_remote_code`.

diffusers copies the files to a cache that all processes share, under names that two models may have in common. So each load
gets a cache of its own, and no module stays behind for the next.
"""

import atexit
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from diffusers import DiffusionPipeline
from diffusers.utils import dynamic_modules_utils

from proto.deploy import ModelSpec
from proto.errors import StartError
from proto.ids import StageName
from proto.params import Json

PIPELINE_FILE: Final = "pipeline.py"
_MODULES: Final = "diffusers_modules"


@dataclass(frozen=True, slots=True)
class OwnCode:
    """`files` are all that may be run. `pipeline` is the one with the pipeline's class (`class_name`, or its only one)."""

    files: tuple[Path, ...] = ()
    pipeline: Path | None = None
    class_name: str | None = None


def find_own_code(stage: StageName, model: ModelSpec, folder: Path, index: Mapping[str, Json]) -> OwnCode:
    """Raises `StartError` for code that is not there, or is not trusted."""
    named = index.get("_class_name")
    pipeline, class_name = None, None
    if isinstance(named, list) and len(named) == 2:
        pipeline, class_name = folder / f"{named[0]}.py", str(named[1])
    if model.custom_pipeline is not None:
        if pipeline is not None:
            raise _problem(stage, "model.custom_pipeline", f"the folder names its own ({pipeline.name}); leave it out")
        given = Path(model.custom_pipeline)
        pipeline = given if given.suffix == ".py" else given / PIPELINE_FILE
    components = [
        folder / name / f"{entry[0]}.py"
        for name, entry in index.items()
        if isinstance(entry, list) and entry and isinstance(entry[0], str) and not name.startswith("_")
    ]
    files = tuple(file for file in (pipeline, *components) if file is not None and file.is_file())
    if pipeline is not None and not pipeline.is_file():
        where = "model.custom_pipeline" if model.custom_pipeline is not None else "model.path"
        raise _problem(stage, where, f"there is no {str(pipeline)!r}")
    if files and not model.trust_remote_code:
        names = ", ".join(str(file.relative_to(folder)) if file.is_relative_to(folder) else str(file) for file in files)
        raise _problem(
            stage,
            "model.trust_remote_code",
            f"{model.path!r} names its own pipeline code ({names}), which is not run by default; read it, and if you trust"
            " it set model.trust_remote_code: true",
        )
    return OwnCode(files, pipeline, class_name)


def own_pipeline_class(stage: StageName, code: OwnCode) -> type[DiffusionPipeline]:
    """Run the pipeline's file and find its class. Within `private_modules`. Raises `StartError`."""
    assert code.pipeline is not None
    try:
        found = dynamic_modules_utils.get_class_from_dynamic_module(
            str(code.pipeline.parent.absolute()),
            module_file=code.pipeline.name,
            class_name=code.class_name,
            trust_remote_code=True,
        )
    except Exception as error:
        raise StartError(
            f"stage {stage}: {str(code.pipeline)!r} cannot be run: {type(error).__name__}: {error}", stage=stage
        ) from error
    if not (isinstance(found, type) and issubclass(found, DiffusionPipeline)):
        wanted = f"no class {code.class_name!r} that is" if code.class_name else "not one class that is"
        raise StartError(f"stage {stage}: {str(code.pipeline)!r} has {wanted} a DiffusionPipeline", stage=stage)
    return found


@contextmanager
def private_modules(code: OwnCode) -> Iterator[None]:
    """While it lasts, code of a model is copied to a folder of its own and imported from there. The folder stays until the
    process ends: tracebacks and compilers read the source."""
    if not code.files:
        yield
        return
    own = tempfile.mkdtemp(prefix="omni-model-code-")
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    shared = dynamic_modules_utils.HF_MODULES_CACHE
    _forget_modules()
    dynamic_modules_utils.HF_MODULES_CACHE = own
    try:
        yield
    finally:
        dynamic_modules_utils.HF_MODULES_CACHE = shared
        if own in sys.path:
            sys.path.remove(own)
        _forget_modules()


def _forget_modules() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == _MODULES]:
        del sys.modules[name]


def _problem(stage: StageName, field: str, text: str) -> StartError:
    return StartError(f"stage {stage}: {field}: {text}", stage=stage, field=field)
