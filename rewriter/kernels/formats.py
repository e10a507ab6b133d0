"""Block formats of quantized messages: their names, their levels and the order of their bytes.

A row of n elements is cut into blocks of `block` consecutive ones, the last padded with zeros. A block is a code of
`bits` bits per element and a scale; an element is its code's level, a number, times the scale.

    int8, int6, int4    levels −q … q, q = 2^(bits−1) − 1; scale = largest magnitude / q, so that zero stays zero and
                        nothing saturates
    fp8                 the levels of E4M3 (OCP 8-bit floating point), 4 bits of exponent and 3 of mantissa up to ±448 =
                        q, and the scale likewise: finer near zero and coarser at the top than int8. Never dithered
    int2                the four odd levels −3 … 3, clipped at 0.7 of the largest magnitude (three levels about zero
                        would leave a fourth of the codes unused and err by half as much again)
    …-hadamard          the block rotated by H S/√block first, H a Hadamard matrix and S random signs, which spreads
                        outliers over all its elements (SDP4Bit, arXiv 2410.15526; QuIP#, arXiv 2402.04396).
                        int4: the 16 odd levels −15 … 15, clipped at 0.95 of the largest; int3, int2: the Lloyd-Max
                        levels of a normal distribution, in 1/128 of the standard deviation

Scales of clipped and Lloyd-Max formats are fitted once more by least squares after codes are chosen. With dither all
levels are uniform and nothing is clipped, since the mean of what arrives must be the mean of what was sent.

A row of a payload holds the codes of all blocks, plane by plane, then all scales, then zeros up to a multiple of 16
bytes, so that rows begin where vectors of 16 bytes can be read. A plane of width w holds w bits of each code, the lower
bits first; byte j of its `block · w / 8` holds those of the elements j, j + block · w / 8, and so on, from its lowest
bits up. A scale is the 16 bits of an fp32 below its sign: 8 of exponent and 8 of mantissa.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise

ALIGNMENT = 16  # bytes: the widest access of a GPU thread
DEFAULT_BLOCK = 128
SMALLEST_BLOCK, LARGEST_BLOCK = 16, 1 << 20

PLANES = {8: (8,), 6: (4, 2), 4: (4,), 3: (2, 1), 2: (2,)}

# The levels of Lloyd and Max for a normal distribution, in 1/128 of its standard deviation; the negative ones mirror
# them (Max 1960, table I: 0.4528 1.510; 0.2451 0.7560 1.344 2.152)
LLOYD_MAX = {2: (58.0, 193.0), 3: (31.0, 97.0, 172.0, 275.0)}

CLIP = {4: 0.95, 2: 0.7}  # of the largest magnitude: the least squared error on normal blocks of 128

LARGEST_E4M3 = 448

_NAMES = ("int8", "int6", "int4", "int2", "fp8", "int4-hadamard", "int3-hadamard", "int2-hadamard")


@dataclass(frozen=True)
class Format:
    """`bits` per element, blocks of `block` elements, rotated by a Hadamard matrix or not; levels are numbers in
    floating point or not. Made by `parse_format`."""

    bits: int
    rotated: bool = False
    block: int = DEFAULT_BLOCK
    floating: bool = False

    def __post_init__(self) -> None:
        if self.name not in _NAMES:
            raise ValueError(f"format {self.name!r}: expected one of {', '.join(_NAMES)}")
        if not SMALLEST_BLOCK <= self.block <= LARGEST_BLOCK or self.block & (self.block - 1):
            raise ValueError(
                f"format {self.name!r}: block {self.block}, expected a power of two from {SMALLEST_BLOCK} to "
                f"{LARGEST_BLOCK}, as in {self.name}@64"
            )
        if self.rotated and self.block > 1024:
            raise ValueError(
                f"format {self.name!r}: block {self.block}, expected at most 1024 where blocks are rotated"
            )

    @property
    def name(self) -> str:
        """Without the block."""
        return f"{'fp' if self.floating else 'int'}{self.bits}{'-hadamard' if self.rotated else ''}"

    @property
    def planes(self) -> tuple[int, ...]:
        """Widths in bits of the planes, the one of the lowest bits first."""
        return PLANES[self.bits]

    @property
    def shifts(self) -> tuple[int, ...]:
        """For each plane, the number of bits of a code that are in the planes before."""
        return tuple(accumulate(self.planes[:-1], initial=0))

    @property
    def half(self) -> int:
        """Half of the number of codes."""
        return 1 << (self.bits - 1)

    @property
    def largest(self) -> int:
        """The largest level where zero is one and nothing saturates."""
        return LARGEST_E4M3 if self.floating else self.half - 1

    @property
    def odd(self) -> bool:
        """Uniform levels, and those of dithered messages, are the odd integers about zero, instead of all."""
        return self.rotated or self.bits == 2

    @property
    def lloyd_max(self) -> bool:
        """Levels of messages without dither are those of Lloyd and Max, in contrast to uniform ones."""
        return self.rotated and self.bits in LLOYD_MAX

    @property
    def positive_levels(self) -> tuple[float, ...]:
        """Lloyd-Max levels above zero, ascending."""
        return LLOYD_MAX[self.bits]

    @property
    def thresholds(self) -> tuple[float, ...]:
        """Magnitudes between the positive levels, in standard deviations."""
        return tuple((a + b) / 256 for a, b in pairwise(self.positive_levels))

    @property
    def clip(self) -> float:
        """The largest value of uniform odd levels, as a part of the largest magnitude."""
        return CLIP[self.bits]

    @property
    def block_bytes(self) -> int:
        """Bytes of a block's codes."""
        return self.block * self.bits // 8

    def blocks(self, n: int) -> int:
        """Number of blocks in a row of n elements."""
        return -(-n // self.block)

    def part_bytes(self, blocks: int) -> list[int]:
        """Bytes of `blocks` blocks in each plane of codes, and of their scales."""
        return [*(blocks * self.block * width // 8 for width in self.planes), 2 * blocks]

    def payload_bytes(self, n: int) -> int:
        """Bytes of a row of n elements: codes, scales of two bytes, zeros up to a multiple of 16."""
        return -(-self.blocks(n) * (self.block_bytes + 2) // ALIGNMENT) * ALIGNMENT

    def __str__(self) -> str:
        return self.name if self.block == DEFAULT_BLOCK else f"{self.name}@{self.block}"


@cache
def parse_format(name: str | Format, *, dithered: bool = False) -> Format:
    """The format of that name, such as "int8" or "int4-hadamard@64". Raises ValueError for others, and for those that
    cannot be `dithered` where they are to be."""
    format = name if isinstance(name, Format) else _named(name)
    if dithered and format.floating:
        raise ValueError(
            f"format '{format}': its levels are not uniform, so it cannot be dithered as gradients and other messages "
            f"with a seed are. Give {replace(format, floating=False)}, which has as many bits"
        )
    return format


def _named(name: str) -> Format:
    parts = re.fullmatch(r"(int|fp)([0-9])(-hadamard)?(?:@([0-9]+))?", name)
    if parts is None:
        raise ValueError(
            f"format {name!r}: expected one of {', '.join(_NAMES)}, each with @BLOCK for another block than "
            f"{DEFAULT_BLOCK}, as in int4-hadamard@64"
        )
    return Format(int(parts[2]), parts[3] is not None, int(parts[4] or DEFAULT_BLOCK), parts[1] == "fp")


def parse_formats(name: str | Format, *, dithered: bool = False) -> tuple[Format, Format]:
    """(inside the node, between nodes) of "int8/int4"; one format stands for both. Raises ValueError as `parse_format`
    does."""
    first, slash, second = (name, "", "") if isinstance(name, Format) else name.partition("/")
    return parse_format(first, dithered=dithered), parse_format(second if slash else first, dithered=dithered)


def slice_length(n: int, ranks: int, formats: str | Format) -> int:
    """Elements of each rank's slice of a flat tensor of n: n / ranks, rounded up to whole blocks (of both hops)."""
    block = max(format.block for format in parse_formats(formats))
    return -(-n // (ranks * block)) * block
