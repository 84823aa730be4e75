"""What a rank's process may see of the host's accelerators: decided before torch is imported, by the replica's first rank,
whose environment the others inherit. Pure.

The libraries number the devices of a group by rank. So a group sees its own devices and no others, in the order of its ranks.
"""

from collections.abc import Mapping, Sequence
from typing import Final

_VISIBLE: Final = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}


def narrowed(devices: Sequence[str], env: Mapping[str, str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """The devices as the ranks name them, and what their environment needs for it.

    A group on CPUs sees no accelerator at all. A device that is hidden from this process already stays so: then nothing is
    changed, and the rank says itself that there is none.
    """
    kind = devices[0].partition(":")[0]
    if kind == "cpu":
        return tuple(devices), dict.fromkeys(_VISIBLE.values(), "")
    name = _VISIBLE.get(kind)
    numbers = [device.partition(":")[2] for device in devices]
    if name is None or not all(number.isdigit() for number in numbers):
        return tuple(devices), {}
    chosen = numbers
    if (shown := env.get(name)) is not None:
        visible = [one for one in shown.split(",") if one]
        if any(int(number) >= len(visible) for number in numbers):
            return tuple(devices), {}
        chosen = [visible[int(number)] for number in numbers]
    return tuple(f"{kind}:{rank}" for rank in range(len(devices))), {name: ",".join(chosen)}


def share_of_threads(env: Mapping[str, str], threads: int | None, degree: int, cores: int) -> int:
    """CPU threads of each of a replica's ranks: what the environment says of one process, else a share of the deploy's
    word, else of the cores."""
    said = env.get("OMP_NUM_THREADS", "")
    return int(said) if said.isdigit() else max(1, (threads or cores) // degree)
