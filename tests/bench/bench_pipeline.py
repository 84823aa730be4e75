"""What a request costs beside its engines' work: `python -m tests.bench.bench_pipeline [--quick] [ROW ...]`.

Rows: latency, edges, throughput, idle, replicas, payload. Everything runs through real processes with engines that do
nothing; each figure stands beside what pyzmq alone needs between the same number of processes, in alternating rounds.
"""

import argparse
import asyncio
import os
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from time import monotonic

import psutil
import uvloop
import xxhash
import zmq
import zmq.asyncio

from proto.deploy import Kind
from proto.framing import DATA_DOWN
from tests.bench import wire_samples as samples
from tests.bench.raw_peer import seconds
from tests.bench.report import alternate, machine, median, seconds_per_call, table
from tests.bench.rigs import Pipeline, RawPeers, Seen, Ways, ar, painter, pipeline, raw

RAW_SUBMIT = DATA_DOWN.encode(samples.SUBMIT)
IN_FLIGHT = 128
REPLICAS = 8
MAX_WORK_US = 20_000


# --- one request at a time --------------------------------------------------------------------------------------------


def ask_in_turn(line: Pipeline, count: int, ways: Ways) -> float:
    """`count` requests, one after the other; the median of their time outside engines."""

    async def work() -> None:
        for _ in range(count):
            ways.add(*await line.request())

    ways.new_round()
    line.runner.run(work())
    return median(ways.total.rounds[-1])


def raw_loop_trips(peers: RawPeers, count: int, seen: Seen) -> float:
    trips: list[float] = []

    async def work() -> None:
        sock = zmq.asyncio.Socket(shadow=peers.sock.underlying)
        for _ in range(count):
            started = monotonic()
            await sock.send_multipart([peers.routes[0], *RAW_SUBMIT])
            await sock.recv_multipart()
            trips.append(monotonic() - started)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work())
    seen.rounds.append(trips)
    return median(trips)


def raw_block_trips(peers: RawPeers, count: int, seen: Seen) -> float:
    trips = []
    for _ in range(count):
        started = monotonic()
        peers.sock.send_multipart([peers.routes[0], *RAW_SUBMIT])
        peers.sock.recv_multipart()
        trips.append(monotonic() - started)
    seen.rounds.append(trips)
    return median(trips)


def latency(count: int, rounds: int) -> str:
    ways, loop_trips, block_trips = Ways(), Seen(), Seen()
    with raw("loop") as loop_peer, raw("block") as block_peer, pipeline(first=ar(Kind.TEXT)) as line:
        work = {
            "ours": partial(ask_in_turn, line, count, ways),
            "loop": partial(raw_loop_trips, loop_peer, count, loop_trips),
            "block": partial(raw_block_trips, block_peer, count, block_trips),
        }
        alternate(work, rounds)
    rows = [(*_ms("caller to engine", ways.there), ""), (*_ms("engine to caller", ways.back), "")]
    rows.append((*_ms("together", ways.total), "< 2 ms p50"))
    rows.append((*_ms("raw pyzmq round trip, uvloop", loop_trips), ""))
    rows.append((*_ms("raw pyzmq round trip, blocking", block_trips), ""))
    return table("one request at a time, one stage", ("ms", "p50", "p99", "target"), rows)


def edges(count: int, rounds: int) -> str:
    text, kv, trips = Ways(), Ways(), Seen()
    with (
        raw("loop") as peer,
        pipeline(first=ar(Kind.TEXT), second=ar(Kind.TEXT, source="first.text")) as text_line,
        pipeline(first=ar(Kind.TEXT, payload_bytes=65536), second=painter()) as kv_line,
    ):
        alternate(
            {
                "text": partial(ask_in_turn, text_line, count, text),
                "kv": partial(ask_in_turn, kv_line, count, kv),
                "raw": partial(raw_loop_trips, peer, count, trips),
            },
            rounds,
        )
    rows = [
        (*_ms("text: engine to engine", text.between), "<= 2 ms p50"),
        (*_ms("text: all but the engines", text.total), ""),
        (*_ms("text and 64 KiB kv: engine to engine", kv.between), "<= 2 ms p50"),
        (*_ms("text and 64 KiB kv: all but the engines", kv.total), ""),
        (*_ms("raw pyzmq round trip, uvloop", trips), ""),
    ]
    return table("one request at a time, two stages", ("ms", "p50", "p99", "target"), rows)


# --- many at a time ---------------------------------------------------------------------------------------------------


