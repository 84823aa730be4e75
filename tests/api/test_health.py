"""Health, status and metrics, idle and under load."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from omni.status import PipelineStatus
from tests.api.cases import CHAT, IMAGES, burst
from tests.api.fake_pipeline import Server, serving, two_stages


def samples(server: Server) -> dict[str, float]:
    """Every sample of /metrics, as name{label=value,...}."""
    text = httpx.get(f"{server.url}/metrics").raise_for_status().text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


def test_live_while_stages_load_and_ready_when_they_have(server: Server) -> None:
    assert httpx.get(f"{server.url}/health/ready").json()["ready"] is True
    server.call(lambda pipeline: setattr(pipeline, "ready", False))
    assert httpx.get(f"{server.url}/health/live").status_code == 200
    answer = httpx.get(f"{server.url}/health/ready")
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert answer.json() == {
        "ready": False,
        "message": "waiting for stage painter (0 of 1 replicas)",
        "waiting": [{"stage": "painter", "ready": 0, "wanted": 1, "notes": ["replica 0 loading: reading weights"]}],
    }


def test_status_is_the_pipelines_own(server: Server) -> None:
    status = msgspec.json.decode(httpx.get(f"{server.url}/status").content, type=PipelineStatus)
    assert status == server.run(server.pipeline.status())


def test_metrics_tell_requests_stages_edges_and_http(server: Server) -> None:
    httpx.post(server.url + IMAGES, json={"prompt": "x"}).raise_for_status()
    httpx.post(server.url + IMAGES, json={"prompt": ""})
    httpx.get(f"{server.url}/{'x' * 50}")
    found = samples(server)
    assert found["omni_requests_running{}"] == 0
    assert found["omni_requests_waiting{}"] == 0
    assert found["omni_requests_done_total{}"] == 1
    assert found["omni_requests_failed_total{reason=stage_failed}"] == 3
    assert found["omni_stage_ready{stage=painter}"] == 1
    assert found["omni_stage_queue_depth{replica=0,stage=painter}"] == 0
    assert found["omni_stage_running{replica=0,stage=thinker}"] == 0
    assert found["omni_stage_step_seconds{replica=0,stage=thinker}"] == 0.25
    assert found["omni_edge_bytes_total{source=thinker.text,target=painter.prompt}"] == 512
    assert found["omni_edge_payloads_total{source=thinker.text,target=painter.prompt}"] == 4
    assert found["omni_leases{}"] == found["omni_lease_bytes{}"] == 0
    assert found["omni_junk_frames_total{}"] == 2
    assert found[f"omni_http_requests_total{{route={IMAGES},status=200}}"] == 1
    assert found[f"omni_http_requests_total{{route={IMAGES},status=400}}"] == 1
    assert found["omni_http_requests_total{route=other,status=404}"] == 1
    assert found[f"omni_http_request_seconds_count{{route={IMAGES}}}"] == 2


def test_two_servers_in_one_process_do_not_mix_their_metrics(server: Server) -> None:
    with serving(two_stages()) as other:
        httpx.post(other.url + IMAGES, json={"prompt": "x"}).raise_for_status()
        assert f"omni_http_requests_total{{route={IMAGES},status=200}}" not in samples(server)


def test_metrics_tell_running_requests_while_they_run(server: Server) -> None:
    server.close_gate()
    body = {"model": "demo", "messages": [{"role": "user", "content": "x"}]}
    with ThreadPoolExecutor() as pool:
        calls = [pool.submit(httpx.post, server.url + CHAT, json=body) for _ in range(3)]
        server.until(lambda pipeline: pipeline.running == 3)
        assert samples(server)["omni_requests_running{}"] == 3
        server.open()
        assert [call.result().status_code for call in calls] == [200] * 3
    assert samples(server)["omni_requests_running{}"] == 0


def test_bug_is_counted_as_one(server: Server) -> None:
    server.call(lambda pipeline: setattr(pipeline, "fail_at_start", ZeroDivisionError()))
    httpx.post(server.url + IMAGES, json={"prompt": "x"})
    assert samples(server)[f"omni_http_requests_total{{route={IMAGES},status=500}}"] == 1


def test_burst_is_admitted_up_to_the_limits_and_the_rest_told_to_come_back() -> None:
    with serving(two_stages(max_requests=1, max_queued=4)) as server:
        server.close_gate()

        async def release() -> None:
            await asyncio.to_thread(server.open)

        asyncio.run(burst(server.url, calls=50, admitted=5, release=release))
        found = samples(server)
    assert found["omni_requests_running{}"] == found["omni_requests_waiting{}"] == 0
    assert found[f"omni_http_requests_total{{route={IMAGES},status=429}}"] == 45
