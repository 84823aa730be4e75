"""The device that a stage was given, tried before anything is loaded. The only check: a name that torch takes may still
have no hardware or no driver behind it on this host."""

import torch

from proto.errors import StartError
from stages.engine import LoadContext


def usable_device(context: LoadContext) -> torch.device:
    """`context.device` as torch has it. Raises `StartError` naming the stage and the remedy if it cannot be used here."""
    try:
        device = torch.device(context.device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise StartError(
            f"stage {context.stage}: device {context.device!r} cannot be used here ({error});"
            f" change stages.{context.stage}.devices in the deploy, or start the worker with --devices",
            stage=context.stage,
            field="devices",
        ) from None
    return device
