"""The output of nccl-tests, written by hand."""

from __future__ import annotations

HEADER = """\
# nThread 1 nGpus {gpus} minBytes 8 maxBytes 134217728 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1 graph: 0
#
# Using devices
{ranks}
NCCL version 2.27.3+cuda12.9
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
"""


ROWS = """\
           0             0     float     sum      -1     5.10    0.00    0.00      0     5.00    0.00    0.00      0
        1024           256     float     sum      -1    12.58    0.08    0.14      0     1.23    0.08    0.14      0
     1048576        262144     float     sum      -1    25.40   41.28   72.24    N/A     1.23   41.28   72.24    N/A
    67108864      16777216     float     sum      -1    410.0   163.7   286.5      0     1.23   163.7   286.5      0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 119.6
"""


def log(ranks: int = 8, hosts: int = 1, rows: str = ROWS, **replaced: str) -> str:
    each = ranks // hosts
    lines = [
        f"#  Rank {r:2} Group  0 Pid  30{r} on  host{r // each} device  {r % each} [0x07] H100" for r in range(ranks)
    ]
    text = HEADER.format(gpus=ranks, ranks="\n".join(lines)) + rows
    for old, new in replaced.items():
        assert old in text
        text = text.replace(old, new)
    return text
