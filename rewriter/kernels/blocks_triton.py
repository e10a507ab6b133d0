"""Device functions of block formats: what `rewriter.kernels.blocks` specifies, on tiles in registers.

A tile is K blocks of a row. It is held as a tuple of P parts [K, W], part p the elements p · W … p · W + W − 1 of each
block, with P and W such that the codes that share a byte lie at the same place of different parts: packing then is
arithmetic within a thread, and each byte of a plane is one of a tensor [K, W] that is stored as it is.

Kernels are compiled without contraction of products and sums: a code depends on the rounding of both.
"""

from itertools import pairwise

import triton
import triton.language as tl

from rewriter.kernels import blocks, formats

_SMALLEST_BITS = tl.constexpr(0x00800000)  # of the smallest normal fp32
_INFINITE_BITS = tl.constexpr(0x7F800000)
_LARGEST_SCALE = tl.constexpr(blocks.LARGEST_SCALE)
_NAN_SCALE = tl.constexpr(blocks.NAN_SCALE)
_SCALE_SHIFT = tl.constexpr(blocks.SCALE_SHIFT)
_SCALE_REST = tl.constexpr((1 << blocks.SCALE_SHIFT) - 1)
_SCALE_HALF = tl.constexpr((1 << (blocks.SCALE_SHIFT - 1)) - 1)
_FIT_STEPS = tl.constexpr(float(blocks.FIT_STEPS))
_FIT_BITS = tl.constexpr(blocks.FIT_STEPS.bit_length() - 1)
_GOLDEN = tl.constexpr(blocks.GOLDEN)

# Added to a number below 2**22 in magnitude it leaves the nearest integer, ties to even, in the lowest bits of the sum
_ROUND = tl.constexpr(12582912.0)
_ROUND_BITS = tl.constexpr(0x4B400000)
# An integer below 2**23 in the lowest bits of this is the number 2**23 + that integer
_INTEGER = tl.constexpr(8388608.0)
_INTEGER_BITS = tl.constexpr(0x4B000000)


# Indexed by the bits of a code
_PLANES = tl.constexpr(tuple(formats.PLANES.get(bits, ()) for bits in range(9)))
_CLIP = tl.constexpr(tuple(formats.CLIP.get(bits, 0.0) for bits in range(9)))
_FINITE_SCALE = tl.constexpr((0, 0, *(blocks.finite((1 << (bits - 1)) - 1) for bits in range(2, 9))))
# Levels above zero, and the thresholds between them
_LEVELS = tl.constexpr(tuple(tuple(map(float, formats.LLOYD_MAX.get(bits, ()))) for bits in range(9)))
_THRESHOLDS = tl.constexpr(
    tuple(tuple((a + b) / 256 for a, b in pairwise(formats.LLOYD_MAX.get(bits, ()))) for bits in range(9))
)


@triton.constexpr_function
def plane_count(planes):
    return len(planes)


@triton.constexpr_function
def mask_of(width):
    return (1 << width) - 1


@triton.constexpr_function
def shift_of(planes, i):
    """How many bits of a code lie in the planes before."""
    return sum(planes[:i])


@triton.constexpr_function
def half_of(BITS):
    """Half of the number of codes."""
    return 1 << (BITS - 1)


@triton.constexpr_function
def log2(P):
    return P.bit_length() - 1


@triton.constexpr_function
def partner(p, i):
    """The part that differs from p in bit i."""
    return p ^ (1 << i)


# --- hash ---


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


# --- rotation ---


@triton.jit
def _dot(x, h, INTERPRETED: tl.constexpr):
    """x [K, W] · h [W, W] in fp32."""
    if x.shape[1] < 16:  # narrower than a product of matrices may be; these are tiny blocks
        return tl.sum(x.to(tl.float32)[:, :, None] * h.to(tl.float32)[None, :, :], 1)
    if INTERPRETED:  # it multiplies the bits of bf16 as integers
        return tl.dot(x.to(tl.float32), h.to(tl.float32), input_precision="ieee")
    return tl.dot(x, h)


