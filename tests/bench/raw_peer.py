"""The other process of `bench_pipeline`: a DEALER that answers with pyzmq alone. `python -m tests.bench.raw_peer ENDPOINT MODE`.

loop    one message of a result's size for each message, on uvloop with zmq.asyncio
block   the same with a blocking socket
work    waits as many microseconds as the message says, then sends the time
source  sends the time and a large frame for each message
sink    sends the time that came with a large frame, and the time now
In each of these modes the message `stop` ends it.
stage   joins a master as a stage of two plain sockets and one thread, which works as `work` does, until Shutdown comes
"""

import asyncio
import os
import struct
import sys
import threading
import time

import uvloop
import zmq
import zmq.asyncio

from proto.framing import CONTROL_DOWN, CONTROL_UP, DATA_DOWN, DATA_UP
from proto.ids import StageName
from proto.messages import PROTOCOL, Attach, Hello, Ready, Result, StageInfo, Submit, Text, Timings, Welcome
from proto.sockets import split_endpoint
from tests.bench.wire_samples import BULK_BYTES, RESULT

RAW_RESULT = DATA_UP.encode(RESULT)
STOP = b"stop"


def stamp() -> bytes:
    return struct.pack("<d", time.monotonic())


def seconds(stamped: bytes) -> float:
    (value,) = struct.unpack("<d", stamped)
    return float(value)


async def _loop(sock: "zmq.Socket[bytes]") -> None:
    wrapped = zmq.asyncio.Socket(shadow=sock.underlying)
    while (await wrapped.recv_multipart())[0] != STOP:
        await wrapped.send_multipart(RAW_RESULT)


def _block(sock: "zmq.Socket[bytes]") -> None:
    while sock.recv_multipart()[0] != STOP:
        sock.send_multipart(RAW_RESULT)


def _work(sock: "zmq.Socket[bytes]") -> None:
    never = threading.Event()
    while (message := sock.recv_multipart()[0]) != STOP:
        never.wait(int(message) / 1e6)
        sock.send_multipart([stamp()])


def _source(sock: "zmq.Socket[bytes]") -> None:
    data = bytearray(b"\1") * BULK_BYTES
    while sock.recv_multipart()[0] != STOP:
        sock.send_multipart([stamp(), data], copy=False)


def _sink(sock: "zmq.Socket[bytes]") -> None:
    while (frames := sock.recv_multipart(copy=False))[0].bytes != STOP:
        sock.send_multipart([frames[0].bytes, stamp()])


def _stage(context: "zmq.Context[zmq.Socket[bytes]]", master: str) -> None:
    """It sends no heartbeats: the deploy's `suspect_after` must be longer than the bench."""
    with context.socket(zmq.DEALER) as control, context.socket(zmq.DEALER) as data:
        control.connect(master)
        hello = Hello(
            protocol=PROTOCOL, build="bench", stage=StageName("first"), nonce=str(os.getpid()), host="-", pid=0
        )
        control.send_multipart(CONTROL_UP.encode(hello))
        welcome, _ = CONTROL_DOWN.decode(control.recv_multipart())
        assert isinstance(welcome, Welcome)
        data.connect(f"tcp://{split_endpoint(master)[0]}:{welcome.data_port}")
        data.send_multipart(DATA_UP.encode(Attach(session=welcome.session, epoch=welcome.epoch)))
        data.recv_multipart()
        info = StageInfo(inputs=("prompt",), outputs=("text",))
        control.send_multipart(CONTROL_UP.encode(Ready(epoch=welcome.epoch, info=info, load_s=0.0)))
        poller = zmq.Poller()
        poller.register(control, zmq.POLLIN)
        poller.register(data, zmq.POLLIN)
        while control not in dict(poller.poll()):
            submit, _ = DATA_DOWN.decode(data.recv_multipart())
            assert isinstance(submit, Submit)
            data.send_multipart(DATA_UP.encode(_answer(submit)))


def _answer(submit: Submit) -> Result:
    submitted = time.monotonic()
    threading.Event().wait((submit.params.seed or 0) / 1e6)
    timings = Timings(detail={"submitted": submitted, "finished": time.monotonic()})
    text = Text(text="A fox the colour of rust steps onto the ice. " * 4)
    return Result(request=submit.request, epoch=submit.epoch, seq=0, outputs={"text": text}, timings=timings)


def main() -> None:
    endpoint, mode = sys.argv[1:]
    if mode == "stage":
        with zmq.Context() as context:
            _stage(context, endpoint)
        return
    with zmq.Context() as context, context.socket(zmq.DEALER) as sock:
        sock.setsockopt(zmq.LINGER, 0)
        sock.connect(endpoint)
        sock.send_multipart([mode.encode()])
        if mode == "loop":
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(_loop(sock))
        else:
            {"block": _block, "work": _work, "source": _source, "sink": _sink}[mode](sock)


if __name__ == "__main__":
    main()
