"""A folder of temporary files that goes with its block, and also where the process is killed within it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# A process of nobody: reads until the one at the other end of the pipe is gone, however it ended. Files may still be
# written by ranks that end at the same moment, so it may take a second attempt.
_REMOVE = 'exec 3<&0; { read -r _ <&3; for _ in 1 2 3 4 5; do rm -rf -- "$0" && exit; sleep 1; done; } &'


@contextmanager
def scratch_folder(what: str) -> Iterator[Path]:
    """A new folder for temporary files, called rewriter-WHAT-… in the system's directory for them.

    A shell in a session of its own removes it where this process is killed: no signal to the job's group reaches that.
    """
    folder = tempfile.mkdtemp(prefix=f"rewriter-{what}-")
    try:
        with _removed_after_a_kill(folder):
            try:
                yield Path(folder)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _removed_after_a_kill(folder: str) -> Iterator[None]:
    reading, writing = os.pipe()  # neither is inherited by what this process starts
    try:
        with contextlib.suppress(OSError):  # a system without a shell: the block itself removes it
            words, null = ["/bin/sh", "-c", _REMOVE, folder], subprocess.DEVNULL
            subprocess.run(words, stdin=reading, stdout=null, stderr=null, start_new_session=True, check=False)
        os.close(reading)
        yield
    finally:
        os.close(writing)
