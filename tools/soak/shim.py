"""The library that lets system calls fail or kill: built where it is needed, and loaded into every process of the soak.

It can only be loaded when a process starts, so the soak starts itself again with it.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).with_name("shim.c")
FOREVER = 2**40
_PRELOAD, _NAME = "LD_PRELOAD", "soak-shim-"


def missing() -> str:
    """Why there is none in this process, in words; nothing where there is."""
    if sys.platform != "linux":
        return "system calls are caught by LD_PRELOAD, which this system has not"
    if not hasattr(ctypes.CDLL(None), "soak_arm"):
        return "no C compiler (cc) was found when the soak started"
    return ""


def variables(folder: Path) -> dict[str, str] | None:
    """The environment of a process that has it, built in `folder` where it is not there yet; None where it cannot be,
    or this process has it."""
    compiler, loaded = shutil.which("cc"), os.environ.get(_PRELOAD, "")
    if sys.platform != "linux" or compiler is None or _NAME in loaded:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    library = folder.resolve() / f"{_NAME}{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]}.so"
    if not library.exists():
        partial = library.with_suffix(f".{os.getpid()}")
        subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", partial, SOURCE, "-ldl"], check=True)
        partial.replace(library)
    return {**os.environ, _PRELOAD: " ".join(filter(None, [str(library), loaded]))}


def arm(directory: Path, first: int, times: int = 1, error: int = 0) -> None:
    """Count calls that change files below `directory` from now on, in this process. The `first` and the `times` - 1
    after it fail with `error` of errno, or kill the process where that is 0. `first` 0: only count."""
    values = (ctypes.c_long(first), ctypes.c_long(times), ctypes.c_int(error))
    ctypes.CDLL(None).soak_arm(os.fsencode(directory.resolve()), *values)


def count() -> int:
    """The calls since `arm`."""
    counted = ctypes.CDLL(None).soak_count
    counted.restype = ctypes.c_long
    return int(counted())
