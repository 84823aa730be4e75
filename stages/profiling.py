"""A profile of what an engine does between two calls: torch's own profiler, its trace a file for chrome://tracing or Perfetto.

Only one runs at a time in a process, since torch has one. It keeps every operator in memory until it is stopped, so it is for
seconds, not for hours.
"""

import os
import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from proto.calls import NoArgs, StartProfile
from proto.errors import InvalidRequest, StageFailed
from proto.ids import StageName
from proto.params import Json


class Profiler:
    """Answers `start_profile` and `stop_profile`."""

    def __init__(self, stage: StageName) -> None:
        self._stage = stage
        self._running: tuple[profile, Path] | None = None
        self._count = 0

    def start(self, args: StartProfile) -> Json:
        """Begin. Answers the file that the trace will be in: its name has the stage and the process, so that replicas of
        one host may share a folder."""
        if self._running is not None:
            text = f"stage {self._stage}: a profile is running already; stop it first (stop_profile)"
            raise InvalidRequest(text, stage=self._stage, field="method")
        folder = self._folder(args.path)
        self._count += 1
        file = folder / f"{self._stage}-{os.getpid()}-{self._count}.json"
        kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
        running = profile(activities=kinds)
        running.start()
        self._running = running, file
        return {"path": str(file)}

    def stop(self, _: NoArgs) -> Json:
        """End, and write the trace. Answers its file and its size in bytes."""
        if self._running is None:
            text = f"stage {self._stage}: no profile is running; begin one with start_profile"
            raise InvalidRequest(text, stage=self._stage, field="method")
        (running, file), self._running = self._running, None
        running.stop()
        try:
            running.export_chrome_trace(str(file))
        except (OSError, RuntimeError) as error:
            raise StageFailed(
                f"stage {self._stage}: the trace cannot be written to {str(file)!r}: {error}", stage=self._stage
            ) from error
        return {"path": str(file), "bytes": file.stat().st_size}

    def close(self) -> None:
        """The engine ends: so does a profile that was forgotten."""
        if self._running is not None:
            self._running[0].stop()
            self._running = None

    def _folder(self, path: str | None) -> Path:
        if path is None:
            return Path(tempfile.mkdtemp(prefix="omni-profile-"))
        folder = Path(path)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK):
                raise PermissionError("it cannot be written to")
        except OSError as error:
            raise InvalidRequest(
                f"stage {self._stage}: path: {path!r} is no folder for a trace: {error}",
                stage=self._stage,
                field="path",
            ) from error
        return folder