def ask_at_once(line: Pipeline, count: int) -> float:
    """Requests a second, with `IN_FLIGHT` callers in one loop."""

    async def caller(share: int) -> None:
        for _ in range(share):
            await line.request()

    async def work() -> float:
        started = monotonic()
        await asyncio.gather(*(caller(count // IN_FLIGHT) for _ in range(IN_FLIGHT)))
        return count // IN_FLIGHT * IN_FLIGHT / (monotonic() - started)

    return line.runner.run(work())


def raw_loop_flood(peers: RawPeers, count: int) -> float:
    """Echoes a second with `IN_FLIGHT` of them under way, on uvloop."""

    async def work() -> float:
        sock = zmq.asyncio.Socket(shadow=peers.sock.underlying)
        started = monotonic()
        for sent in range(count + IN_FLIGHT):
            if sent < count:
                await sock.send_multipart([peers.routes[0], *RAW_SUBMIT])
            if sent >= IN_FLIGHT:
                await sock.recv_multipart()
        return count / (monotonic() - started)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work())


def raw_block_flood(peers: RawPeers, count: int) -> float:
    started = monotonic()
    for sent in range(count + IN_FLIGHT):
        if sent < count:
            peers.sock.send_multipart([peers.routes[0], *RAW_SUBMIT])
        if sent >= IN_FLIGHT:
            peers.sock.recv_multipart()
    return count / (monotonic() - started)


def throughput(count: int, rounds: int) -> str:
    with raw("loop") as loop_peer, raw("block") as block_peer, pipeline(first=ar(Kind.TEXT)) as line:
        work: dict[str, Callable[[], float]] = {
            "requests, one stage": partial(ask_at_once, line, count),
            "raw pyzmq echoes, uvloop": partial(raw_loop_flood, loop_peer, count * 2),
            "raw pyzmq echoes, blocking": partial(raw_block_flood, block_peer, count * 2),
        }
        figures = {name: median(values) for name, values in alternate(work, rounds).items()}
    ours = figures["requests, one stage"]
    rows = [
        (name, figure, f"{ours / figure:.0%}", ">= 2,000" if figure is ours else "") for name, figure in figures.items()
    ]
    return table(f"{IN_FLIGHT} in flight", ("per second", "median", "ours of it", "target"), rows)


# --- nothing at all ---------------------------------------------------------------------------------------------------


def idle(watch_s: float) -> str:
    """Processor time of two idle stages and their master, in percent of one core."""
    with pipeline(first=ar(Kind.TEXT), second=ar(Kind.TEXT, source="first.text")) as line:
        line.runner.run(line.request())
        pids = [os.getpid(), *(child.pid for child in psutil.Process().children())]
        before = [_cpu_s(pid) for pid in pids]
        line.runner.run(asyncio.sleep(watch_s))
        used = [(_cpu_s(pid) - spent) / watch_s * 100 for pid, spent in zip(pids, before, strict=True)]
    rows = [("master", used[0], "< 0.5"), *[("worker", one, "") for one in used[1:]]]
    return table(f"idle for {watch_s:g} s", ("percent of a core", "used", "target"), rows)


def _cpu_s(pid: int) -> float:
    """Processor seconds of a process, finer than the ticks of 10 ms that Linux lists elsewhere."""
    if sys.platform == "linux":
        return time.clock_gettime(~pid << 3 | 2)  # clock_getcpuclockid(3)
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


# --- eight replicas ---------------------------------------------------------------------------------------------------


def picked_up(line: Pipeline, count: int, ways: Ways) -> float:
    """Eight callers whose requests end at random times; the median from an engine's end to its caller."""

    async def caller(rng: random.Random) -> None:
        for _ in range(count // REPLICAS):
            ways.add(*await line.request(rng.randint(1, MAX_WORK_US)))

    async def work() -> None:
        await asyncio.gather(*(caller(random.Random(seed)) for seed in range(REPLICAS)))

    ways.new_round()
    line.runner.run(work())
    return median(ways.back.rounds[-1])


def raw_picked_up(peers: RawPeers, count: int, seen: Seen) -> float:
    trips: list[float] = []

    async def work() -> None:
        sock = zmq.asyncio.Socket(shadow=peers.sock.underlying)
        rng = random.Random(0)
        for route in peers.routes:
            await sock.send_multipart([route, b"%d" % rng.randint(1, MAX_WORK_US)])
        for left in range(count, 0, -1):
            route, sent = await sock.recv_multipart()
            trips.append(monotonic() - seconds(sent))
            if left > REPLICAS:
                await sock.send_multipart([route, b"%d" % rng.randint(1, MAX_WORK_US)])

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work())
    seen.rounds.append(trips)
    return median(trips)


def replicas(count: int, rounds: int) -> str:
    bare, whole, seen = Ways(), Ways(), Seen()
    with (
        raw(*["work"] * REPLICAS) as peers,
        pipeline(first=ar(Kind.TEXT, REPLICAS, local=0), bare=REPLICAS) as bare_line,
        pipeline(first=ar(Kind.TEXT, REPLICAS)) as line,
    ):
        alternate(
            {
                "bare": partial(picked_up, bare_line, count, bare),
                "whole": partial(picked_up, line, count, whole),
                "raw": partial(raw_picked_up, peers, count, seen),
            },
            rounds,
        )
    more = [f"{(ways.back.percentile(99) - seen.percentile(99)) * 1e3:+.2f} ms at p99" for ways in (bare, whole)]
    rows = [
        (*_ms("stage's socket to caller", bare.back), f"{more[0]}; target < +1"),
        (*_ms("engine to caller", whole.back), more[1]),
        (*_ms("raw pyzmq, socket to uvloop", seen), ""),
    ]
    return table(f"{REPLICAS} replicas, results at random times", ("ms", "p50", "p99", "against raw"), rows)


# --- a large payload --------------------------------------------------------------------------------------------------


def relayed(line: Pipeline, count: int, ways: Ways) -> float:
    ask_in_turn(line, count, ways)
    return median(ways.between.rounds[-1])


def raw_relayed(peers: RawPeers, count: int) -> float:
    """From one process over this one to another, no copy anywhere."""
    source, sink = peers.routes
    seen = []
    for _ in range(count):
        peers.sock.send_multipart([source, b"go"])
        _, *frames = peers.sock.recv_multipart(copy=False)
        peers.sock.send_multipart([sink, *frames], copy=False)
        _, sent, got = peers.sock.recv_multipart()
        seen.append(seconds(got) - seconds(sent))
    return median(seen)


def payload(count: int, rounds: int) -> str:
    size = samples.BULK_BYTES
    data = bytearray(b"\1") * size
    ways = Ways()
    with (
        raw("source", "sink") as peers,
        pipeline(first=ar(Kind.TEXT, payload_bytes=size), second=painter()) as line,
    ):
        figures = alternate(
            {
                "ours": partial(relayed, line, count, ways),
                "raw": partial(raw_relayed, peers, count),
                "sums": partial(seconds_per_call, partial(xxhash.xxh3_64_intdigest, data), 4),
            },
            rounds,
        )
    ours, bare, sums = (median(figures[name]) * 1e3 for name in ("ours", "raw", "sums"))
    rows = [
        ("ours, engine to engine", ours, f"{bare / ours:.0%} of raw"),
        ("of which checksums, at both ends", 2 * sums, ""),
        ("raw pyzmq copy=False, two hops", bare, ""),
    ]
    return table(f"a payload of {size >> 20} MiB, relayed", ("ms", "median", ""), rows)


# --- printing ---------------------------------------------------------------------------------------------------------


def _ms(name: str, seen: Seen) -> tuple[str, float, float]:
    return name, seen.percentile(50) * 1e3, seen.percentile(99) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few rounds: shows that it runs, not how fast")
    parser.add_argument("rows", nargs="*", help="only these")
    asked = parser.parse_args()
    quick = asked.quick
    parts: dict[str, Callable[[], str]] = {
        "latency": partial(latency, *((20, 1) if quick else (300, 7))),
        "edges": partial(edges, *((20, 1) if quick else (200, 5))),
        "throughput": partial(throughput, *((256, 1) if quick else (6400, 5))),
        "idle": partial(idle, 1.0 if quick else 15.0),
        "replicas": partial(replicas, *((32, 1) if quick else (800, 5))),
        "payload": partial(payload, *((1, 1) if quick else (4, 5))),
    }
    unknown = set(asked.rows) - set(parts)
    if unknown:
        parser.error(f"no row {', '.join(sorted(unknown))}; rows: {', '.join(parts)}")
    print(machine("pyzmq", "msgspec", "janus", "uvloop"), f"libzmq {zmq.zmq_version()}", sep=", ")
    for name in asked.rows or parts:
        print(parts[name](), flush=True)


if __name__ == "__main__":
    main()
