"""Standard streams that whoever started us has closed, as some supervisors do.

A socket or pipe would get a closed stream's number then, and libraries write to these numbers, or refuse to close them.
"""

import os
import sys


def open_those_that_are_closed() -> None:
    """To be called before anything else is opened. What would come from them or go to them is nothing."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115 - open for as long as the process runs
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
