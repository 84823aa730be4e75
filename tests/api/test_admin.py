"""The operator's routes: off by default, for this machine only, and with the replicas' own words."""

from collections.abc import Iterator

import httpx
import msgspec
import pytest

from proto.messages import StageInfo
from tests.api.fake_pipeline import PAINTER, THINKER, Server, serving, two_stages

CALL, LOAD, UNLOAD = "/admin/call", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    deploy = two_stages()
    with serving(msgspec.structs.replace(deploy, api=msgspec.structs.replace(deploy.api, admin=True))) as server:
        infos = {THINKER: StageInfo(params=("seed",)), PAINTER: StageInfo(params=("lora", "seed"))}
        server.call(lambda pipeline: setattr(pipeline, "infos", infos))
        yield server


def test_they_are_off_unless_the_deploy_turns_them_on() -> None:
    with serving(two_stages()) as server:
        for route in (CALL, LOAD, UNLOAD):
            answer = httpx.post(server.url + route, json={})
            assert answer.status_code == 403
            assert answer.json()["error"]["code"] == "admin_off"
            assert "api.admin" in answer.json()["error"]["message"]


def test_a_request_under_another_host_name_is_refused(server: Server) -> None:
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example"):
        answer = httpx.post(server.url + CALL, json={"stage": "painter", "method": "stats"}, headers={"host": host})
        assert answer.status_code == 403
    body = b'{"stage": "painter", "method": "stats"}'  # what a page of another site may send without being asked
    assert httpx.post(server.url + CALL, content=body, headers={"content-type": "text/plain"}).status_code == 415


def test_a_call_gives_each_replicas_answer(server: Server) -> None:
    body = {"stage": "painter", "method": "load_lora", "args": {"name": "fox"}, "replicas": [0, 2], "timeout_s": 7}
    answer = httpx.post(server.url + CALL, json=body)
    assert answer.status_code == 200
    said = {"args": {"name": "fox"}, "replicas": [0, 2], "timeout_s": 7}
    assert answer.json() == {"stage": "painter", "method": "load_lora", "answers": {"0": said}, "object": "stage.call"}


def test_a_failed_call_names_the_replica_the_reason_and_those_that_did_it(server: Server) -> None:
    answer = httpx.post(server.url + CALL, json={"stage": "painter", "method": "fail"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "path"
    assert "replica 1: no folder; done by 0" in error["message"]


def test_adapters_are_loaded_as_in_vllm(server: Server) -> None:
    answer = httpx.post(server.url + LOAD, json={"lora_name": "fox", "lora_path": "/fox"})
    assert answer.status_code == 200
    assert answer.json()["stage"] == "painter"
    assert answer.json()["answers"]["0"]["args"] == {"name": "fox", "path": "/fox"}
    answer = httpx.post(server.url + UNLOAD, json={"lora_name": "fox"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "lora_name")


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        (CALL, {"stage": "painter"}, "method"),
        (CALL, {"stage": "paintr", "method": "stats"}, "stage"),
        (CALL, {"stage": "painter", "method": "stats", "timeout_s": 0}, "timeout_s"),
        (CALL, {"stage": "painter", "method": "stats", "replicas": []}, "replicas"),
        (LOAD, {"lora_name": "fox"}, "lora_path"),
        (LOAD, {"lora_name": "fox", "lora_path": "/fox", "stage": "nobody"}, "stage"),
    ],
)
def test_bad_bodies_name_the_field(server: Server, route: str, body: dict[str, object], param: str) -> None:
    answer = httpx.post(server.url + route, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_where_several_stages_take_adapters_one_must_be_named(server: Server) -> None:
    before = server.call(lambda pipeline: pipeline.infos)
    both = dict.fromkeys((THINKER, PAINTER), StageInfo(params=("lora",)))
    server.call(lambda pipeline: setattr(pipeline, "infos", both))
    answer = httpx.post(server.url + LOAD, json={"lora_name": "fox", "lora_path": "/fox"})
    server.call(lambda pipeline: setattr(pipeline, "infos", before))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stage")
