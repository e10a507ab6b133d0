"""Kernels that take the time and the place of a collective: its blocks, for its duration, moving its bytes of memory.

One launch of `hold_kernel` is one collective of an emulated job. Its first block to run asks for the links (`reserve`)
and sets when it begins; each block then stays until

    deadline = begin + delay + (the block's arrival − the first one's)

for a channel of NCCL does its share of the data however late its block found a multiprocessor. Blocks wait for
nothing but the first one, which runs: launches whose blocks do not all fit cannot wait for each other. No wait is
without a limit (`SPINS`, `LONGEST`), so that tables with wrong values cannot hang a device. Meanwhile each block
copies its share of the bytes, evenly over the delay, and it keeps so much shared memory that a multiprocessor has
room for one: a matrix product next to it loses as many of them as next to the real collective.

Times are nanoseconds of %globaltimer, int64. Tables are int64 on the device, so that what is captured in a CUDA graph
follows when they are changed:

    row    of the table of delays: delay, transfer, bytes, then LINKS indices of links (−1: none)
    free   of each link, until when it is taken
    state  of one launch: blocks that came, begin, the first block's arrival, blocks that left; zeros before and after
"""

import triton
import triton.language as tl

DELAY, TRANSFER, BYTES, FIRST_LINK = (tl.constexpr(i) for i in range(4))
CAME, BEGIN, FIRST, LEFT = (tl.constexpr(i) for i in range(4))
LINKS = 4  # at most, of one collective
ROW = 8  # of which the last is not used: rows are aligned alike
STATE = 4
WARPS = 16  # 512 threads, as NCCL's blocks have
TILE = 8192  # 4-byte words that a block copies at a time
SPINS = tl.constexpr(1 << 24)  # looks at what another block is to write: some ten seconds
LONGEST = tl.constexpr(20_000_000_000)  # nanoseconds that a block stays at most


@triton.jit
def clock():
    """Nanoseconds, the same on all multiprocessors."""
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def _read(place):
    """The value there now, whoever wrote it. No value in these tables is below −1."""
    return tl.atomic_max(place, -1)


@triton.jit
def reserve(row, free, lock, now, LINKS: tl.constexpr):
    """The time from `now` on at which all links of `row` are free; they are taken for its transfer from then on.

    Whatever waits for another access of memory takes most of a microsecond, and a collective may last five: what no
    other launch writes meanwhile is loaded at once, and only what is ordered is atomic and more than relaxed.
    """
    transfer = tl.load(row + TRANSFER)
    begin = now
    if tl.load(row + FIRST_LINK) >= 0:  # else there are none
        held = tl.atomic_cas(lock, tl.full((), 0, tl.int64), tl.full((), 1, tl.int64))
        spins = tl.full((), 0, tl.int32)
        while (held != 0) & (spins < SPINS):
            held = tl.atomic_cas(lock, tl.full((), 0, tl.int64), tl.full((), 1, tl.int64))
            spins += 1
        for i in tl.static_range(LINKS):
            link = tl.load(row + FIRST_LINK + i)
            begin = tl.maximum(begin, tl.load(free + link, mask=link >= 0, other=0, volatile=True))
        for i in tl.static_range(LINKS):
            link = tl.load(row + FIRST_LINK + i)
            tl.atomic_max(free + link, begin + transfer, mask=link >= 0, sem="relaxed")
        tl.atomic_xchg(lock, tl.full((), 0, tl.int64))
    return begin


@triton.jit
def arrive_kernel(row, free, lock, state, LINKS: tl.constexpr):
    """One block: the collective begins before its results are written, by kernels of others, and `hold_kernel` runs."""
    tl.atomic_xchg(state + BEGIN, reserve(row, free, lock, clock(), LINKS))


@triton.jit
def _scale(x, factor, elements, TILE: tl.constexpr):
    """x[:elements] *= factor, by all blocks together."""
    first = tl.program_id(0).to(tl.int64) * TILE
    step = tl.num_programs(0).to(tl.int64) * TILE
    while first < elements:
        at = first + tl.arange(0, TILE)
        value = tl.load(x + at, mask=at < elements).to(tl.float32) * factor
        if x.dtype.element_ty == tl.float16:  # finite, as the specification has it
            value = tl.minimum(tl.maximum(value, -65504.0), 65504.0)
        tl.store(x + at, value.to(x.dtype.element_ty), mask=at < elements)
        first += step


@triton.jit
def _keep_shared_memory(scratch):
    """Never called: operands of 2 × 64 KB, of which a multiprocessor has room for one pair."""
    rows, columns = tl.arange(0, 128), tl.arange(0, 256)
    half = scratch.to(tl.pointer_type(tl.float16))
    a = tl.load(half + rows[:, None] * 256 + columns[None, :])
    b = tl.load(half + columns[:, None] * 128 + rows[None, :])
    c = tl.dot(a, b)
    tl.store(scratch.to(tl.pointer_type(tl.float32)) + rows[:, None] * 128 + rows[None, :], c)


@triton.jit(do_not_specialize=["factor", "elements", "words"])
def hold_kernel(
    row,
    free,
    lock,
    state,
    x,
    factor,
    elements,
    scratch,
    words,
    ALONE: tl.constexpr,
    LINKS: tl.constexpr,
    TILE: tl.constexpr,
):
    """`blocks` programs, see the head of this file. ALONE: it is the whole collective, without `arrive_kernel`; it
    multiplies x[:elements] by `factor` in place, the sum over uniform ranks. scratch: int32 [2 · words], words a
    multiple of TILE, larger than the caches."""
    now = clock()
    delay, moving = tl.load(row + DELAY), tl.load(row + BYTES)
    came = tl.atomic_add(state + CAME, 1, sem="relaxed")
    first, begin = now, now
    if came == 0:
        if ALONE:
            begin = reserve(row, free, lock, now, LINKS)
            tl.atomic_xchg(state + BEGIN, begin, sem="relaxed")
        else:
            begin = _read(state + BEGIN)
        tl.atomic_xchg(state + FIRST, now)
    else:
        first = _read(state + FIRST)
        spins = tl.full((), 0, tl.int32)
        while (first == 0) & (spins < SPINS):
            first = _read(state + FIRST)
            spins += 1
        begin = _read(state + BEGIN)
    deadline = tl.minimum(begin + delay + (now - first), now + LONGEST)
    if ALONE:
        _scale(x, factor, elements, TILE)
    blocks = tl.num_programs(0).to(tl.int64)
    share = moving // blocks
    at = tl.arange(0, TILE)
    # where in the scratch: on from where the last collective was
    place = (now // 64 + tl.program_id(0) * (words // TILE // blocks)) % (words // TILE) * TILE
    moved = tl.full((), 0, tl.int64)
    time = clock()
    while time < deadline:
        if moved * delay < share * (time - begin):
            tl.store(scratch + words + place + at, tl.load(scratch + place + at))
            place = tl.where(place + TILE < words, place + TILE, 0)
            moved += 8 * TILE
        time = clock()
    if deadline < 0:
        _keep_shared_memory(scratch)
    left = tl.atomic_add(state + LEFT, 1, sem="relaxed")
    if left == blocks - 1:
        for i in tl.static_range(4):
            tl.store(state + i, 0)
