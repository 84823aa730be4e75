"""What the wire costs: `python -m tests.bench.bench_wire [--quick]`.

- encode and decode of usual messages, microseconds
- one-way messages a second and ping-pong latency through our framing, against pyzmq alone with the same bytes
- one 64 MiB tensor: time against pyzmq alone and memcpy, and proof that nothing of ours copies it
"""

import argparse
import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
import zmq
import zmq.asyncio

from proto.frames import receive_frames, send_frames
from proto.framing import CONTROL_DOWN, CONTROL_UP, DATA_DOWN, DATA_UP, Lane
from proto.numpy_tensors import from_wire, to_wire
from proto.sockets import Port, Sent
from tests.bench import wire_samples as samples
from tests.bench.report import alternate, machine, median, percentile, seconds_per_call, table

RAW_SUBMIT = DATA_DOWN.encode(samples.SUBMIT)
PEER = [sys.executable, "-m", "tests.bench.wire_peer"]


class Peer:
    """A `wire_peer` process at the other end of a ROUTER socket."""

    def __init__(self, sock: "zmq.Socket[bytes]", mode: str, endpoint: str) -> None:
        self.process = subprocess.Popen([*PEER, endpoint, mode], cwd=Path(__file__).resolve().parents[2])
        self.sock = sock
        self.mode = mode
        self.route, _ = sock.recv_multipart()

    def command(self, name: bytes, count: int = 0) -> None:
        self.sock.send_multipart([self.route, name, b"%d" % count])

    def stop(self) -> None:
        self.command(b"stop")
        self.process.wait(20)


@contextmanager
def peers() -> Iterator[dict[str, Peer]]:
    """One peer that uses our framing and one that uses pyzmq alone, each on a socket of its own."""
    with zmq.Context() as context:
        found: dict[str, Peer] = {}
        socks = []
        try:
            for mode in ("raw", "ours"):
                sock = context.socket(zmq.ROUTER)
                socks.append(sock)
                sock.setsockopt(zmq.LINGER, 0)
                sock.setsockopt(zmq.RCVTIMEO, 60_000)
                sock.setsockopt(zmq.ROUTER_MANDATORY, 1)
                sock.bind("tcp://127.0.0.1:0")
                found[mode] = Peer(sock, mode, sock.getsockopt_string(zmq.LAST_ENDPOINT))
            yield found
        finally:
            for peer in found.values():
                peer.stop()
            for sock in socks:
                sock.close(0)


def codec(calls: int, rounds: int) -> str:
    """Microseconds to encode and decode, target at most 3 each."""
    lanes: list[tuple[Lane[Any], Any]] = [
        (DATA_DOWN, samples.SUBMIT),
        (DATA_UP, samples.CHUNK),
        (DATA_UP, samples.RESULT),
    ]
    lanes += [(CONTROL_UP, samples.HEARTBEAT), (CONTROL_DOWN, samples.WELCOME)]
    work: dict[tuple[str, str], Callable[[], float]] = {}
    for lane, message in lanes:
        frames = lane.encode(message)
        work[samples.name_of(message), "encode"] = partial(seconds_per_call, partial(lane.encode, message), calls)
        work[samples.name_of(message), "decode"] = partial(seconds_per_call, partial(lane.decode, frames), calls)
    figures = alternate(work, rounds)
    rows = []
    for lane, message in lanes:
        name = samples.name_of(message)
        encode, decode = (median(figures[name, way]) * 1e6 for way in ("encode", "decode"))
        rows.append((name, len(lane.encode(message)[0]), encode, decode, "yes" if max(encode, decode) <= 3 else "NO"))
    return table("encode and decode, us (median)", ("message", "bytes", "encode", "decode", "<= 3 us"), rows)


def ping_pong(peer: Peer, count: int, latencies: list[float]) -> float:
    """Median seconds from a Submit to its Result with blocking sockets."""
    peer.command(b"echo", count)
    sock, route, ours = peer.sock, peer.route, peer.mode == "ours"
    seen = []
    for _ in range(count):
        started = time.perf_counter()
        if ours:
            send_frames(sock, [route, *DATA_DOWN.encode(samples.SUBMIT)])
            DATA_UP.decode(receive_frames(sock, 2)[1:])
        else:
            sock.send_multipart([route, *RAW_SUBMIT])
            sock.recv_multipart()
        seen.append(time.perf_counter() - started)
    latencies += seen
    return median(seen)


def flood(peer: Peer, count: int) -> float:
    """Chunks a second from the peer's DEALER to our ROUTER, decoded; blocking sockets."""
    peer.command(b"flood", count)
    sock, ours = peer.sock, peer.mode == "ours"
    sock.recv_multipart()
    started = time.perf_counter()
    for _ in range(count - 1):
        if ours:
            DATA_UP.decode(receive_frames(sock, 2)[1:])
        else:
            sock.recv_multipart()
    return (count - 1) / (time.perf_counter() - started)


def loop_ping_pong(peer: Peer, count: int, latencies: list[float]) -> float:
    """Median seconds of a round trip between two uvloops: ours through `Port`, raw through zmq.asyncio."""
    peer.command(b"loop", count)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        seen = runner.run(_loop_ours(peer, count) if peer.mode == "ours" else _loop_raw(peer, count))
    latencies += seen
    return median(seen)


