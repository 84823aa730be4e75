"""A fake painter that draws only while a file is there, so that a test decides when requests go on."""

from pathlib import Path

from stages.engine import Event
from tests.fakes.engines import FakeDiffusion, _Running

LOOK_AGAIN_S = 0.01


class GatedPainter(FakeDiffusion):
    """`options.gate` is the file."""

    def one(self, running: _Running) -> list[Event]:
        if Path(str(self._options["gate"])).exists():
            return super().one(running)
        self._idle.wait(LOOK_AGAIN_S)
        return []
