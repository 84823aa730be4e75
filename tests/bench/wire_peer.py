"""The other process of `bench_wire`: a DEALER that echoes or floods, through our framing or with pyzmq alone.

Started as `python -m tests.bench.wire_peer ENDPOINT MODE`. It answers commands, one multipart message each:
`[b"echo", n]` (answer the next n messages), `[b"flood", n]` (send n messages), `[b"bulk", n]` (send n large tensors and
then what that cost in memory), `[b"stop"]`.
"""

import asyncio
import resource
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import uvloop
import zmq
import zmq.asyncio

from proto.frames import receive_frames, send_frames
from proto.framing import DATA_DOWN, DATA_UP
from proto.numpy_tensors import to_wire
from proto.sockets import Port
from tests.bench.wire_samples import BULK_BYTES, CHUNK, RESULT, bulk

RAW_RESULT = DATA_UP.encode(RESULT)
RAW_CHUNK = DATA_UP.encode(CHUNK)


def serve(sock: "zmq.Socket[bytes]", mode: str) -> None:
    """Commands until `stop`, with a blocking socket."""
    while True:
        command, *rest = sock.recv_multipart()
        if command == b"stop":
            return
        count = int(rest[0])
        if command == b"echo":
            _echo(sock, count, mode)
        elif command == b"flood":
            _flood(sock, count, mode)
        elif command == b"bulk":
            _bulk(sock, count, mode)
        elif command == b"loop":
            loop_echo(sock, count, mode)


def _echo(sock: "zmq.Socket[bytes]", count: int, mode: str) -> None:
    for _ in range(count):
        if mode == "ours":
            DATA_DOWN.decode(receive_frames(sock, 1))
            send_frames(sock, DATA_UP.encode(RESULT))
        else:
            sock.recv_multipart()
            sock.send_multipart(RAW_RESULT)


def _flood(sock: "zmq.Socket[bytes]", count: int, mode: str) -> None:
    for _ in range(count):
        if mode == "ours":
            send_frames(sock, DATA_UP.encode(CHUNK))
        else:
            sock.send_multipart(RAW_CHUNK)


def _bulk(sock: "zmq.Socket[bytes]", count: int, mode: str) -> None:
    """Send `count` tensors, one at a time; then the peak growth of this process in bytes: Python heap, resident set."""
    array = np.ones(BULK_BYTES // 4, dtype=np.float32)
    raw = [DATA_UP.encode(*bulk(to_wire(array)))[0], memoryview(array).cast("B")]
    _reset_peak()
    resident = _resident("VmRSS")
    tracemalloc.start()
    for _ in range(count):
        if mode == "ours":
            send_frames(sock, DATA_UP.encode(*bulk(to_wire(array))))
        else:
            sock.send_multipart(raw, copy=False)
        sock.recv_multipart()  # whole at the other side: the next one may be sent
    heap = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    sock.send_multipart([b"%d" % heap, b"%d" % (_resident("VmHWM") - resident)])


def loop_echo(sock: "zmq.Socket[bytes]", count: int, mode: str) -> None:
    """Answer `count` messages on a uvloop: through `Port`, or with zmq.asyncio."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_loop_ours(sock, count) if mode == "ours" else _loop_raw(sock, count))


async def _loop_ours(sock: "zmq.Socket[bytes]", count: int) -> None:
    done = asyncio.Event()
    left = count

    def answer(frames: list[bytes | bytearray | memoryview]) -> None:
        nonlocal left
        DATA_DOWN.decode(frames)
        port.send(DATA_UP.encode(RESULT))
        left -= 1
        if not left:
            port.pause()
            done.set()

    loop = asyncio.get_running_loop()
    port = Port(sock, loop, answer, 1)
    await done.wait()
    loop.remove_reader(sock.getsockopt(zmq.FD))


async def _loop_raw(sock: "zmq.Socket[bytes]", count: int) -> None:
    wrapped = zmq.asyncio.Socket(shadow=sock.underlying)
    for _ in range(count):
        await wrapped.recv_multipart()
        await wrapped.send_multipart(RAW_RESULT)


def _resident(field: str) -> int:
    """Bytes of a field of /proc/self/status; where there is none, the peak that the system reports."""
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(text.split(f"{field}:")[1].split()[0]) * 1024


def _reset_peak() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return  # the peak then covers the whole run, which only makes the figure larger


def main() -> None:
    endpoint, mode = sys.argv[1:]
    with zmq.Context() as context, context.socket(zmq.DEALER) as sock:
        sock.setsockopt(zmq.LINGER, 0)
        sock.connect(endpoint)
        sock.send_multipart([mode.encode()])
        serve(sock, mode)


if __name__ == "__main__":
    main()