@triton.jit
def _high(x):
    """The upper 8 bits of mantissa of fp32 numbers, cut off: never infinite, and exact in bf16."""
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def signed(parts, P: tl.constexpr):
    """S x of each block: the bits of a hash are signs."""
    W: tl.constexpr = parts[0].shape[1]
    found = ()
    for p in tl.static_range(P):
        signs = ((_mix((tl.arange(0, W) + p * W).to(tl.uint32)) << 24) & 0x80000000)[None, :]
        x = parts[p]
        if x.dtype == tl.float32:
            found = found + ((x.to(tl.uint32, bitcast=True) ^ signs).to(tl.float32, bitcast=True),)
        else:
            found = found + ((x.to(tl.uint16, bitcast=True) ^ (signs >> 16).to(tl.uint16)).to(x.dtype, bitcast=True),)
    return found


@triton.jit
def rotate(parts, h, P: tl.constexpr, INTERPRETED: tl.constexpr):
    """H x of each block, fp32: by the matrix h, of ±1 or ±1/block, within parts, by sums and differences across them.

    16-bit numbers are multiplied as they are; fp32 ones in three parts of 8 bits of mantissa, which lose nothing.
    """
    y = ()
    for p in tl.static_range(P):
        x = parts[p]
        if x.dtype == tl.float32:
            high = _high(x)
            rest = x - high
            middle = _high(rest)
            low = rest - middle
            part = _dot(low.to(tl.bfloat16), h, INTERPRETED)
            part += _dot(middle.to(tl.bfloat16), h, INTERPRETED)
            part += _dot(high.to(tl.bfloat16), h, INTERPRETED)
        else:
            part = _dot(x, h, INTERPRETED)
        y = y + (part,)
    for i in tl.static_range(log2(P)):
        z = ()
        for p in tl.static_range(P):
            other = y[partner(p, i)]
            if partner(p, i) < p:
                z = z + (other - y[p],)
            else:
                z = z + (y[p] + other,)
        y = z
    return y


# --- scales of 16 bits ---


@triton.jit
def _bits(x):
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < _SMALLEST_BITS, 0, bits)


@triton.jit
def _rounded_up(x):
    return tl.minimum((_bits(x) + _SCALE_REST) >> _SCALE_SHIFT, _LARGEST_SCALE)


@triton.jit
def _rounded(x):
    bits = _bits(x)
    return tl.minimum((bits + _SCALE_HALF + ((bits >> _SCALE_SHIFT) & 1)) >> _SCALE_SHIFT, _LARGEST_SCALE)


@triton.jit
def decode_scales(scales):
    return (scales.to(tl.int32) << _SCALE_SHIFT).to(tl.float32, bitcast=True)


@triton.jit
def _reciprocal(x):
    return tl.where(x.to(tl.int32, bitcast=True) < _SMALLEST_BITS, 0.0, tl.div_rn(1.0, x))


# --- dither ---


@triton.jit
def block_starts(first, seed, K: tl.constexpr):
    """[K] of uint32 for the blocks first … first + K − 1 of a row."""
    mixed = _mix(tl.full((1,), 0, tl.uint32) + seed.to(tl.uint32))
    return _mix(tl.arange(0, K).to(tl.uint32) + first.to(tl.uint32) + mixed)


@triton.jit
def _offsets(starts, p: tl.constexpr, W: tl.constexpr):
    """[K, W] of part p. Seven bits of the hash are put behind the point of a number from 1 to 2."""
    e = (tl.arange(0, W) + p * W).to(tl.uint32)
    hashed = starts[:, None] + (e * _GOLDEN)[None, :]
    one = ((hashed >> 9) & 0x7F0000) | 0x3F800000
    return one.to(tl.float32, bitcast=True) - 1.49609375


# --- numbers to codes ---


