"""Examples are packed into rows of one length, so that few tokens of a batch are padding."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# An example is tried on the rows that were opened last, so that packing takes time in proportion to the examples. A
# row that is left open longer than this has room for very short examples only.
OPEN_ROWS = 1024


def first_fit(sizes: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """The row of each example, int64 [examples]: the first open row that has room for it, else a new one.

    `sizes`, int64 [examples], are tokens, none more than `length`. Examples keep their order within a row, and rows
    come in the order of their first example, so the same file always makes the same rows.
    """
    rows = np.empty(len(sizes), np.int64)
    room = np.empty(len(sizes), np.int64)  # of every row made so far
    count = first_open = 0
    for index, size in enumerate(sizes.tolist()):
        fits = room[first_open:count] >= size
        offset = int(fits.argmax()) if len(fits) else 0
        row = first_open + offset
        if not len(fits) or not fits[offset]:
            row, count = count, count + 1
            room[row] = length
            first_open = max(first_open, count - OPEN_ROWS)
        room[row] -= size
        rows[index] = row
        while first_open < count and not room[first_open]:
            first_open += 1
    return rows
