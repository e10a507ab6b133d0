"""Device functions of block formats: what `rewriter.kernels.blocks` specifies, on tiles in registers.

A tile is K blocks of a row. It is held as a tuple of P parts [K, W], part p the elements p · W … p · W + W − 1 of each
block, with P and W such that the codes that share a byte stand at the same place of different parts: packing then is
arithmetic within a thread, and each byte of a plane is one of a tensor [K, W] that is stored as it is.

T: the `Tile` that a kernel is compiled for. FULL: all K blocks are there, so that nothing is masked. Kernels are
compiled without contraction of products and sums: a code depends on the rounding of both.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from rewriter.kernels import blocks
from rewriter.kernels.formats import Format

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
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
_DITHER_STEPS = tl.constexpr(blocks.DITHER_STEPS)
_DITHER_SHIFT = tl.constexpr(blocks.DITHER_SHIFT)

# Added to a number below 2**22 in magnitude it leaves the nearest integer, ties to even, in the lowest bits of the sum
_ROUND = tl.constexpr(12582912.0)
_ROUND_BITS = tl.constexpr(0x4B400000)
# An integer below 2**23 in the lowest bits of this is the number 2**23 + that integer
_INTEGER = tl.constexpr(8388608.0)
_INTEGER_BITS = tl.constexpr(0x4B000000)


@dataclass(frozen=True)
class Tile:
    """The constants of a kernel: K blocks of `format` in P parts, and whether codes are dithered."""

    format: Format
    K: int
    P: int
    dithered: bool

    @property
    def width(self) -> int:
        """Elements of a part: W."""
        return self.format.block // self.P

    @property
    def finite_scale(self) -> int:
        """The largest scale whose product with the largest level is finite."""
        return blocks.finite(self.format.largest)


@triton.constexpr_function
def length(values):
    return len(values)


@triton.constexpr_function
def log2(P):
    return P.bit_length() - 1


@triton.constexpr_function
def partner(p, i):
    """The part that differs from p in bit i."""
    return p ^ (1 << i)


# --- rotation ---


@triton.jit
def _dot(x, h):
    """x [K, W] · h [W, W] in fp32."""
    if x.shape[1] < 16:  # narrower than a product of matrices may be; these are tiny blocks
        return tl.sum(x.to(tl.float32)[:, :, None] * h.to(tl.float32)[None, :, :], 1)
    if _INTERPRETED:  # it multiplies the bits of bf16 as integers
        return tl.dot(x.to(tl.float32), h.to(tl.float32), input_precision="ieee")
    return tl.dot(x, h)


@triton.jit
def _high(x):
    """The upper 8 bits of mantissa of fp32 numbers, cut off: never infinite, and exact in bf16."""
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _product(x, h):
    """x [K, W] · h [W, W] in fp32: 16-bit numbers as they are, fp32 ones in three parts of 8 bits of mantissa, which
    lose nothing."""
    if x.dtype == tl.float32:
        high = _high(x)
        rest = x - high
        middle = _high(rest)
        low = rest - middle
        y = _dot(low.to(tl.bfloat16), h)
        y += _dot(middle.to(tl.bfloat16), h)
        y += _dot(high.to(tl.bfloat16), h)
    else:
        y = _dot(x, h)
    return y


@triton.jit
def _matrix(h, p: tl.constexpr, T: tl.constexpr):
    W: tl.constexpr = T.width
    return tl.load(h + p * W * W + (tl.arange(0, W)[:, None] * W + tl.arange(0, W)[None, :]))


@triton.jit
def _across(parts, T: tl.constexpr):
    """Sums and differences across parts: with products within them, all of H x."""
    P: tl.constexpr = T.P
    y = parts
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


@triton.jit
def rotate(parts, h, T: tl.constexpr, BACK: tl.constexpr):
    """H S x of each block, fp32. h [P, W, W]: for each part a matrix of ±1/block with the signs S of its elements.

    BACK: H x, which `signed` completes: the signs of what a part becomes fit no matrix of a part, a sum over all
    of them. h [W + P, W]: a matrix of ±1, and all signs after it.
    """
    P: tl.constexpr = T.P
    y = ()
    for p in tl.static_range(P):
        y = y + (_product(parts[p], _matrix(h, 0 if BACK else p, T)),)
    return _across(y, T)


@triton.jit
def signed(parts, h, T: tl.constexpr):
    """S x of each block, with the signs at the h of `rotate` BACK: an exclusive or of sign bits, of two 16-bit numbers
    at once."""
    P: tl.constexpr = T.P
    W: tl.constexpr = T.width
    y = ()
    for p in tl.static_range(P):
        ones = tl.load(h + (W + p) * W + tl.arange(0, W))
        signs = (ones.to(tl.uint16, bitcast=True) & 0x8000)[None, :]
        x = parts[p]
        if x.dtype == tl.float32:
            bits = x.to(tl.uint32, bitcast=True) ^ (signs.to(tl.uint32) << 16)
        else:
            bits = x.to(tl.uint16, bitcast=True) ^ signs
        y = y + (bits.to(x.dtype, bitcast=True),)
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
def _mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def block_starts(first, seed, T: tl.constexpr):
    """[K] of uint32 for the blocks first … first + K − 1 of a row."""
    K: tl.constexpr = T.K
    mixed = _mix(tl.full((1,), 0, tl.uint32) + seed.to(tl.uint32))
    return _mix(tl.arange(0, K).to(tl.uint32) + first.to(tl.uint32) + mixed)


@triton.jit
def _offsets(starts, unit: tl.constexpr, p: tl.constexpr, T: tl.constexpr):
    """[K, W] of part p, times `unit`. Seven bits of the hash, where they stand, are a denormal number."""
    W: tl.constexpr = T.width
    e = (tl.arange(0, W) + p * W).to(tl.uint32)
    hashed = starts[:, None] + (e * _GOLDEN)[None, :]
    bits = hashed & ((_DITHER_STEPS - 1) << _DITHER_SHIFT)
    steps: tl.constexpr = unit / _DITHER_STEPS
    denormal: tl.constexpr = 2.0 ** (149 - _DITHER_SHIFT)
    return tl.fma(bits.to(tl.float32, bitcast=True), steps * denormal, steps * (0.5 - _DITHER_STEPS / 2))


# --- numbers to codes ---


@triton.jit
def _highest(parts, T: tl.constexpr):
    """The bits of the largest magnitude of each block [K]: integers are in the same order, and NaN is above all."""
    P: tl.constexpr = T.P
    top = tl.abs(parts[0])
    for p in tl.static_range(1, P):
        top = tl.maximum(top, tl.abs(parts[p]), propagate_nan=tl.PropagateNan.ALL)
    return tl.max(top.to(tl.int32, bitcast=True), 1)


@triton.jit
def encode(parts, h, first, seed, T: tl.constexpr):
    """(codes, scales): P tensors int32 [K, W], whose higher bits are any, and [K] int32; codes of blocks that are not
    finite are any. h: see `rotate`."""
    P: tl.constexpr = T.P
    x = ()
    if T.format.rotated:
        parts = rotate(parts, h, T, False)
    for p in tl.static_range(P):
        x = x + (parts[p].to(tl.float32),)
    top_bits = _highest(x, T)
    broken = top_bits >= _INFINITE_BITS
    top = tl.where(broken, 0, top_bits).to(tl.float32, bitcast=True)
    if T.dithered:
        codes, scales = _dithered(x, top, block_starts(first, seed, T), T)
    elif T.format.lloyd_max:
        codes, scales = _lloyd_max(x, top, T)
    elif T.format.odd:
        codes, scales = _clipped(x, top, T)
    else:
        codes, scales = _symmetric(x, top, T)
    return codes, tl.where(broken, _NAN_SCALE, scales)


@triton.jit
def _e4m3(v):
    """Codes: sign, 4 bits of exponent from 7, 3 of mantissa. Below 2**-6, the smallest normal, multiples of 2**-9."""
    bits = v.to(tl.int32, bitcast=True)
    normal = (bits + ((1 << 19) - 1 - ((127 - 7) << 23)) + ((bits >> 20) & 1)) >> 20
    small = (tl.abs(v) + 2.0**14).to(tl.int32, bitcast=True)
    code = tl.where(tl.abs(v) < 2.0**-6, small, normal)
    return (code & 0x7F) | ((bits >> 24) & 0x80)


@triton.jit
def _symmetric(x, top, T: tl.constexpr):
    P: tl.constexpr = T.P
    largest: tl.constexpr = T.format.largest
    scales = tl.minimum(_rounded_up(top * (1.0 / largest)), T.finite_scale)
    factor = _reciprocal(decode_scales(scales))
    codes = ()
    for p in tl.static_range(P):
        v = x[p] * factor[:, None]
        if T.format.floating:
            codes = codes + (_e4m3(v),)
        else:
            codes = codes + ((v + (_ROUND + (largest + 1))).to(tl.int32, bitcast=True),)
    return codes, scales


@triton.jit
def _dithered(x, top, starts, T: tl.constexpr):
    P: tl.constexpr = T.P
    half: tl.constexpr = T.format.half
    if T.format.odd:
        scales = _rounded_up(top * (0.5 / (half - 0.5)))
        factor = _reciprocal(decode_scales(scales) * 2)
    else:
        scales = tl.minimum(_rounded_up(top * (1.0 / (half - 1))), T.finite_scale)
        factor = _reciprocal(decode_scales(scales))
    codes = ()
    for p in tl.static_range(P):
        v = x[p] * factor[:, None] + _offsets(starts, 1.0, p, T)
        if T.format.odd:
            v = tl.floor(v)  # from −half to half − 1: scales are rounded up
        else:
            v = tl.clamp(v, 1.0 - half, half - 1.0)
        codes = codes + ((v + (_ROUND + half)).to(tl.int32, bitcast=True),)
    return codes, scales


@triton.jit
def _clipped(x, top, T: tl.constexpr):
    P: tl.constexpr = T.P
    half: tl.constexpr = T.format.half
    clip: tl.constexpr = T.format.clip
    step = top * (clip / half)
    factor = _reciprocal(step)
    codes = ()
    products = tl.zeros(x[0].shape, tl.float32)
    squares = tl.zeros(x[0].shape, tl.float32)
    for p in tl.static_range(P):
        # v + half in 1/256, an integer: what is above its eight lowest bits is the code
        v = tl.fma(x[p] * factor[:, None], _FIT_STEPS, _ROUND + half * _FIT_STEPS)
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
def _level(far, further, T: tl.constexpr):
    """A Lloyd-Max level above zero: of the upper half of them where `far`, the upper one of two where `further`."""
    level = tl.where(further, T.format.positive_levels[1], T.format.positive_levels[0])
    if T.format.bits > 2:  # no early return: Triton would compile what follows it
        upper = tl.where(further, T.format.positive_levels[3], T.format.positive_levels[2])
        level = tl.where(far, upper, level)
    return level


@triton.jit
def _lloyd_max(x, top, T: tl.constexpr):
    P: tl.constexpr = T.P
    half: tl.constexpr = T.format.half
    factor = _reciprocal(top)
    v = ()
    squares = tl.zeros(x[0].shape, tl.float32)
    for p in tl.static_range(P):
        u = x[p] * factor[:, None]
        squares = tl.fma(u, u, squares)
        v = v + (u,)
    # thresholds are brought to the numbers, which saves a product for each of these
    deviation = tl.sqrt_rn(tl.sum(squares, 1) * (1.0 / (P * x[0].shape[1])))[:, None]
    codes = ()
    products = tl.zeros(x[0].shape, tl.float32)
    squares = tl.zeros(x[0].shape, tl.float32)
    for p in tl.static_range(P):
        magnitude = tl.abs(v[p])
        if T.format.bits == 2:
            further = magnitude > deviation * T.format.thresholds[0]
            far = further
            index = further.to(tl.int32)
        else:
            far = magnitude > deviation * T.format.thresholds[1]
            threshold = tl.where(far, deviation * T.format.thresholds[2], deviation * T.format.thresholds[0])
            further = magnitude > threshold
            index = far.to(tl.int32) * 2 + further.to(tl.int32)
        chosen = _level(far, further, T)
        products = tl.fma(magnitude, chosen, products)
        squares = tl.fma(chosen, chosen, squares)
        codes = codes + (tl.where(v[p] < 0, half - 1 - index, half + index),)
    fit = tl.div_rn(tl.sum(products, 1), tl.sum(squares, 1))
    return codes, _rounded(fit * top)


# --- codes to numbers ---


@triton.jit
def levels(codes, starts, T: tl.constexpr):
    """P tensors fp32 [K, W] of what a scale multiplies, before the rotation back."""
    P: tl.constexpr = T.P
    half: tl.constexpr = T.format.half
    numbers = ()
    for p in tl.static_range(P):
        code = codes[p]
        if T.format.floating:  # the bits of an fp32, whose exponent counts from 127 instead of 7
            x = (((code & 0x80) << 24) | ((code & 0x7F) << 20)).to(tl.float32, bitcast=True) * 2.0**120
        elif T.format.odd:
            x = ((code * 2) | _INTEGER_BITS).to(tl.float32, bitcast=True) - (_INTEGER + (2 * half - 1))
        else:
            x = (code | _INTEGER_BITS).to(tl.float32, bitcast=True) - (_INTEGER + half)
        if T.dithered:
            x -= _offsets(starts, 2.0 if T.format.odd else 1.0, p, T)
        elif T.format.lloyd_max:
            index = tl.where(code < half, half - 1 - code, code - half)  # of the level, counted from zero outwards
            x = _level(index > 1, (index & 1) == 1, T)
            x = tl.where(code < half, -x, x)
        numbers = numbers + (x,)
    return numbers


# --- bytes ---


@triton.jit
def load(at, here, FULL: tl.constexpr):
    """Load these places; zeros where they are not `here`, unless all are (FULL)."""
    if FULL:
        x = tl.load(at)
    else:
        x = tl.load(at, mask=here, other=0)
    return x


@triton.jit
def store(at, x, here, FULL: tl.constexpr):
    if FULL:
        tl.store(at, x)
    else:
        tl.store(at, x, mask=here)


@triton.jit
def _plane(row, first, count, i: tl.constexpr, T: tl.constexpr):
    """Places of the bytes of the blocks first … in plane i of a payload's row of `count` blocks."""
    K: tl.constexpr = T.K
    W: tl.constexpr = T.width
    block: tl.constexpr = T.format.block
    size: tl.constexpr = block * T.format.planes[i] // 8
    plane = row + count * (block * T.format.shifts[i] // 8)
    return plane + first * size + (tl.arange(0, K)[:, None] * size + tl.arange(0, W)[None, :])


@triton.jit
def _store_plane(row, codes, scales, first, count, left, i: tl.constexpr, T: tl.constexpr, FULL: tl.constexpr):
    K: tl.constexpr = T.K
    W: tl.constexpr = T.width
    width: tl.constexpr = T.format.planes[i]
    shift: tl.constexpr = T.format.shifts[i]
    mask: tl.constexpr = (1 << width) - 1
    runs: tl.constexpr = T.P * width // 8  # of W bytes
    at = _plane(row, first, count, i, T)
    kept = tl.where(scales == _NAN_SCALE, 0, -1)[:, None]
    for t in tl.static_range(runs):
        packed = (codes[t] >> shift) & mask
        for j in tl.static_range(1, 8 // width):
            packed |= ((codes[t + j * runs] >> shift) & mask) << (j * width)
        store(at + t * W, (packed & kept).to(tl.uint8), tl.arange(0, K)[:, None] < left, FULL)


@triton.jit
def store_codes(row, codes, scales, first, count, left, T: tl.constexpr, FULL: tl.constexpr):
    """Into the planes of a payload's row (a pointer to bytes) of `count` blocks, those of the blocks first … ; of the
    tile's K there are only `left` where it is not FULL. Where a scale is NaN, zeros."""
    for i in tl.static_range(length(T.format.planes)):
        _store_plane(row, codes, scales, first, count, left, i, T, FULL)


@triton.jit
def _load_plane(row, first, count, left, i: tl.constexpr, T: tl.constexpr, FULL: tl.constexpr):
    K: tl.constexpr = T.K
    P: tl.constexpr = T.P
    W: tl.constexpr = T.width
    width: tl.constexpr = T.format.planes[i]
    runs: tl.constexpr = P * width // 8
    at = _plane(row, first, count, i, T)
    packed = ()
    for t in tl.static_range(runs):
        packed = packed + (load(at + t * W, tl.arange(0, K)[:, None] < left, FULL).to(tl.int32),)
    codes = ()
    for p in tl.static_range(P):
        codes = codes + (((packed[p % runs] >> (p // runs * width)) & ((1 << width) - 1)) << T.format.shifts[i],)
    return codes


@triton.jit
def load_codes(row, first, count, left, T: tl.constexpr, FULL: tl.constexpr):
    """The reverse of `store_codes`: P tensors int32 [K, W]."""
    P: tl.constexpr = T.P
    codes = _load_plane(row, first, count, left, 0, T, FULL)
    for i in tl.static_range(1, length(T.format.planes)):
        more = _load_plane(row, first, count, left, i, T, FULL)
        both = ()
        for p in tl.static_range(P):
            both = both + (codes[p] | more[p],)
        codes = both
    return codes


@triton.jit
def scales_of(row, first, count, T: tl.constexpr):
    """The place of the scale of the block `first` in a payload's row."""
    return (row + count * T.format.block_bytes).to(tl.pointer_type(tl.uint16)) + first
