"""`model.path` to what is on disk. `demo://NAME` is a model made on this machine once, and then an ordinary checkpoint folder.

Made, unless it is one that is `SHIPPED`, under `$OMNI_CACHE`, else `$XDG_CACHE_HOME/omni-pipeline`, else `~/.cache/omni-pipeline`, in `NAME-vVERSION`.
Invariant: a folder of that name is whole. It is built beside it and renamed, by one process at a time. No torch here.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from proto.errors import StartError
from proto.suggest import hint

SCHEME: Final = "demo://"

Report = Callable[[str, float | None], None]
"""A note on what is being done, and how much of it is done (0..1) where that is known."""


@dataclass(frozen=True, slots=True)
class DemoModel:
    """`build` fills an empty folder. Raise `version` when it would fill it differently."""

    version: int
    build: Callable[[Path, Report], None]


def _smollm2(folder: Path, report: Report) -> None:
    from stages.demo import smollm2  # imports torch

    smollm2.build(folder, report)


def _tiny_painter(folder: Path, report: Report) -> None:
    from stages.demo import tiny_painter  # imports torch

    report("making a tiny diffusion pipeline", None)
    tiny_painter.build(folder)


SHIPPED: Final[dict[str, Path]] = {"painter": Path(__file__).parents[1] / "diffusion" / "painter" / "weights"}
"""Demo models that lie in this package, ready to load."""

CACHE_BUILDERS: Final[dict[str, DemoModel]] = {
    "smollm2-135m-instruct": DemoModel(1, _smollm2),
    "tiny-painter": DemoModel(1, _tiny_painter),
}


def resolve_model(path: str, report: Report) -> Path:
    """The folder or file that `path` means, building a demo model if it is not there yet.

    Safe in several processes at once: one builds, the others wait. Raises `StartError`.
    """
    check_model(path)
    if not path.startswith(SCHEME):
        return Path(path).expanduser()
    name = path.removeprefix(SCHEME)
    if name in SHIPPED:
        return SHIPPED[name]
    model = CACHE_BUILDERS[name]
    folder = cache_root() / f"{name}-v{model.version}"
    if not folder.is_dir():
        _build(folder, model, report)
    return folder


def check_model(path: str) -> None:
    """Raise `StartError` if `path` is neither a known demo model nor on disk. Builds nothing."""
    known = (*CACHE_BUILDERS, *SHIPPED)
    if path.startswith(SCHEME):
        name = path.removeprefix(SCHEME)
        if name not in known:
            words = f"model.path {path!r} names no demo model; {hint(name, known, 'demo models')}"
            raise StartError(words, field="model.path")
        if name in SHIPPED and not SHIPPED[name].is_dir():
            words = f"model.path {path!r}: no weights came with this package; name a folder that was trained instead"
            raise StartError(words, field="model.path")
    elif not Path(path).expanduser().exists():
        raise StartError(
            f"model.path {path!r} is not there; give a checkpoint folder, a GGUF file or one of"
            f" {', '.join(SCHEME + name for name in known)} (models are never downloaded)",
            field="model.path",
        )


def cache_root() -> Path:
    """Where demo models are made."""
    own = os.environ.get("OMNI_CACHE")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "omni-pipeline"


def _build(folder: Path, model: DemoModel, report: Report) -> None:
    root = folder.parent
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _lock(root / f"{folder.name}.lock", report):
            if not folder.is_dir():  # another process may have built it meanwhile
                _build_locked(folder, model, report)
    except OSError as error:
        raise StartError(
            f"the demo model {folder.name!r} cannot be made in {str(root)!r}: {error}; set OMNI_CACHE to a folder with room",
            field="model.path",
        ) from error


def _build_locked(folder: Path, model: DemoModel, report: Report) -> None:
    prefix = f".{folder.name}."
    for left_by_a_killed_process in folder.parent.glob(f"{prefix}*"):
        shutil.rmtree(left_by_a_killed_process)
    work = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
    try:
        work.chmod(0o755)
        model.build(work, report)
        work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)  # gone already if all went well


@contextmanager
def _lock(path: Path, report: Report) -> Iterator[None]:
    """Held by one process at a time; the system lets go of it if that process dies. The file stays."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("waiting for another process that makes the demo model", None)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
