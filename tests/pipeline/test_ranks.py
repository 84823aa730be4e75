"""The ranks of a replica stay in step or the replica ends, with the rank named; no follower outlives its leader."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from proto.deploy import ArEngineSpec, ArParallelSpec, ArStage, LimitsSpec
from proto.errors import StartError
from proto.ids import StageName
from stages.engine import LoadContext
from stages.parallel.group import Group, RankLost
from tests.fakes.ranks import Fault, Note
from tests.pipeline.harness import ROOT, until, until_gone

ROLE = "tests.fakes.ranks:follow"
pytestmark = pytest.mark.usefixtures("no_leftovers")


@dataclass
class Told:
    """What the leader's worker hears."""

    reasons: list[str] = field(default_factory=list)
    came: threading.Event = field(default_factory=threading.Event)

    def broken(self, reason: str) -> None:
        self.reasons.append(reason)
        self.came.set()


def context(
    told: Told, *, ranks: int = 3, timeout: float = 60.0, how: str = "builtin", devices: int = 0
) -> LoadContext:
    spec = ArStage(parallel=ArParallelSpec(tensor=ranks, timeout=timeout), engine=ArEngineSpec(use=how))
    names = tuple(f"cuda:{rank}" for rank in range(devices or ranks))
    return LoadContext(StageName("s"), spec, LimitsSpec(), names[0], (), lambda note, done: None, names, told.broken)


@contextmanager
def group(told: Told, **more: object) -> Iterator[Group]:
    made = Group(context(told, **more), ROLE)  # type: ignore[arg-type]
    pids = made.pids
    try:
        yield made
    finally:
        made.close()
        until_gone(pids)


def raises(text: str) -> Callable[[], None]:
    def work() -> None:
        raise KeyError(text)

    return work


def test_every_rank_does_every_command_in_order_on_its_own_device(tmp_path: Path) -> None:
    told, file = Told(), tmp_path / "notes"
    with group(told) as ranks:
        ranks.meet()
        assert [ranks.run(Note(str(file), text), lambda text=text: text.upper()) for text in "ab"] == ["A", "B"]  # type: ignore[misc]
    lines = file.read_text().splitlines()
    assert sorted(lines[:2]) == ["a 1 cuda:1", "a 2 cuda:2"]
    assert sorted(lines[2:]) == ["b 1 cuda:1", "b 2 cuda:2"]
    assert told.reasons == []


def test_what_raises_in_all_ranks_is_the_requests_fault_and_the_ranks_go_on(tmp_path: Path) -> None:
    told, file = Told(), str(tmp_path / "notes")
    with group(told, ranks=2) as ranks:
        ranks.meet()
        with pytest.raises(KeyError, match="mine"):
            ranks.run(Note(file, "bad", Fault.RAISE), raises("mine"))
        assert ranks.run(Note(file, "good"), lambda: 7) == 7
    assert told.reasons == []


@pytest.mark.parametrize("leader", [True, False])
def test_what_raises_in_one_rank_alone_ends_the_replica_with_its_words(tmp_path: Path, leader: bool) -> None:
    told, file = Told(), str(tmp_path / "notes")
    with group(told) as ranks:
        ranks.meet()
        fault, work = (Fault.NONE, raises("mine")) if leader else (Fault.RAISE, lambda: None)
        expected = "rank 0 raised KeyError: 'mine'" if leader else "rank 1 raised ValueError: a, as the test asked"
        with pytest.raises(RankLost, match=f"out of step.*{expected}"):
            ranks.run(Note(file, "a", fault), work)
        until_gone(ranks.pids)
        with pytest.raises(RankLost, match=expected):
            ranks.run(Note(file, "b"), lambda: None)
    assert len(told.reasons) == 1


def test_a_rank_that_ends_in_a_command_ends_the_replica(tmp_path: Path) -> None:
    told = Told()
    with group(told) as ranks:
        ranks.meet()
        with pytest.raises(RankLost, match=r"rank 2 of 3 \(s\): its process \d+ ended with 9"):
            ranks.run(Note(str(tmp_path / "notes"), "a", Fault.EXIT, rank=2), lambda: None)
        until_gone(ranks.pids)
    assert len(told.reasons) == 1


