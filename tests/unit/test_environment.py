"""The environment of stage processes: threads shared out, devices narrowed, the parent's own left alone."""

import os
from collections.abc import Mapping

import pytest

from launch.environment import SPINS, child_environment, cores_suffice, device_for, local_processes, threads_for
from proto.deploy import ArParallelSpec, ArStage, Deploy, DiffusionStage
from stages.parallel.devices import narrowed, share_of_threads

COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def deploy(**stages: ArStage | DiffusionStage) -> Deploy:
    return Deploy(name="test", stages=dict(stages))  # type: ignore[arg-type]


def environment(
    stage: ArStage | DiffusionStage, replica: int = 0, *, cores: int = 8, base: Mapping[str, str] | None = None
) -> tuple[dict[str, str], str]:
    return child_environment(
        stage, replica, deploy(thinker=stage, painter=DiffusionStage()), cores=cores, base=base or {}
    )


def test_the_cores_are_shared_by_the_processes_that_start_here() -> None:
    plan = deploy(thinker=ArStage(replicas=2), painter=DiffusionStage(replicas=3, local=1), far=DiffusionStage(local=0))
    assert local_processes(plan) == 3
    assert threads_for(plan.stages["thinker"], plan, cores=8) == 2  # type: ignore[index]
    assert threads_for(plan.stages["thinker"], plan, cores=2) == 1  # type: ignore[index]


def test_the_deploys_own_count_of_threads_wins() -> None:
    env, _ = environment(ArStage(threads=5))
    assert [env[name] for name in COUNTS] == ["5", "5", "5"]


def test_threads_are_set_before_anything_is_imported_and_they_wait_passively() -> None:
    env, _ = environment(ArStage())
    assert [env[name] for name in COUNTS] == ["4", "4", "4"]
    assert env["OMP_WAIT_POLICY"] == "PASSIVE"


@pytest.mark.parametrize(("threads", "spins"), [(4, True), (5, False)])
def test_threads_wait_awake_for_a_moment_only_where_each_has_a_core_of_its_own(threads: int, spins: bool) -> None:
    stage = ArStage(threads=threads)
    env, _ = environment(stage, base={"GOMP_SPINCOUNT": "9"})
    assert env["GOMP_SPINCOUNT"] == str(SPINS if spins else 0)


def test_replicas_and_ranks_count_when_cores_are_shared() -> None:
    two_ranks = ArStage(threads=4, parallel=ArParallelSpec(tensor=2))
    assert cores_suffice(deploy(thinker=two_ranks), 4)
    assert not cores_suffice(deploy(thinker=two_ranks), 3)
    assert not cores_suffice(deploy(painter=DiffusionStage(threads=2, replicas=3)), 5)
    assert cores_suffice(deploy(painter=DiffusionStage(threads=2, replicas=3, local=2)), 5)


def test_the_parents_environment_is_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("SOMETHING", "of the parent")
    before = dict(os.environ)
    stage = ArStage(devices=("cuda:1",), env={"SOMETHING": "else"})
    env, _ = child_environment(stage, 0, deploy(thinker=stage))
    assert dict(os.environ) == before
    assert env["SOMETHING"] == "else"
    assert env["PATH"] == before["PATH"]


def test_the_deploys_env_wins_over_everything() -> None:
    env, _ = environment(ArStage(env={"OMP_NUM_THREADS": "7", "HF_HUB_OFFLINE": "0"}))
    assert (env["OMP_NUM_THREADS"], env["HF_HUB_OFFLINE"]) == ("7", "0")


def test_devices_are_handed_out_in_turn() -> None:
    stage = DiffusionStage(devices=("cuda:0", "cuda:1"), replicas=3)
    assert [device_for(stage, replica) for replica in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]


