"""The environment of each child process, made before the child imports torch. The parent's own is never changed.

Why: OpenMP threads spin at barriers. Two stages with torch's default of one thread per core, on the same cores, run at a
quarter of their speed; with the cores shared out and passive waiting they do not disturb each other. Where each thread has
a core to itself, a wait begins with a moment's spinning, for to be woken takes longer than many a barrier.
"""

import os
import re
from collections.abc import Mapping
from typing import Final

from proto.deploy import Deploy, StageSpec, devices_of

QUIET_LIBRARIES: Final = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TQDM_DISABLE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "DIFFUSERS_VERBOSITY": "error",
}
"""Progress goes to the master as messages; bars of several processes on one terminal overwrite each other."""

SPINS: Final = 4000
"""Rounds that a GNU OpenMP thread waits awake. Eight pictures of the demo's painter on two threads took 1.57 s with none, 1.18 s with
1,000, 1.12 s with 4,000, 1.21 s with 20,000. Two such processes on the same two cores are 1.7 times slower with 4,000 than with none."""

_CUDA: Final = re.compile(r"^cuda:(\d+)$")


def local_processes(deploy: Deploy) -> int:
    """How many stage processes run on this machine, each replica's ranks included."""
    return sum(map(_processes, deploy.stages.values()))


def _processes(stage: StageSpec) -> int:
    return stage.local_replicas * stage.parallel.degree


def threads_for(stage: StageSpec, deploy: Deploy, cores: int) -> int:
    """CPU threads of one process: the deploy's word, shared by the replica's ranks, else this machine's cores shared by
    its stage processes."""
    if stage.threads is not None:
        return max(1, stage.threads // stage.parallel.degree)
    return max(1, cores // max(1, local_processes(deploy)))


def cores_suffice(deploy: Deploy, cores: int) -> bool:
    """Whether each CPU thread of the stage processes that the launcher starts here has a core of its own."""
    return sum(_processes(one) * threads_for(one, deploy, cores) for one in deploy.stages.values()) <= cores


def device_for(stage: StageSpec, replica: int) -> str:
    """Devices are handed out in turn. Those of a replica of several ranks have commas between them."""
    return ",".join(devices_of(stage.devices, stage.parallel.degree, replica))


def child_environment(
    stage: StageSpec, replica: int, deploy: Deploy, *, cores: int | None = None, base: Mapping[str, str] | None = None
) -> tuple[dict[str, str], str]:
    """The environment of a stage process, and its device as the child should name it.

    One CUDA device is made the only one that the child sees, so that it can't allocate on another by accident. A replica of
    several ranks does that itself, with all of its devices (`stages.parallel.devices`).
    """
    cores = cores or len(os.sched_getaffinity(0))
    threads = str(threads_for(stage, deploy, cores))
    device = device_for(stage, replica)
    env = dict(os.environ if base is None else base)
    env |= {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": str(SPINS if cores_suffice(deploy, cores) else 0),
        "KMP_BLOCKTIME": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        **QUIET_LIBRARIES,
    }
    cuda = _CUDA.match(device)
    if cuda is not None:
        shown = env.get("CUDA_VISIBLE_DEVICES")
        visible = [cuda[1]] if shown is None else [one for one in shown.split(",") if one]
        index = 0 if shown is None else int(cuda[1])
        if index < len(visible):  # else the child says itself that there is no such device
            env["CUDA_VISIBLE_DEVICES"] = visible[index]
            device = "cuda:0"
    return env | dict(stage.env), device