def test_a_rank_that_is_killed_while_nothing_is_done_is_noticed_at_once() -> None:
    told = Told()
    with group(told) as ranks:
        ranks.meet()
        os.kill(ranks.pids[0], signal.SIGKILL)
        assert told.came.wait(60)
        assert "rank 1 of 3 (s): its process" in told.reasons[0]
        assert told.reasons[0].endswith("ended with -9")
        until_gone(ranks.pids)


@pytest.mark.parametrize("stuck", [True, False])
def test_a_rank_that_hangs_ends_the_replica_also_when_the_leader_waits_for_it_for_ever(
    tmp_path: Path, stuck: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stages.parallel.group.SLACK_S", 0.1)
    told = Told()
    with group(told, ranks=2, timeout=0.5) as ranks:
        ranks.meet()
        wait = threading.Event()
        work = (lambda: wait.wait() and None) if stuck else lambda: None
        problems: list[BaseException] = []

        def run() -> None:
            try:
                ranks.run(Note(str(tmp_path / "notes"), "a", Fault.STOP), work)
            except BaseException as error:  # noqa: BLE001 - RankLost is one
                problems.append(error)

        engine = threading.Thread(target=run)
        engine.start()
        assert told.came.wait(60)
        wait.set()
        engine.join()
        assert told.reasons == ["rank 1 of 2 (s) has not done its part for 0.5 s (parallel.timeout); the replica ends"]
        assert isinstance(problems[0], RankLost)
        until_gone(ranks.pids)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("tests:unfit", r"rank 2 of 3 \(s\): rank 2 has no cuda:2"),
        ("tests:dies", r"rank 1 of 3 \(s\): .* ended with -9"),
    ],
)
def test_a_rank_that_cannot_load_fails_the_load_with_its_reason(how: str, reason: str) -> None:
    told = Told()
    with group(told, how=how) as ranks, pytest.raises(StartError, match=reason):
        ranks.meet()


def test_too_few_devices_for_the_ranks_are_refused_with_the_remedy() -> None:
    with pytest.raises(StartError, match=r"stage s: its ranks need 3 devices, and there are 2: .*--devices with 3"):
        Group(context(Told(), devices=2), ROLE)


LEADER = """
import sys
from tests.pipeline.test_ranks import Note, Told, Fault, context, ROLE
from stages.parallel.group import Group
ranks = Group(context(Told()), ROLE)
ranks.meet()
if sys.argv[1] == "busy":
    ranks.run(Note(sys.argv[2], "a", Fault.STOP), lambda: (print(*ranks.pids, flush=True), sys.stdin.read()))
print(*ranks.pids, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("state", ["idle", "busy"])
@pytest.mark.skipif(sys.platform != "linux", reason="a stopped process is ended by Linux alone")
def test_no_follower_outlives_a_leader_that_is_killed(tmp_path: Path, state: str) -> None:
    """Busy: one follower is stopped in the middle of a command, and could not even look whether its leader is there."""
    command = [sys.executable, "-c", LEADER, state, str(tmp_path / "notes")]
    leader = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert leader.stdout is not None
    pids = [int(one) for one in leader.stdout.readline().split()]
    assert len(pids) == 2
    if state == "busy":
        until(lambda: psutil.Process(pids[0]).status() == psutil.STATUS_STOPPED, "a stopped follower")
    leader.kill()
    leader.wait()
    leader.stdout.close()
    until_gone(pids)


def test_followers_leave_signals_to_their_leader(tmp_path: Path) -> None:
    told, file = Told(), str(tmp_path / "notes")
    with group(told, ranks=2) as ranks:
        ranks.meet()
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(ranks.pids[0], number)
        assert ranks.run(Note(file, "a"), lambda: 1) == 1
    assert told.reasons == []
