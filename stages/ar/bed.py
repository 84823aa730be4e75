"""What an AR stage gives back while it sleeps: its KV pool wherever it is, and on an accelerator the weights' memory."""

import torch

from proto.params import Json
from stages import sleeping
from stages.ar.runner import Runner
from stages.ar.scheduler import Scheduler


class ArBed:
    """Implements `stages.operator_calls.Bed`."""

    def __init__(self, runner: Runner, scheduler: Scheduler, device: torch.device) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._device = device

    def sleep(self) -> dict[str, Json]:
        """All prefixes are forgotten, since the pages that hold them go. What was moved and freed, in bytes."""
        self._scheduler.blocks.forget()
        slept = self._runner.sleep()
        sleeping.release(self._device)
        return {
            "device": str(self._device),
            "weights_moved_bytes": slept.weights,
            "cache_freed_bytes": slept.pages,
        }

    def wake(self) -> None:
        self._runner.wake()
