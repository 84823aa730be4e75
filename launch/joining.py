"""Tells whoever reads along how to start the replicas that this machine does not."""

from rich.console import Console

from launch.addresses import from_elsewhere
from omni.async_omni import AsyncOmni
from proto.sockets import is_loopback, split_endpoint


def say_who_may_join(omni: AsyncOmni, console: Console, only_missing: bool = False) -> None:
    """The `omni-stage` command of every stage that has room. `only_missing` leaves out room that need not be filled.

    `omni` has bound its sockets.
    """
    assert omni.endpoints is not None
    control = from_elsewhere(omni.endpoints.control)
    insecure = "" if is_loopback(split_endpoint(omni.endpoints.control)[0]) else " --insecure"
    for name, stage in omni.deploy.stages.items():
        command = f"omni-stage --master {control} --stage {name}{insecure}"
        missing, room = stage.replicas - stage.local_replicas, stage.slots - stage.local_replicas
        if missing > 0:
            console.out(f"stage {name} needs {missing} more from elsewhere: {command}", highlight=False)
        elif room > 0 and not only_missing:
            console.out(f"room for {room} more of stage {name}: {command}", highlight=False)
