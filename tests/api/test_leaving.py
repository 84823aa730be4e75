"""Callers that leave and a server that stops: every request they leave behind is aborted, and nobody hangs."""

import asyncio
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from omni.api.server import serve
from proto.errors import DeployError
from tests.api.cases import CHAT, IMAGES, client
from tests.api.fake_pipeline import FakePipeline, Server, serving, two_stages

BODY = {"model": "demo", "messages": [{"role": "user", "content": "x"}]}

ASKS: list[tuple[str, dict[str, object]]] = [(IMAGES, {"prompt": "x"}), (CHAT, BODY), (CHAT, {**BODY, "stream": True})]


def send(server: Server, route: str, body: dict[str, object]) -> socket.socket:
    """Send a request by hand and wait until it runs."""
    content = httpx.Request("POST", server.url + route, json=body).content
    host, port = server.address
    peer = socket.create_connection((host, port))
    head = f"POST {route} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    peer.sendall(head.encode() + b"\r\n\r\n" + content)
    server.until(lambda pipeline: pipeline.running == 1)
    return peer


@pytest.mark.parametrize(("route", "body"), ASKS, ids=["images", "chat", "stream before its first word"])
def test_caller_that_leaves_aborts_its_request(server: Server, route: str, body: dict[str, object]) -> None:
    server.close_gate()
    for times in range(1, 4):
        send(server, route, body).close()
        server.until(lambda pipeline, times=times: (pipeline.aborted, pipeline.running) == (times, 0))
    server.open()
    assert httpx.post(server.url + route, json=body).status_code == 200
    assert f'omni_http_requests_total{{route="{route}",status="499"}} 3.0' in httpx.get(f"{server.url}/metrics").text


def test_caller_that_leaves_within_a_stream_aborts_its_request(server: Server) -> None:
    server.call(lambda pipeline: setattr(pipeline, "hold_after", 3))
    with client(server.url) as ai:
        stream = ai.chat.completions.create(**BODY, stream=True)
        assert [next(stream).choices[0].delta.content for _ in range(4)] == ["", "S", "t", "a"]
        stream.close()
        server.until(lambda pipeline: (pipeline.aborted, pipeline.running) == (1, 0))


def test_caller_that_leaves_while_waiting_in_the_queue_leaves_the_queue() -> None:
    with serving(two_stages(max_requests=1)) as server:
        server.close_gate()
        with ThreadPoolExecutor() as pool:
            first = pool.submit(httpx.post, server.url + IMAGES, json={"prompt": "x"})
            server.until(lambda pipeline: pipeline.running == 1)
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(server.url + IMAGES, json={"prompt": "x"}, timeout=httpx.Timeout(None, read=0.2))
            server.until(lambda pipeline: pipeline.queued == 0 and pipeline.aborted == 1)
            server.open()
            assert first.result().status_code == 200


def test_server_that_stops_tells_open_requests_why(server: Server) -> None:
    server.close_gate()
    with ThreadPoolExecutor() as pool:
        calls = [pool.submit(httpx.post, server.url + route, json=body) for route, body in ASKS]
        server.until(lambda pipeline: pipeline.running == len(ASKS))
        server.stop()
        for call in calls:
            answer = call.result()
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == "1"
            assert "shutting down" in answer.json()["error"]["message"]
    assert server.pipeline.running == 0


def test_stream_is_ended_by_an_error_event_when_the_server_stops(server: Server) -> None:
    server.call(lambda pipeline: setattr(pipeline, "hold_after", 3))
    with client(server.url) as ai:
        stream = ai.chat.completions.create(**BODY, stream=True)
        parts = [next(stream).choices[0].delta.content for _ in range(4)]
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        with pytest.raises(openai.APIError, match="shutting down"):
            next(stream)
        stopping.join()
    assert "".join(parts) == "Sta"
    assert server.pipeline.running == 0


def test_server_stops_although_a_caller_does_not_read(server: Server) -> None:
    server.call(lambda pipeline: setattr(pipeline, "endless", True))
    with send(server, CHAT, {**BODY, "stream": True}):
        server.stop()
    assert server.pipeline.running == 0


def test_port_that_is_taken_is_named_with_a_remedy(server: Server) -> None:
    _, port = server.address

    async def second() -> None:
        await serve(FakePipeline(two_stages()), "127.0.0.1", port, on_bound=lambda host, port: None)

    with pytest.raises(DeployError, match=rf"cannot listen on 127.0.0.1 port {port}.*api\.port"):
        asyncio.run(second())


def test_port_can_be_used_again_at_once(server: Server) -> None:
    _, port = server.address
    httpx.get(f"{server.url}/health/live").raise_for_status()
    server.stop()

    async def again() -> None:
        bound: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(
            serve(FakePipeline(two_stages()), "127.0.0.1", port, on_bound=lambda host, port: bound.set_result(port))
        )
        done, _ = await asyncio.wait((task, bound), timeout=20, return_when=asyncio.FIRST_COMPLETED)
        assert bound in done
        assert await bound == port
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(again())
