import errno
import os
import threading
from pathlib import Path

import pytest

from rewriter.weights.sink import ALIGNMENT, O_DIRECT, Sink


@pytest.mark.skipif(not O_DIRECT, reason="O_DIRECT is Linux's")
def test_two_threads_may_meet_a_refused_direct_write_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both leave O_DIRECT; the later one must not take the earlier one's change for a failure of its own."""
    import fcntl

    real, both, seen = os.pwrite, threading.Barrier(2), threading.local()

    def refuse_first(fd: int, data: memoryview, offset: int) -> int:
        if not hasattr(seen, "refused"):
            seen.refused = True
            assert fcntl.fcntl(fd, fcntl.F_GETFL) & O_DIRECT
            both.wait(timeout=300)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", refuse_first)
    sink, failed = Sink(tmp_path / "a"), []

    def write(index: int) -> None:
        try:
            sink.write(memoryview(bytes([65 + index]) * ALIGNMENT), index * ALIGNMENT)
        except OSError as error:
            failed.append(error)

    threads = [threading.Thread(target=write, args=(i,)) for i in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    sink.finish(b"", 2 * ALIGNMENT)
    assert not failed
    assert (tmp_path / "a").read_bytes() == b"A" * ALIGNMENT + b"B" * ALIGNMENT
