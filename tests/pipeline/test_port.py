"""`Port`: nothing is lost, overtaken or left unheard between two sockets on one loop, however full or late a peer is."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import pytest
import uvloop
import zmq

from proto.sockets import Port, Sent, endpoint_of
from proto.tensors import Buffer

PATIENCE_S = 20.0
QUEUE = 8
BULK = b"x" * 20_000
"""Large enough that the system's own socket buffers do not hide a full peer."""


@contextmanager
def sockets(immediate: bool = False) -> Iterator[tuple["zmq.Socket[bytes]", "zmq.Socket[bytes]"]]:
    """A bound ROUTER and a DEALER that is not connected yet, with short queues."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router, context.socket(zmq.DEALER) as dealer:
        for sock in (router, dealer):
            sock.setsockopt(zmq.LINGER, 0)
            sock.setsockopt(zmq.SNDHWM, QUEUE)
            sock.setsockopt(zmq.RCVHWM, QUEUE)
            sock.setsockopt(zmq.SNDBUF, 65536)
            sock.setsockopt(zmq.RCVBUF, 65536)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        dealer.setsockopt(zmq.IMMEDIATE, int(immediate))
        router.bind("tcp://127.0.0.1:0")
        yield router, dealer


def on_a_loop(work: Callable[[], Awaitable[None]]) -> None:
    async def timed() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await work()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(timed())


class Inbox:
    """What a port was given, to wait for."""

    def __init__(self) -> None:
        self.messages: list[list[Buffer]] = []
        self._grown = asyncio.Event()

    def __call__(self, frames: list[Buffer]) -> None:
        self.messages.append(frames)
        self._grown.set()

    async def until(self, count: int) -> None:
        while len(self.messages) < count:
            self._grown.clear()
            await self._grown.wait()


def test_senders_wait_for_a_full_peer_and_keep_their_order() -> None:
    count = 400
    with sockets() as (router, dealer):

        async def work() -> None:
            loop, inbox = asyncio.get_running_loop(), Inbox()
            there = Port(router, loop, inbox, 2)
            there.pause()
            dealer.connect(endpoint_of(router))
            here = Port(dealer, loop, Inbox(), 1)
            sends = [loop.create_task(here.send_wait([b"%d" % number, BULK])) for number in range(count)]
            await asyncio.wait(sends[:1])
            while here.send([b"probe", BULK]) is Sent.OK:
                pass  # until the way is full
            assert not all(send.done() for send in sends)
            there.resume()
            assert set(await asyncio.gather(*sends)) == {Sent.OK}
            while sum(frames[1] != b"probe" for frames in inbox.messages) < count:
                await inbox.until(len(inbox.messages) + 1)
            numbers = [int(frames[1]) for frames in inbox.messages if frames[1] != b"probe"]
            assert numbers == list(range(count))
            assert all(bytes(frames[2]) == BULK for frames in inbox.messages)
            here.close()
            there.close()

        on_a_loop(work)


def test_a_message_that_comes_in_while_this_side_sends_is_heard() -> None:
    with sockets() as (router, dealer):

        async def work() -> None:
            loop, there_in, here_in = asyncio.get_running_loop(), Inbox(), Inbox()

            def answer(frames: list[Buffer]) -> None:
                there_in(frames)
                assert there.send(frames) is Sent.OK

            there = Port(router, loop, answer, 2)
            dealer.connect(endpoint_of(router))
            here = Port(dealer, loop, here_in, 1)
            for number in range(2000):
                await here.send_wait([b"%d" % number])
                if number % 4 == 0:
                    await here_in.until(number + 1)
            await here_in.until(2000)
            assert [int(frames[0]) for frames in here_in.messages] == list(range(2000))
            here.close()
            there.close()

        on_a_loop(work)


def test_a_sender_that_is_there_before_its_peer_is_served_when_the_peer_comes() -> None:
    with sockets(immediate=True) as (router, dealer):

        async def work() -> None:
            loop, inbox = asyncio.get_running_loop(), Inbox()
            here = Port(dealer, loop, Inbox(), 1)
            early = loop.create_task(here.send_wait([b"early"]))
            assert here.send([b"now"]) is Sent.FULL
            there = Port(router, loop, inbox, 2)
            dealer.connect(endpoint_of(router))
            assert await early is Sent.OK
            await inbox.until(1)
            assert inbox.messages[0][1] == b"early"
            here.close()
            there.close()

        on_a_loop(work)


def test_a_waiting_sender_is_told_that_the_socket_was_closed() -> None:
    with sockets(immediate=True) as (_, dealer):

        async def work() -> None:
            loop = asyncio.get_running_loop()
            here = Port(dealer, loop, Inbox(), 1)
            waiting = loop.create_task(here.send_wait([b"never"]))
            await asyncio.sleep(0)
            here.close()
            assert await waiting is Sent.GONE

        on_a_loop(work)


@pytest.mark.parametrize("bad", range(3))
def test_a_handler_that_raises_does_not_deafen_its_port(bad: int) -> None:
    with sockets() as (router, dealer):

        async def work() -> None:
            loop, inbox = asyncio.get_running_loop(), Inbox()
            faults: list[BaseException] = []
            loop.set_exception_handler(lambda _, context: faults.append(context["exception"]))

            def handle(frames: list[Buffer]) -> None:
                inbox(frames)
                if frames[1] == b"%d" % bad:
                    raise ValueError("as the test asked")

            there = Port(router, loop, handle, 2)
            dealer.connect(endpoint_of(router))
            here = Port(dealer, loop, Inbox(), 1)
            for number in range(3):
                await here.send_wait([b"%d" % number])
            await inbox.until(3)
            assert [type(fault) for fault in faults] == [ValueError]
            here.close()
            there.close()

        on_a_loop(work)
