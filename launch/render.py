"""What the commands show: tables on a terminal, plain lines when piped. No decisions and no I/O but the console's."""

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from omni.outputs import (
    AudioOutput,
    ImageOutput,
    Output,
    RequestOutput,
    StageDone,
    TensorOutput,
    TextOutput,
    TokensOutput,
    VideoOutput,
)
from omni.status import PipelineStatus, ReplicaStatus, StageStatus


def rows(console: Console, title: str, columns: list[str], lines: list[list[str]]) -> None:
    """One table; piped, or on a terminal too narrow for it, aligned lines that lose nothing and that `grep` can use."""
    if console.is_terminal:
        table = Table(*columns, box=SIMPLE_HEAD)
        for line in lines:
            table.add_row(*(Text(cell, no_wrap=True) for cell in line))
        if Measurement.get(console, console.options.update(max_width=10_000), table).maximum <= console.width:
            console.print(Text(title, style="bold"), soft_wrap=True)
            console.print(table)
            return
    console.out(title, highlight=False)
    widths = [max(len(row[i]) for row in [columns, *lines]) for i in range(len(columns))]
    for row in [columns, *lines]:
        text = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        console.out(text.rstrip(), highlight=False)


def show_status(status: PipelineStatus, console: Console) -> None:
    failed = ", ".join(f"{count} {reason}" for reason, count in status.failed.items()) or "0"
    title = (
        f"{status.name}: {'ready' if status.ready else 'not ready'}, up {status.uptime_s:.0f} s, "
        f"requests: {status.running} running, {status.queued} queued, {status.done} done, {failed} failed"
    )
    columns = ["replica", "state", "host", "pid", "device", "in flight", "queued", "steps", "step ms", "MiB"]
    lines = [line for stage in status.stages for line in _stage_lines(stage)]
    rows(console, title, columns, lines)
    for stage in status.stages:
        for replica in stage.replicas:
            if replica.note and replica.state != "ready":
                console.out(f"{stage.stage}/{replica.replica} {replica.state}: {replica.note}", highlight=False)
    for edge in status.edges:
        console.out(
            f"edge {edge.source} -> {edge.target}: {edge.payloads} payloads, {edge.bytes} bytes", highlight=False
        )


def _stage_lines(stage: StageStatus) -> list[list[str]]:
    lines = [_replica_line(stage, replica) for replica in stage.replicas]
    for _ in range(len(stage.replicas), stage.wanted):
        lines.append([f"{stage.stage}/-", "missing", *[""] * 8])
    return lines


def _replica_line(stage: StageStatus, r: ReplicaStatus) -> list[str]:
    return [
        *(
            f"{stage.stage}/{r.replica}",
            r.state,
            r.host,
            str(r.pid),
            ",".join(r.devices),
            str(r.in_flight),
            str(r.queued),
        ),
        *(str(r.steps), f"{r.step_s * 1000:.1f}", f"{r.rss_bytes / 2**20:.0f}"),
    ]


def show_timings(result: RequestOutput, console: Console) -> None:
    """Where the time of one request went, per stage."""
    lines = [_timing_line(done) for done in result.stages.values()]
    stages_s = sum(d.timings.queue_s + d.timings.pull_s + d.timings.run_s for d in result.stages.values())
    lines.append(["between stages", "", "", "", f"{max(0.0, result.total_s - stages_s):.3f}", ""])
    lines.append(["total", "", "", "", f"{result.total_s:.3f}", ""])
    rows(console, "where the time went (seconds)", ["stage", "queue", "pull", "run", "sum", "of which"], lines)


_IN_COLUMNS = ("queue", "total")  # an engine's own words for what the table's columns say


def _detail(name: str, value: float) -> str:
    """Seconds with three digits, counts as they are, memory in MiB: engines report all three."""
    if name.endswith("_bytes"):
        return f"{name.removesuffix('_bytes').replace('_', ' ')} {value / 2**20:.0f} MiB"
    told = str(int(value)) if value >= 1 and value == int(value) else f"{value:.3f}"
    return f"{name.replace('_', ' ')} {told}"


def _timing_line(done: StageDone) -> list[str]:
    times = done.timings
    parts = [_detail(name, value) for name, value in times.detail.items() if value and name not in _IN_COLUMNS]
    if done.usage.completion_tokens:
        parts.append(f"{done.usage.prompt_tokens} + {done.usage.completion_tokens} tokens")
    total = times.queue_s + times.pull_s + times.run_s
    return [
        done.stage,
        f"{times.queue_s:.3f}",
        f"{times.pull_s:.3f}",
        f"{times.run_s:.3f}",
        f"{total:.3f}",
        ", ".join(parts),
    ]


def show_outputs(result: RequestOutput, console: Console) -> None:
    for stage, output in result.outputs.items():
        if isinstance(output, TextOutput):
            for text in output.texts:
                console.print(Text(f"{stage}: ", style="bold").append(text, style="not bold"), soft_wrap=True)
        else:
            console.out(f"{stage}: {_described(output)}", highlight=False)


def _described(output: Output) -> str:
    """What it is, in a few words: for what a terminal cannot show."""
    if isinstance(output, ImageOutput):
        n, height, width = output.array.shape[:3]
        seeds = ", ".join(map(str, output.seeds))
        told = f", {'seeds' if n > 1 else 'seed'} {seeds}" if seeds else ""  # engines of others may draw without one
        return f"{_count(n, 'image')} of {width}x{height}{told}"
    if isinstance(output, VideoOutput):
        n, frames, height, width = output.array.shape[:4]
        return f"{_count(n, 'video')} of {frames} frames, {width}x{height}"
    if isinstance(output, AudioOutput):
        seconds = output.array.shape[-1] / output.sample_rate
        return f"{_count(len(output.array), 'sound')} of {seconds:.1f} s at {output.sample_rate} Hz"
    if isinstance(output, TensorOutput):
        return f"{output.array.dtype} tensor of {output.array.shape}"
    if isinstance(output, TokensOutput):
        return _count(len(output.ids), "token")
    return output.text


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"
