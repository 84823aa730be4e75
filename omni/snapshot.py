"""Looks at the core and says what it sees, as plain data. It changes nothing."""

import math

from omni.core import MasterCore
from omni.membership import Replica, ReplicaState
from omni.planning import COMPANION_ROLE
from omni.status import EdgeStatus, PipelineStatus, ReplicaStatus, StageStatus
from proto.deploy import kind_of
from proto.figures import known
from proto.ids import StageName
from proto.messages import Heartbeat

_SILENT = Heartbeat(epoch=0, steps=0, queued=0, running=0)  # type: ignore[arg-type] # stands for "nothing said yet"


def pipeline_status(core: MasterCore, now: float) -> PipelineStatus:
    """A snapshot at `now` (monotonic seconds)."""
    orchestrator = core.orchestrator
    edges = core.graph.edges
    bytes_, payloads = core.leases.edge_bytes, core.leases.edge_payloads
    names = []
    for edge in edges:
        source = f"{edge.source}.{edge.output}"
        names.append((source, f"{edge.target}.{edge.input}"))
        if edge.companion is not None:
            names.append((source, f"{edge.target}.{COMPANION_ROLE[edge.companion]}_{edge.input}"))
    return PipelineStatus(
        name=core.deploy.name,
        ready=not core.members.waiting_for() and not core.members.stopping,
        uptime_s=now - core.started_at,
        running=len(orchestrator.running),
        queued=len(orchestrator.queued),
        done=orchestrator.done,
        failed={code.value: count for code, count in orchestrator.failed.items()},
        junk=core.junk + core.members.refused,
        leases=len(core.leases),
        lease_bytes=core.leases.nbytes,
        stages=tuple(_stage(core, name, now) for name in core.graph.order),
        edges=tuple(EdgeStatus(source=s, target=t, payloads=payloads[s, t], bytes=bytes_[s, t]) for s, t in names),
    )


def _stage(core: MasterCore, name: StageName, now: float) -> StageStatus:
    spec = core.deploy.stages[name]
    info = core.members.info(name)
    return StageStatus(
        stage=name,
        kind=kind_of(spec),
        model=spec.model.path or spec.engine.use,
        wanted=spec.replicas,
        slots=spec.slots,
        ready=len(core.members.ready(name)),
        waiting=len(core.orchestrator.waiting[name]),
        output=spec.output.value if spec.output is not None else None,
        info=info,
        replicas=tuple(_replica(r, now) for _, r in sorted(core.members.slots[name].items())),
    )


def _replica(replica: Replica, now: float) -> ReplicaStatus:
    beat = replica.beat or _SILENT
    return ReplicaStatus(
        replica=replica.index,
        state="asleep" if replica.asleep and replica.state is ReplicaState.READY else replica.state.value,
        epoch=replica.epoch,
        host=replica.host,
        pid=replica.pid,
        devices=replica.devices or ((replica.info.device,) if replica.info is not None and replica.info.device else ()),
        note=replica.note,
        loras=replica.info.loras if replica.info is not None else (),
        in_flight=replica.in_flight,
        steps=beat.steps,
        queued=beat.queued,
        running=beat.running,
        step_s=beat.step_s if math.isfinite(beat.step_s) else 0.0,  # JSON has no other numbers
        leases=beat.leases,
        lease_bytes=beat.lease_bytes,
        rss_bytes=beat.rss_bytes,
        figures=known(beat.figures),
        silent_s=max(0.0, now - replica.last_seen),
    )
