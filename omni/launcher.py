"""The seam to whoever reads deploy files and starts the local stage processes.

The implementation lives in `launch`, which may import this package but not the other way round; it is found through the
entry-point group `omni.launchers`.
"""

from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol

from omni.events import ChildExited
from proto.deploy import Deploy
from proto.errors import StartError


class Launcher(Protocol):
    def load(self, source: str | Path, overrides: Sequence[str] = ()) -> Deploy:
        """Read a deploy: a YAML file, a bare checkpoint folder, or the name of a packaged one. Raises `DeployError`."""
        ...

    def start(self, deploy: Deploy, master: str, on_exit: Callable[[ChildExited], None]) -> None:
        """Start the local replicas of every stage, told to connect to `master`. `on_exit` is called from any thread."""
        ...

    def stop(self, timeout_s: float) -> None:
        """End every process started here: ask, wait up to `timeout_s`, then kill. Returns when none is left."""
        ...


def find_launcher() -> Launcher:
    """The installed launcher. Raises `StartError` when the package is not installed (only copied)."""
    for entry in entry_points(group="omni.launchers", name="local"):
        launcher: Launcher = entry.load()()
        return launcher
    raise StartError("no launcher is installed; install the package (pip install omni-pipeline), or pass launcher=")
