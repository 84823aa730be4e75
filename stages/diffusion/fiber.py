"""A fiber: ordinary blocking code that another thread can stop and go on with, at the points that the code names.

A stock pipeline's `__call__` is one long function. Run in a fiber, it parks at each denoising step, and whoever resumes it
decides when the next one runs. Each fiber has a thread of its own, with a strict hand-off.

Invariant: of the resuming thread and its fibers' threads exactly one runs at any time. So code on either side needs no locks.

    created -> (resume) -> parked -> (resume) -> parked ... -> ended
                              `-> (abort) -> ended
"""

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

Note = TypeVar("Note")
Result = TypeVar("Result")


class FiberAborted(BaseException):
    """Raised inside an aborted fiber, where it parks. Not an `Exception`, so that a pipeline's own handlers let it pass."""


def _locked() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


class Fiber(Generic[Note, Result]):
    """Runs `body(park)` in its own thread. `park(note)` stops it there and hands `note` to whoever resumed it."""

    def __init__(self, name: str, body: Callable[[Callable[[Note], None]], Result]) -> None:
        self._body = body
        self._go = _locked()  # bare locks: half the cost of semaphores, and this is paid at every step
        self._back = _locked()
        self._hand_on: Callable[[], None] = self._back.release
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._aborting = False
        self._note: Note | None = None
        self._result: Result | None = None
        self._error: BaseException | None = None
        self._ended = False

    @property
    def ended(self) -> bool:
        return self._ended

    def resume(self) -> Note | None:
        """Run until the body parks (its note) or ends (None). Call from one thread only, and not after the end."""
        resume_all([self])
        return self._note

    @property
    def note(self) -> Note | None:
        """What it parked with; None after the end."""
        return self._note

    def result(self) -> Result:
        """What the body returned; raises what it raised. Once, and only after the end."""
        if not self._ended:
            raise RuntimeError(f"fiber {self._thread.name} has not ended")
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback holds the body's tensors, and this frame: end the circle
        return self._result  # type: ignore[return-value]  # the body has returned it, so it is a Result

    def abort(self) -> None:
        """End the fiber where it is parked. When this returns, its thread is gone. Harmless after the end."""
        if self._ended:
            return
        self._aborting = True
        if self._thread.ident is not None:
            self.resume()
        self._ended, self._error = True, FiberAborted()

    def _park(self, note: Note) -> None:
        if not self._aborting:
            self._note = note
            self._hand_on()
            self._go.acquire()
        if self._aborting:
            raise FiberAborted

    def _run(self) -> None:
        self._go.acquire()
        try:
            self._result = self._body(self._park)
        except BaseException as error:  # noqa: BLE001 - a fault boundary: result() raises it in the resuming thread
            self._error = error
        self._note = None
        self._ended = True
        self._hand_on()

    def _prepare(self, then: threading.Lock) -> None:
        if self._ended:
            raise RuntimeError(f"fiber {self._thread.name} has ended and cannot go on")
        self._note = None
        self._hand_on = then.release
        if self._thread.ident is None:
            self._thread.start()


def resume_all(fibers: Sequence[Fiber[Note, Result]]) -> None:
    """Resume one after the other. Each hands on to the next by itself, which takes half the thread switches of coming
    back in between."""
    if not fibers:
        return
    back = fibers[-1]._back
    for fiber, then in zip(fibers, [*(fiber._go for fiber in fibers[1:]), back], strict=True):
        fiber._prepare(then)
    fibers[0]._go.release()
    back.acquire()
    for fiber in fibers:
        if fiber._ended:
            fiber._thread.join()
