"""The AR stage on several ranks: the weights are shared out by the model's own plan, so each rank has some of the heads.

Transformers shards the checkpoint as it loads (`tp_plan="auto"`). Each rank then has the same runner as a stage of one
process, over pages that hold its own heads; the first one schedules, picks the tokens and tells the others which tokens of
which sequences to compute, in which pages.

Invariant: every rank computes the same chunks on the same pages. What depends on a rank's own memory is agreed upon at the
start.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoConfig, PreTrainedConfig

from proto.errors import StageFailed, StartError
from proto.ids import RequestId
from stages.ar.runner import Output, Runner
from stages.ar.scheduler import Chunk, Track
from stages.engine import LoadContext
from stages.parallel.distributed import side_by_side
from stages.parallel.group import Group
from stages.parallel.line import Line

ROLE: Final = "stages.ar.ranks:follow"
