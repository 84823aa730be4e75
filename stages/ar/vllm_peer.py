"""vLLM itself: the only place that imports it. Its asyncio loop runs in a thread of its own; results come out of a queue.

A venv with vLLM has releases of torch and transformers of vLLM's choosing, so nothing else of the AR stage that is imported
together with this may need more of them than a tokenizer and a config.

Invariants: everything of vLLM runs in the loop's thread. After `stop` that thread and vLLM's processes are gone. They are
gone too if this process is killed: a shell waits for the end of a pipe that only this process holds, and then kills them.
"""

import asyncio
import importlib
import os
import subprocess
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Final, Protocol, TypeVar

Answer = TypeVar("Answer")

SETTINGS: Final = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the stage's own number of threads, on any core
}
"""Environment that vLLM gets unless the deploy's `env` says otherwise."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `prompt` as vLLM takes it; `sampling` and `form` as `stages.ar.vllm_params` gives them."""

    key: str
    prompt: Mapping[str, object]
    sampling: Mapping[str, object]
    form: Mapping[str, object]
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Came:
    """vLLM's `RequestOutput`: what is new since the one before."""

    key: str
    output: Any


@dataclass(frozen=True, slots=True)
class Refused:
    """vLLM raised for this request. `fatal`: it will not answer any other either; `bad`: the request is at fault."""

    key: str
    error: str
    bad: bool = False
    fatal: bool = False


class Peer(Protocol):
    """What the engine needs of vLLM; tests put something else there."""

    results: SimpleQueue[Came | Refused]

    def start(self, arguments: Mapping[str, object], waiting: Callable[[], None]) -> int:
        """Load; the context's length. `waiting` is called every few seconds. Raises what vLLM raises."""
        ...

    def ask(self, ask: Ask) -> None: ...

    def drop(self, key: str) -> None: ...

    def forget_prefixes(self) -> bool: ...

    def stop(self) -> None: ...


class VllmPeer:
    """See `Peer`."""

    def __init__(self) -> None:
        self.results: SimpleQueue[Came | Refused] = SimpleQueue()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True)
        self._engine: Any = None
        self._tasks: dict[str, Future[None]] = {}
        self._guard: subprocess.Popen[bytes] | None = None

    def start(self, arguments: Mapping[str, object], waiting: Callable[[], None]) -> int:
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)
        self._thread.start()
        loading = asyncio.run_coroutine_threadsafe(self._load(arguments), self._loop)
        while True:
            try:
                length = loading.result(5)
                self._guard = _guard()
                return length
            except TimeoutError:
                if loading.done():
                    raise
                waiting()

    def ask(self, ask: Ask) -> None:
        self._tasks[ask.key] = asyncio.run_coroutine_threadsafe(self._follow(ask), self._loop)

    def drop(self, key: str) -> None:
        task = self._tasks.pop(key, None)
        if task is not None:
            task.cancel()  # vLLM aborts a request whose iteration is cancelled

    def forget_prefixes(self) -> bool:
        return bool(self._wait(lambda: self._engine.reset_prefix_cache()))

    def stop(self) -> None:
        if not self._thread.is_alive():
            return
        if self._engine is not None:
            self._wait(self._shut)
        if self._guard is not None:
            self._guard.communicate()  # whatever is left of them
            self._guard = None
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._engine = None

    # --- in the loop's thread -----------------------------------------------------------------------------------------

    async def _load(self, arguments: Mapping[str, object]) -> int:
        arg_utils = importlib.import_module("vllm.engine.arg_utils")
        async_llm = importlib.import_module("vllm.v1.engine.async_llm")
        known = set(arg_utils.AsyncEngineArgs.__dataclass_fields__)
        strange = sorted(set(arguments) - known)
        if strange:
            raise ValueError(f"engine.options names {strange[0]!r}, which is none of vLLM's engine arguments")
        self._engine = async_llm.AsyncLLM.from_engine_args(arg_utils.AsyncEngineArgs(**arguments))
        return int(self._engine.vllm_config.model_config.max_model_len)

    async def _follow(self, ask: Ask) -> None:
        params = importlib.import_module("vllm.sampling_params")
        errors = importlib.import_module("vllm.v1.engine.exceptions")
        try:
            given = dict(ask.sampling)
            if ask.form:
                given["structured_outputs"] = params.StructuredOutputsParams(**ask.form)
            sampling = params.SamplingParams(**given, output_kind=params.RequestOutputKind.DELTA)
            async for output in self._engine.generate(dict(ask.prompt), sampling, ask.key, priority=-ask.priority):
                self.results.put(Came(ask.key, output))
        except asyncio.CancelledError:
            raise
        except errors.EngineDeadError as error:
            self.results.put(Refused(ask.key, f"vLLM's engine has ended: {error}", fatal=True))
        except ValueError as error:
            self.results.put(Refused(ask.key, str(error), bad=True))
        except Exception as error:  # noqa: BLE001  # the fault boundary of one request
            self.results.put(Refused(ask.key, f"{type(error).__name__}: {error}"))
        finally:
            self._tasks.pop(ask.key, None)

    async def _shut(self) -> None:
        self._engine.shutdown(timeout=1)

    def _wait(self, work: Callable[[], Awaitable[Answer]]) -> Answer:
        async def run() -> Answer:
            return await work()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(60)


def _guard() -> "subprocess.Popen[bytes]":
    """Kills all processes that this one has started so far, as soon as its standard input ends."""
    psutil = importlib.import_module("psutil")
    children = [str(one.pid) for one in psutil.Process().children(recursive=True)]
    command = ["sh", "-c", 'cat >/dev/null; kill -9 "$@" 2>/dev/null', "sh", *children]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
