"""One forward under way in a thread of its own, while the engine's thread does what does not need its result.

PyTorch and the C library let go of Python's lock while they compute, so texts, reports and new requests are dealt with
meanwhile. Where both want the same cores nothing is won: SmolLM2-135M on two cores, 0.98 times the speed with one answer and
0.93 with 16; so only CUDA does it by default. At most one forward is under way; whoever changes what it reads (pages, tables, weights) calls `settle` first.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from stages.ar.runner import Output
from stages.ar.scheduler import Chunk

Landed = tuple[Sequence[Chunk], Output | Exception]


class Flight:
    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(
            1, thread_name_prefix="omni-forward", initializer=torch.set_num_threads, initargs=(torch.get_num_threads(),)
        )
        self._chunks: Sequence[Chunk] = ()
        self._future: Future[Output] | None = None

    @property
    def empty(self) -> bool:
        """Nothing is under way, and nothing has come that was not taken."""
        return self._future is None

    def launch(self, chunks: Sequence[Chunk], work: Callable[[], Output]) -> None:
        """Compute these chunks; nothing may be under way."""
        self._chunks, self._future = chunks, self._pool.submit(work)

    def settle(self) -> None:
        """Wait until nothing is being computed any more. What came can still be taken."""
        if self._future is not None:
            self._future.exception()

    def land(self) -> Landed:
        """Wait for what was launched, and take it. An error of the forward is given, not raised."""
        if self._future is None:
            raise RuntimeError("nothing was launched")
        future, self._future = self._future, None
        error = future.exception()
        if error is None:
            return self._chunks, future.result()
        if not isinstance(error, Exception):
            raise error
        return self._chunks, error

    def close(self) -> None:
        self._pool.shutdown(wait=True)
        self._future = None