def test_a_replica_of_several_ranks_gets_a_group_of_devices_and_each_rank_its_share_of_threads() -> None:
    devices = ("cuda:0", "cuda:1", "cuda:2", "cuda:3")
    stage = ArStage(devices=devices, replicas=3, parallel=ArParallelSpec(tensor=2))
    assert [device_for(stage, replica) for replica in range(3)] == ["cuda:0,cuda:1", "cuda:2,cuda:3", "cuda:0,cuda:1"]
    plan = deploy(thinker=stage, painter=DiffusionStage())
    assert local_processes(plan) == 7
    assert threads_for(stage, plan, cores=15) == 2
    assert threads_for(ArStage(threads=9, parallel=ArParallelSpec(tensor=2)), plan, cores=4) == 4
    env, named = environment(stage, 1, base={"CUDA_VISIBLE_DEVICES": "4,5,6,7"})
    assert (named, env["CUDA_VISIBLE_DEVICES"]) == ("cuda:2,cuda:3", "4,5,6,7")


@pytest.mark.parametrize(
    ("devices", "env", "named", "seen"),
    [
        (("cuda:2", "cuda:3"), {}, ("cuda:0", "cuda:1"), {"CUDA_VISIBLE_DEVICES": "2,3"}),
        (
            ("cuda:1", "cuda:0"),
            {"CUDA_VISIBLE_DEVICES": "4,GPU-b"},
            ("cuda:0", "cuda:1"),
            {"CUDA_VISIBLE_DEVICES": "GPU-b,4"},
        ),
        (("cuda:1", "cuda:2"), {"CUDA_VISIBLE_DEVICES": "4,5"}, ("cuda:1", "cuda:2"), {}),
        (("xpu:1", "xpu:3"), {}, ("xpu:0", "xpu:1"), {"ZE_AFFINITY_MASK": "1,3"}),
        (("cpu", "cpu"), {}, ("cpu", "cpu"), {"CUDA_VISIBLE_DEVICES": "", "ZE_AFFINITY_MASK": ""}),
        (("mps", "mps"), {}, ("mps", "mps"), {}),
    ],
)
def test_the_ranks_of_a_replica_see_their_own_devices_in_the_order_of_their_ranks(
    devices: tuple[str, ...], env: dict[str, str], named: tuple[str, ...], seen: dict[str, str]
) -> None:
    assert narrowed(devices, env) == (named, seen)


@pytest.mark.parametrize(
    ("env", "threads", "expected"), [({"OMP_NUM_THREADS": "3"}, 16, 3), ({}, 16, 8), ({}, None, 4), ({}, 1, 1)]
)
def test_a_worker_that_nobody_told_its_threads_shares_them_among_its_ranks(
    env: dict[str, str], threads: int | None, expected: int
) -> None:
    assert share_of_threads(env, threads, degree=2, cores=8) == expected


@pytest.mark.parametrize(
    ("visible", "device", "seen"),
    [
        (None, "cuda:1", "1"),
        ("4,6", "cuda:0", "4"),
        ("4,6", "cuda:1", "6"),
        ("GPU-aaaa,GPU-bbbb", "cuda:1", "GPU-bbbb"),
    ],
)
def test_one_cuda_device_is_the_only_one_that_the_child_sees(visible: str | None, device: str, seen: str) -> None:
    base = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    env, named = environment(DiffusionStage(devices=(device,)), base=base)
    assert env["CUDA_VISIBLE_DEVICES"] == seen
    assert named == "cuda:0"


@pytest.mark.parametrize("visible", ["", "4"])
def test_a_device_that_is_hidden_from_the_parent_stays_hidden_from_the_child(visible: str) -> None:
    env, named = environment(DiffusionStage(devices=("cuda:2",)), base={"CUDA_VISIBLE_DEVICES": visible})
    assert env["CUDA_VISIBLE_DEVICES"] == visible
    assert named == "cuda:2"


@pytest.mark.parametrize("device", ["cpu", "mps", "cuda"])
def test_other_devices_are_named_as_they_are(device: str) -> None:
    env, named = environment(DiffusionStage(devices=(device,)), base={"CUDA_VISIBLE_DEVICES": "3"})
    assert named == device
    assert env["CUDA_VISIBLE_DEVICES"] == "3"