async def _loop_ours(peer: Peer, count: int) -> list[float]:
    arrived: asyncio.Queue[float] = asyncio.Queue()

    def receive(frames: list[bytes | bytearray | memoryview]) -> None:
        DATA_UP.decode(frames[1:])
        arrived.put_nowait(time.perf_counter())

    loop = asyncio.get_running_loop()
    port = Port(peer.sock, loop, receive, 2)
    seen = []
    for _ in range(count):
        started = time.perf_counter()
        assert port.send([peer.route, *DATA_DOWN.encode(samples.SUBMIT)]) is Sent.OK
        seen.append(await arrived.get() - started)
    port.pause()
    loop.remove_reader(peer.sock.getsockopt(zmq.FD))
    return seen


async def _loop_raw(peer: Peer, count: int) -> list[float]:
    sock = zmq.asyncio.Socket(shadow=peer.sock.underlying)
    seen = []
    for _ in range(count):
        started = time.perf_counter()
        await sock.send_multipart([peer.route, *RAW_SUBMIT])
        await sock.recv_multipart()
        seen.append(time.perf_counter() - started)
    return seen


def against_raw(count: int, rounds: int) -> str:
    """Our framing against pyzmq alone; a ratio of 100% would be free, the target is 80%."""
    rows: list[tuple[str, float, float, str]] = []
    with peers() as both:
        for title, run in (("ping-pong, blocking", ping_pong), ("ping-pong, uvloop", loop_ping_pong)):
            tails: dict[str, list[float]] = {mode: [] for mode in both}
            work = {mode: partial(run, peer, count, tails[mode]) for mode, peer in both.items()}
            figures = alternate(work, rounds)
            raw, ours = (median(figures[mode]) * 1e6 for mode in ("raw", "ours"))
            rows.append((f"{title}, us p50", raw, ours, f"{raw / ours:.0%}"))
            raw, ours = (percentile(tails[mode], 99) * 1e6 for mode in ("raw", "ours"))
            rows.append((f"{title}, us p99", raw, ours, f"{raw / ours:.0%}"))
        figures = alternate({mode: partial(flood, peer, count * 10) for mode, peer in both.items()}, rounds)
        raw, ours = (median(figures[mode]) for mode in ("raw", "ours"))
        rows.append(("chunks one way, per second", raw, ours, f"{ours / raw:.0%}"))
        blocking = rows[0]
        rows.append(("ping-pongs per second, blocking", 1e6 / blocking[1], 1e6 / blocking[2], blocking[3]))
    return table("framing against pyzmq alone, same bytes", ("what", "raw pyzmq", "ours", "of raw"), rows)


def bulk_round(peer: Peer, count: int, facts: dict[str, list[int]]) -> float:
    """Median seconds of one large tensor, and what the two processes' memory did meanwhile."""
    peer.command(b"bulk", count)
    seen = []
    for _ in range(count):
        started = time.perf_counter()
        if peer.mode == "ours":
            frames = receive_frames(peer.sock, 2)
            _, (tensor,) = DATA_UP.decode(frames[1:])
            array = from_wire(tensor)
            facts["shared"].append(int(np.shares_memory(array, np.frombuffer(frames[2], np.uint8))))
        else:
            peer.sock.recv_multipart(copy=False)
        peer.sock.send_multipart([peer.route, b"got it"])
        seen.append(time.perf_counter() - started)
    _, heap, resident = peer.sock.recv_multipart()
    facts["heap"].append(int(heap))
    facts["resident"].append(int(resident))
    return median(seen[1:] or seen)


def large_tensor(count: int, rounds: int) -> str:
    """64 MiB from DEALER to ROUTER over TCP loopback."""
    facts: dict[str, dict[str, list[int]]] = {m: {"shared": [], "heap": [], "resident": []} for m in ("raw", "ours")}
    source = np.ones(samples.BULK_BYTES // 4, dtype=np.float32)
    target = np.empty_like(source)
    sent = DATA_UP.encode(*samples.bulk(to_wire(source)))[1]
    with peers() as both:
        work: dict[str, Callable[[], float]] = {m: partial(bulk_round, p, count, facts[m]) for m, p in both.items()}
        work["memcpy"] = partial(seconds_per_call, partial(np.copyto, target, source), 2)
        figures = {name: median(values) * 1e3 for name, values in alternate(work, rounds).items()}
    ours, mib = facts["ours"], 2**20
    rows = [
        ("raw pyzmq copy=False, ms", figures["raw"], ""),
        ("ours, ms", figures["ours"], f"{figures['raw'] / figures['ours']:.0%} of raw"),
        ("one memcpy into warm pages, ms", figures["memcpy"], ""),
        ("frame to send lies on the array", str(np.shares_memory(np.frombuffer(sent, np.uint8), source)), "no copy"),
        ("received array lies on the frame", str(all(ours["shared"])), "no copy"),
        ("sender's Python heap grew by, MiB", max(ours["heap"]) / mib, f"raw {max(facts['raw']['heap']) / mib:.2g}"),
        ("sender's resident peak grew by, MiB", max(ours["resident"]) / mib, f"raw {max(facts['raw']['resident']) / mib:.2g}"),
    ]  # fmt: skip
    return table("one 64 MiB tensor, TCP loopback", ("what", "figure", ""), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few rounds: shows that it runs, not how fast")
    quick = parser.parse_args().quick
    print(machine("pyzmq", "msgspec", "numpy", "uvloop"), f"libzmq {zmq.zmq_version()}", sep=", ")
    print(codec(*((200, 2) if quick else (5000, 20))), flush=True)
    print(against_raw(*((200, 2) if quick else (2000, 15))), flush=True)
    print(large_tensor(*((2, 1) if quick else (4, 6))), flush=True)


if __name__ == "__main__":
    main()
