"""The C library: found in a cache folder, or compiled there from the sources beside this file (two seconds, once).

It is compiled on the machine where it runs, for its processor, by the compiler that is there (`$CC`, `cc`, `gcc`,
`clang`); without one there is no library, and the stage says so and computes with PyTorch. It runs in PyTorch's own
OpenMP threads, which both find under one name. Its structs are mirrored here, and their sizes are compared when it loads.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

import torch

from stages.demo.models import cache_root

SOURCES: Final = ("decode.c", "draw.h", "layers.h", "matrix.h", "vector.h")
FLAGS: Final = ("-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-Wno-psabi", "-shared", "-fPIC", "-w")

_I64, _I32, _F32, _AT = ctypes.c_int64, ctypes.c_int32, ctypes.c_float, ctypes.c_void_p


class Matrix(ctypes.Structure):
    _fields_ = (("data", _AT), ("bias", _AT), ("n", _I64), ("k", _I64))


class Layer(ctypes.Structure):
    _fields_ = (
        *((name, Matrix) for name in ("qkv", "out", "gate_up", "down")),
        *((name, _AT) for name in ("norm1", "norm2", "q_norm", "k_norm", "keys", "values")),
        ("scale", _F32),
        ("window", _I32),
    )


class Model(ctypes.Structure):
    _fields_ = (
        ("head", Matrix),
        *((name, _AT) for name in ("norm", "cosines", "sines")),
        ("layers", ctypes.POINTER(Layer)),
        *((name, _I64) for name in ("count", "hidden", "heads", "kv_heads", "head_size", "rotary", "inner", "page")),
        ("eps", _F32),
        ("bf16", _I32),
        ("gelu", _I32),
    )


class Step(ctypes.Structure):
    _fields_ = (
        *((name, _AT) for name in ("x", "positions", "tables")),
        ("rows", _I64),
        ("width", _I64),
        ("logits", _AT),
    )


class Rule(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_double) for name in ("uniform", "top_p", "min_p")),
        ("temperature", _F32),
        ("top_k", _I32),
    )


class Unavailable(Exception):
    """Why there is no library here, in words."""


@functools.cache
def library() -> ctypes.CDLL:
    """Compiled and found. Raises `Unavailable`."""
    compiler = next((path for one in _compilers() if (path := shutil.which(one))), None)
    if compiler is None:
        raise Unavailable("there is no C compiler (cc, gcc or clang)")
    try:
        found = ctypes.CDLL(str(_compiled(compiler)))
    except OSError as error:
        raise Unavailable(f"the compiled library cannot be loaded: {error}") from error
    for which, mirrored in enumerate((Model, Layer, Step, Rule)):
        if found.omni_sizes(which) != ctypes.sizeof(mirrored):
            raise Unavailable(f"the compiler lays {mirrored.__name__} out in another way")
    found.omni_decode.argtypes = (ctypes.POINTER(Model), ctypes.POINTER(Step), ctypes.c_int)
    found.omni_pack.argtypes = (_AT, _AT, _I64, _I64, _I32)
    found.omni_pack.restype = None
    found.omni_draw.argtypes = (_AT, _I32, _I64, _I64, _I64, _AT, _I64, _AT, _AT, ctypes.c_int)
    return found


def loaded() -> ctypes.CDLL | None:
    """The library, if somebody has loaded it already."""
    return library() if library.cache_info().currsize else None


def _compilers() -> tuple[str, ...]:
    own = os.environ.get("CC")
    return (own,) if own else ("cc", "gcc", "clang")


def _compiled(compiler: str) -> Path:
    """The library's file; its name covers everything that it depends on."""
    here = Path(__file__).parent
    flags = (*FLAGS, "-fopenmp")
    parts = [compiler, *flags, _processor(), torch.__version__, *((here / one).read_text() for one in SOURCES)]
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    target = cache_root() / "native" / f"decode-{name}.so"
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        command = [compiler, *flags, "-o", str(made), str(here / SOURCES[0]), "-lm"]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode:
            last = (run.stderr.strip().splitlines() or ["no words"])[-1]
            raise Unavailable(f"{compiler} cannot compile the library: {last}")
        made.replace(target)
    return target


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return "".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