@triton.jit
def _highest(parts, P: tl.constexpr):
    """The bits of the largest magnitude of each block [K]: integers are in the same order, and NaN is above all."""
    top = tl.abs(parts[0])
    for p in tl.static_range(1, P):
        top = tl.maximum(top, tl.abs(parts[p]), propagate_nan=tl.PropagateNan.ALL)
    return tl.max(top.to(tl.int32, bitcast=True), 1)


@triton.jit
def encode(
    parts,
    h,
    first,
    seed,
    BITS: tl.constexpr,
    ROTATED: tl.constexpr,
    DITHER: tl.constexpr,
    P: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """(codes, scales): P tensors int32 [K, W], whose higher bits are any, and [K] int32. h is ±1/block."""
    K: tl.constexpr = parts[0].shape[0]
    x = ()
    if ROTATED:
        parts = rotate(signed(parts, P), h, P, INTERPRETED)
    for p in tl.static_range(P):
        x = x + (parts[p].to(tl.float32),)
    top_bits = _highest(x, P)
    broken = top_bits >= _INFINITE_BITS
    top = tl.where(broken, 0, top_bits).to(tl.float32, bitcast=True)
    if DITHER:
        codes, scales = _dithered(x, top, broken, block_starts(first, seed, K), BITS, ROTATED, P)
    elif ROTATED and BITS < 4:
        codes, scales = _lloyd_max(x, top, broken, BITS, P)
    elif ROTATED or BITS == 2:
        codes, scales = _clipped(x, top, broken, BITS, P)
    else:
        codes, scales = _symmetric(x, top, broken, BITS, P)
    return codes, tl.where(broken, _NAN_SCALE, scales)


@triton.jit
def _times(x, broken, factor):
    """x · factor, and 0 in broken blocks."""
    return tl.where(broken[:, None], 0.0, x * factor[:, None])


@triton.jit
def _symmetric(x, top, broken, BITS: tl.constexpr, P: tl.constexpr):
    largest: tl.constexpr = half_of(BITS) - 1
    scales = tl.minimum(_rounded_up(top * (1.0 / largest)), _FINITE_SCALE[BITS])
    factor = _reciprocal(decode_scales(scales))
    codes = ()
    for p in tl.static_range(P):
        codes = codes + ((_times(x[p], broken, factor) + (_ROUND + (largest + 1))).to(tl.int32, bitcast=True),)
    return codes, scales


@triton.jit
def _dithered(x, top, broken, starts, BITS: tl.constexpr, ROTATED: tl.constexpr, P: tl.constexpr):
    W: tl.constexpr = x[0].shape[1]
    half: tl.constexpr = half_of(BITS)
    odd: tl.constexpr = ROTATED or BITS == 2
    if odd:
        scales = _rounded_up(top * (0.5 / (half - 0.5)))
        factor = _reciprocal(decode_scales(scales) * 2)
    else:
        scales = tl.minimum(_rounded_up(top * (1.0 / (half - 1))), _FINITE_SCALE[BITS])
        factor = _reciprocal(decode_scales(scales))
    codes = ()
    for p in tl.static_range(P):
        v = _times(x[p], broken, factor) + _offsets(starts, p, W)
        if odd:
            v = tl.clamp(tl.floor(v), -1.0 * half, half - 1.0)
        else:
            v = tl.clamp(v, 1.0 - half, half - 1.0)
        codes = codes + ((v + (_ROUND + half)).to(tl.int32, bitcast=True),)
    return codes, scales


@triton.jit
def _clipped(x, top, broken, BITS: tl.constexpr, P: tl.constexpr):
    half: tl.constexpr = half_of(BITS)
    step = top * (_CLIP[BITS] / half)
    factor = _reciprocal(step)
    codes = ()
    products = tl.zeros(x[0].shape, tl.float32)
    squares = tl.zeros(x[0].shape, tl.float32)
    for p in tl.static_range(P):
        # v + half in 1/256, an integer: what is above its eight lowest bits is the code
        v = tl.fma(_times(x[p], broken, factor), _FIT_STEPS, _ROUND + half * _FIT_STEPS)
        code = v.to(tl.int32, bitcast=True) >> _FIT_BITS
        code = tl.minimum(tl.maximum(code, _ROUND_BITS >> _FIT_BITS), (_ROUND_BITS >> _FIT_BITS) + (2 * half - 1))
        twice = (code * 2 + (_INTEGER_BITS - (_ROUND_BITS >> _FIT_BITS) * 2)).to(tl.float32, bitcast=True)
        odd = twice - (_INTEGER + (2 * half - 1))
        products = tl.fma(v - (_ROUND + half * _FIT_STEPS), odd, products)
        squares = tl.fma(odd, odd, squares)
        codes = codes + (code,)
    fit = tl.div_rn(tl.sum(products, 1) * (1 / _FIT_STEPS), tl.sum(squares, 1))
    return codes, _rounded(fit * step)


@triton.jit
def _lloyd_max(x, top, broken, BITS: tl.constexpr, P: tl.constexpr):
    half: tl.constexpr = half_of(BITS)
    factor = _reciprocal(top)
    v = ()
    squares = tl.zeros(x[0].shape, tl.float32)
    for p in tl.static_range(P):
        u = _times(x[p], broken, factor)
        squares = tl.fma(u, u, squares)
        v = v + (u,)
    # thresholds are brought to the numbers, which saves a product for each of these
    deviation = tl.sqrt_rn(tl.sum(squares, 1) * (1.0 / (P * x[0].shape[1])))[:, None]
    codes = ()
    products = tl.zeros(x[0].shape, tl.float32)
    squares = tl.zeros(x[0].shape, tl.float32)
    for p in tl.static_range(P):
        magnitude = tl.abs(v[p])
        if BITS == 2:
            far = magnitude > deviation * _THRESHOLDS[2][0]
            index = far.to(tl.int32)
            chosen = tl.where(far, _LEVELS[2][1], _LEVELS[2][0])
        else:
            far = magnitude > deviation * _THRESHOLDS[3][1]
            further = magnitude > tl.where(far, deviation * _THRESHOLDS[3][2], deviation * _THRESHOLDS[3][0])
            index = far.to(tl.int32) * 2 + further.to(tl.int32)
            chosen = tl.where(
                far, tl.where(further, _LEVELS[3][3], _LEVELS[3][2]), tl.where(further, _LEVELS[3][1], _LEVELS[3][0])
            )
        products = tl.fma(magnitude, chosen, products)
        squares = tl.fma(chosen, chosen, squares)
        codes = codes + (tl.where(v[p] < 0, half - 1 - index, half + index),)
    fit = tl.div_rn(tl.sum(products, 1), tl.sum(squares, 1))
    return codes, _rounded(fit * top)


# --- codes to numbers ---


@triton.jit
def levels(codes, starts, BITS: tl.constexpr, ROTATED: tl.constexpr, DITHER: tl.constexpr, P: tl.constexpr):
    """P tensors fp32 [K, W] of what a scale multiplies, before the rotation back."""
    W: tl.constexpr = codes[0].shape[1]
    half: tl.constexpr = half_of(BITS)
    odd: tl.constexpr = ROTATED or BITS == 2
    found = ()
    for p in tl.static_range(P):
        code = codes[p]
        if odd and (DITHER or BITS == 4 or not ROTATED):
            x = ((code * 2) | _INTEGER_BITS).to(tl.float32, bitcast=True) - (_INTEGER + (2 * half - 1))
        elif odd:
            # index of the level, counted from zero outwards
            index = tl.where(code < half, half - 1 - code, code - half)
            if BITS == 2:
                x = tl.where(index == 1, _LEVELS[2][1], _LEVELS[2][0])
            else:
                x = tl.where(
                    index > 1,
                    tl.where(index == 3, _LEVELS[3][3], _LEVELS[3][2]),
                    tl.where(index == 1, _LEVELS[3][1], _LEVELS[3][0]),
                )
            x = tl.where(code < half, -x, x)
        else:
            x = (code | _INTEGER_BITS).to(tl.float32, bitcast=True) - (_INTEGER + half)
        if DITHER:
            offsets = _offsets(starts, p, W)
            if odd:
                x -= offsets * 2
            else:
                x -= offsets
        found = found + (x,)
    return found


# --- bytes ---


@triton.jit
def _store_plane(
    plane,
    codes,
    first,
    left,
    WIDTH: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
    P: tl.constexpr,
    FULL: tl.constexpr,
):
    K: tl.constexpr = codes[0].shape[0]
    W: tl.constexpr = codes[0].shape[1]
    size: tl.constexpr = BLOCK * WIDTH // 8  # bytes of a block
    runs: tl.constexpr = P * WIDTH // 8  # of W bytes
    k = tl.arange(0, K)[:, None]
    at = plane + first * size + (k * size + tl.arange(0, W)[None, :])
    for t in tl.static_range(runs):
        packed = (codes[t] >> SHIFT) & mask_of(WIDTH)
        for j in tl.static_range(1, 8 // WIDTH):
            packed |= ((codes[t + j * runs] >> SHIFT) & mask_of(WIDTH)) << (j * WIDTH)
        if FULL:
            tl.store(at + t * W, packed.to(tl.uint8))
        else:
            tl.store(at + t * W, packed.to(tl.uint8), mask=k < left)


@triton.jit
def store_codes(
    row, codes, first, count, left, BITS: tl.constexpr, BLOCK: tl.constexpr, P: tl.constexpr, FULL: tl.constexpr
):
    """Into the planes of a payload's row (a pointer to bytes) of `count` blocks, those of the blocks first … ; of the
    tile's K there are only `left` where it is not FULL."""
    for i in tl.static_range(plane_count(_PLANES[BITS])):
        plane = row + count * (BLOCK * shift_of(_PLANES[BITS], i) // 8)
        _store_plane(plane, codes, first, left, _PLANES[BITS][i], shift_of(_PLANES[BITS], i), BLOCK, P, FULL)


@triton.jit
def _load_plane(
    plane,
    first,
    left,
    WIDTH: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
    K: tl.constexpr,
    P: tl.constexpr,
    FULL: tl.constexpr,
):
    W: tl.constexpr = BLOCK // P
    size: tl.constexpr = BLOCK * WIDTH // 8
    runs: tl.constexpr = P * WIDTH // 8
    k = tl.arange(0, K)[:, None]
    at = plane + first * size + (k * size + tl.arange(0, W)[None, :])
    packed = ()
    for t in tl.static_range(runs):
        if FULL:
            packed = packed + (tl.load(at + t * W).to(tl.int32),)
        else:
            packed = packed + (tl.load(at + t * W, mask=k < left, other=0).to(tl.int32),)
    codes = ()
    for p in tl.static_range(P):
        codes = codes + (((packed[p % runs] >> (p // runs * WIDTH)) & mask_of(WIDTH)) << SHIFT,)
    return codes


@triton.jit
def load_codes(
    row,
    first,
    count,
    left,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    K: tl.constexpr,
    P: tl.constexpr,
    FULL: tl.constexpr,
):
    """What `store_codes` stored: P tensors int32 [K, W]."""
    codes = _load_plane(row, first, left, _PLANES[BITS][0], 0, BLOCK, K, P, FULL)
    for i in tl.static_range(1, plane_count(_PLANES[BITS])):
        plane = row + count * (BLOCK * shift_of(_PLANES[BITS], i) // 8)
        more = _load_plane(plane, first, left, _PLANES[BITS][i], shift_of(_PLANES[BITS], i), BLOCK, K, P, FULL)
        whole = ()
        for p in tl.static_range(P):
            whole = whole + (codes[p] | more[p],)
        codes = whole
    return codes


@triton.jit
def scales_of(row, first, count, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Where the scale of the block `first` lies in a payload's row."""
    return (row + count * (BLOCK * BITS // 8)).to(tl.pointer_type(tl.uint16)) + first
