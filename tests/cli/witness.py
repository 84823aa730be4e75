"""A fake engine that leaves a file behind when its process was started."""

from pathlib import Path

from proto.messages import StageInfo
from stages.engine import LoadContext
from tests.fakes.engines import FakeAr


class Witness(FakeAr):
    """`options.file` is the file."""

    def load(self, context: LoadContext) -> StageInfo:
        Path(str(context.spec.engine.options["file"])).touch()
        return super().load(context)
