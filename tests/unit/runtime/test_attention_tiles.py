"""Tiles of scores of a sequence that lies on many ranks, in one process: every tile of a grid is computed by itself and
merged, and the result is held against a softmax over all scores in fp64."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rewriter.common.errors import RewriterError
from rewriter.ir.ops import MaskSpec
from rewriter.ir.sequence_plan import LAYOUTS, TokenRun, padded
from rewriter.kernels import accumulation_dtype, merge
from rewriter.runtime.attention import local, tiles
from rewriter.runtime.attention.partial_merge import Merger, merge_in_turn
from rewriter.runtime.attention.tiles import Gradients, Visibility, tile_backward, tile_forward

CAUSAL, FULL = MaskSpec("causal"), MaskSpec("bidirectional")
STEPS = [(1, 1), (2, 2), (4, 2), (2, 3), (3, 2), (6, 4)]


@dataclass
class Case:
    """q, k, v, and do, the gradient that arrives, of a whole sequence in fp64; `rows` marks queries that see a key."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    mask: Tensor
    scale: float

    @property
    def rows(self) -> Tensor:
        return self.mask.any(-1, keepdim=True)


def case(
    length: int, mask: Tensor, *, heads: tuple[int, int] = (4, 2), sizes: tuple[int, int] = (8, 8), seed: int = 0
) -> Case:
    """Random tensors for a mask [B or 1, 1, S, S]."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(heads[0], sizes[0]), (heads[1], sizes[0]), (heads[1], sizes[1]), (heads[0], sizes[1])]
    q, k, v, do = (torch.randn(2, h, length, size, generator=generator, dtype=torch.float64) for h, size in shapes)
    return Case(q, k, v, do, mask, 0.3)


def causal(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()[None, None]


def everything(length: int) -> Tensor:
    return torch.ones(1, 1, length, length, dtype=torch.bool)


def expected(c: Case) -> tuple[Tensor, ...]:
    """(o, lse, dq, dk, dv) from all scores at once; rows that see nothing give 0 and −inf."""
    q, k, v = (x.clone().requires_grad_() for x in (c.q, c.k, c.v))
    groups = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(groups, 1).transpose(-1, -2) * c.scale
    lse = scores.masked_fill(~c.mask, -torch.inf).logsumexp(-1)
    # rows that see nothing see everything here, so that autograd has no NaN, and are dropped afterwards
    weights = scores.masked_fill(~c.mask & c.rows, -torch.inf).softmax(-1)
    o = (weights @ v.repeat_interleave(groups, 1)).masked_fill(~c.rows, 0)
    o.backward(c.do)
    return o.detach(), lse.detach(), *(x.grad for x in (q, k, v))  # type: ignore[return-value]


def computed(
    c: Case, query_runs: list[TokenRun], key_runs: list[TokenRun], seen: Visibility, dtype: torch.dtype
) -> list[Tensor]:
    """(o, lse, dq, dk, dv) of the same from tiles: every run of queries against every run of keys."""
    length = seen.length
    end = 1 + max(run.last for run in query_runs + key_runs)
    q, k, v, do = (F.pad(x, [0, 0, 0, end - length], value=9.0).to(dtype) for x in (c.q, c.k, c.v, c.do))
    sums = accumulation_dtype(dtype)
    o, lse = torch.full_like(do, torch.nan), torch.full(do.shape[:-1], torch.nan, dtype=sums)
    for queries in query_runs:
        at, merger = queries.positions(), Merger()
        for keys in key_runs:
            t = keys.positions()
            part = tile_forward(q[:, :, at], k[:, :, t], v[:, :, t], queries, keys, seen, c.scale)
            if part is not None:
                assert part[0].dtype in (dtype, sums)
                assert part[1].dtype == sums
                merger.add(*part)
        o[:, :, at], lse[:, :, at] = (x.to(y.dtype) for x, y in zip(merger.result(), (o, lse), strict=True))
    into = Gradients(*(torch.zeros_like(x, dtype=sums) for x in (q, k, v)))
    for queries, keys in itertools.product(query_runs, key_runs):
        at, t = queries.positions(), keys.positions()
        part_into = Gradients(into.dq[:, :, at], into.dk[:, :, t], into.dv[:, :, t])
        tile_backward(
            *(do[:, :, at], q[:, :, at], k[:, :, t], v[:, :, t], o[:, :, at], lse[:, :, at]),
            *(queries, keys, seen, c.scale, part_into),
        )
        into.dq[:, :, at], into.dk[:, :, t], into.dv[:, :, t] = part_into.dq, part_into.dk, part_into.dv
    for x in (o, into.dq, into.dk, into.dv):  # padding sees and is seen by nothing
        assert x[:, :, length:].eq(0).all()
    return [x[:, :, :length] for x in (o, lse, into.dq, into.dk, into.dv)]


def runs(step: int, length: int, multiple: int) -> list[TokenRun]:
    return [TokenRun(first, step, padded(length, multiple) // step) for first in range(step)]


def errors(found: list[Tensor], wanted: tuple[Tensor, ...]) -> list[float]:
    """Of o, lse, dq, dk, dv: the largest difference over the largest value, or 1; −inf must stand where it should."""
    lse, right = found[1], wanted[1]
    assert torch.equal(lse == -torch.inf, right == -torch.inf)
    found, wanted = [x.double().nan_to_num(neginf=0) for x in found], tuple(x.nan_to_num(neginf=0) for x in wanted)
    assert all(x.isfinite().all() for x in found)
    return [float((a - b).abs().max() / b.abs().max().clamp(min=1)) for a, b in zip(found, wanted, strict=True)]


def check(
    c: Case, seen: Visibility, steps: tuple[int, int], dtype: torch.dtype = torch.float64, most: float = 1e-14
) -> None:
    r, s = steps
    query_runs, key_runs = (runs(step, seen.length, r * s) for step in steps)
    worst = errors(computed(c, query_runs, key_runs, seen, dtype), expected(c))
    assert max(worst) < most, worst


@pytest.mark.parametrize("steps", STEPS, ids=str)
@pytest.mark.parametrize("spec", [CAUSAL, FULL], ids=["causal", "full"])
def test_any_grid_gives_exact_attention_and_gradients(steps: tuple[int, int], spec: MaskSpec) -> None:
    """All offsets of a grid, of a length that is a multiple of nothing, so that some runs end in padding."""
    length = 53
    mask = causal(length) if spec is CAUSAL else everything(length)
    check(case(length, mask), Visibility(spec, length), steps)


@pytest.mark.parametrize("heads", [(4, 4), (3, 1), (9, 3)], ids=str)
@pytest.mark.parametrize("sizes", [(8, 8), (12, 5), (5, 12)], ids=str)
def test_groups_of_heads_and_values_of_another_size(heads: tuple[int, int], sizes: tuple[int, int]) -> None:
    check(case(29, causal(29), heads=heads, sizes=sizes), Visibility(CAUSAL, 29), (2, 3))
    window = causal(29).triu(-19)
    check(case(29, window, heads=heads, sizes=sizes), Visibility(MaskSpec("window", 20), 29), (2, 3))


@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.float32, 2e-6), (torch.bfloat16, 3e-2), (torch.float16, 3e-3)], ids=str
)
@pytest.mark.parametrize("spec", [CAUSAL, FULL, MaskSpec("window", 9)], ids=lambda spec: spec.kind)
def test_lower_precisions(dtype: torch.dtype, most: float, spec: MaskSpec) -> None:
    at = torch.arange(41)
    check(case(41, spec.visible(at, at)[None, None]), Visibility(spec, 41), (4, 2), dtype, most)


@pytest.mark.parametrize("steps", [(1, 1), (2, 3), (4, 2)], ids=str)
@pytest.mark.parametrize("size", [1, 3, 17, 60])
def test_windows(steps: tuple[int, int], size: int) -> None:
    length = 53
    check(case(length, causal(length).triu(1 - size)), Visibility(MaskSpec("window", size), length), steps)


def padding_mask(length: int, first: list[int]) -> Tensor:
    at = torch.arange(length)
    valid = at[None] >= torch.tensor(first)[:, None]
    return (causal(length)[0, 0] & valid[:, :, None] & valid[:, None, :])[:, None]


@pytest.mark.parametrize("steps", [(1, 1), (2, 3)], ids=str)
def test_left_padding(steps: tuple[int, int]) -> None:
    """Rows of padding see nothing: 0, −inf and no gradient."""
    seen = Visibility(CAUSAL, 31, first_valid=torch.tensor([0, 11]))
    check(case(31, padding_mask(31, [0, 11])), seen, steps)
    valid = torch.arange(31) >= torch.tensor([[0], [11]])
    seen = Visibility(FULL, 31, first_valid=torch.tensor([0, 11]))
    check(case(31, (valid[:, :, None] & valid[:, None, :])[:, None]), seen, steps)


@pytest.mark.parametrize("steps", [(1, 1), (2, 3)], ids=str)
def test_packed_sequences(steps: tuple[int, int]) -> None:
    segments = torch.tensor([[0] * 5 + [1] * 20 + [2] * 6, [0] * 30 + [1]])
    mask = causal(31) & (segments[:, :, None] == segments[:, None, :])[:, None]
    check(case(31, mask), Visibility(CAUSAL, 31, segments=segments), steps)
    check(case(31, mask.triu(-3)), Visibility(MaskSpec("window", 4), 31, segments=segments), steps)


@pytest.mark.parametrize("steps", [(1, 1), (2, 3)], ids=str)
@pytest.mark.parametrize("ragged", ["", "padded", "packed"])
def test_chunks_count_from_the_first_token_of_a_sequence(steps: tuple[int, int], ragged: str) -> None:
    length, size, starts = 31, 7, torch.zeros(2, 31, dtype=torch.int64)
    first_valid = segments = None
    mask = causal(length)
    if ragged == "padded":
        first_valid = torch.tensor([3, 9])
        starts, mask = first_valid[:, None].expand(-1, length), padding_mask(length, [3, 9])
    elif ragged == "packed":
        segments = torch.tensor([[4] * 10 + [7] * 21, [4] * 3 + [7] * 9 + [8] * 19])
        starts = torch.tensor([[0] * 10 + [10] * 21, [0] * 3 + [3] * 9 + [12] * 19])
        mask = mask & (starts[:, :, None] == starts[:, None, :])[:, None]
    block = (torch.arange(length) - starts) // size
    mask = mask & (block[:, :, None] == block[:, None, :])[:, None]
    check(case(length, mask), Visibility(MaskSpec("chunk", size), length, first_valid, segments), steps)


@pytest.mark.parametrize("seen", ["causal", "window"])
def test_chunks_of_a_zigzag_ring(seen: str) -> None:
    """Runs of step 1 at any distance, of which many tiles are empty."""
    length = 61
    spec = CAUSAL if seen == "causal" else MaskSpec("window", 13)
    mask = causal(length).triu(1 - (spec.size or length))
    held = [run for rank in range(4) for run in LAYOUTS["zigzag"].runs(rank, 4, length)]
    c = case(length, mask)
    assert max(errors(computed(c, held, held, Visibility(spec, length), torch.float64), expected(c))) < 1e-14


@pytest.mark.parametrize("start", [-9, -3, -1, 0, 2, 5, 9, 20])
@pytest.mark.parametrize(("rows", "columns"), [(6, 6), (6, 11), (11, 6), (1, 1)])
def test_staircases_at_any_offset(start: int, rows: int, columns: int) -> None:
    """Blocks of runs, as an overlapped schedule computes them, may lie anywhere below or above the diagonal."""
    queries, keys = TokenRun(20 + 2 * start, 2, rows), TokenRun(21, 2, columns)
    length = 1 + max(queries.last, keys.last)
    c = case(length, causal(length))
    mask = (keys.positions()[None] <= queries.positions()[:, None])[None, None]
    part = Case(
        c.q[:, :, queries.positions()], c.k[:, :, keys.positions()], c.v[:, :, keys.positions()],
        c.do[:, :, queries.positions()], mask, c.scale,
    )  # fmt: skip
    wanted = expected(part)
    seen = Visibility(CAUSAL, length)
    assert seen.none(queries, keys) == (not mask.any())
    found = tile_forward(part.q, part.k, part.v, queries, keys, seen, c.scale)
    if found is None:
        assert not mask.any()
        return
    into = Gradients(*(torch.zeros_like(x) for x in (part.q, part.k, part.v)))
    tile_backward(part.do, part.q, part.k, part.v, *found, queries, keys, seen, c.scale, into)
    assert max(errors([*found, into.dq, into.dk, into.dv], wanted)) < 1e-14


def test_kernel_calls_on_a_grid_are_as_few_as_they_can_be() -> None:
    """L² / (r · c) of them, each a square or a rectangle without a mask (research: 1 where r = c, 6 on 2 × 3)."""
    for (r, c), calls in {(2, 2): 1, (4, 4): 1, (4, 2): 2, (2, 3): 6, (3, 2): 6, (6, 4): 6, (1, 4): 4}.items():
        for i, j in itertools.product(range(r), range(c)):
            pieces = list(tiles._pieces(TokenRun(i, r, 96 // r), TokenRun(j, c, 96 // c), Visibility(CAUSAL, 96), 1))
            assert len(pieces) == calls
            assert all(p.causal and not p.masked for p in pieces)


def test_layers_with_a_window_leave_out_what_lies_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel sees about two windows of keys per block of queries, not all keys."""
    scores = 0

    def counted(q: Tensor, k: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
        nonlocal scores
        scores += q.shape[2] * k.shape[2]
        return kernel(q, k, *rest)  # type: ignore[arg-type]

    kernel = local.kernel_forward
    monkeypatch.setattr(tiles, "kernel_forward", counted)
    length, size = 4096, 256
    q = torch.randn(1, 1, length, 4)
    seen = Visibility(MaskSpec("window", size), length)
    assert tile_forward(q, q, q, TokenRun(0, 1, length), TokenRun(0, 1, length), seen, 1.0) is not None
    assert length * size < scores <= 2 * length * size
    assert seen.none(TokenRun(2048, 1, 512), TokenRun(0, 1, 1793))
    assert not seen.none(TokenRun(2048, 1, 512), TokenRun(0, 1, 1794))
    assert tile_forward(q[:, :, :512], q, q, TokenRun(2048, 1, 512), TokenRun(0, 1, 1793), seen, 1.0) is None


def test_rows_whose_first_keys_are_all_hidden() -> None:
    """A kernel's running maximum is −inf until the first key that a row sees: here after more keys than it takes at
    a time."""
    length = 1500
    seen = Visibility(CAUSAL, length, segments=(torch.arange(length) >= 1400).long()[None].expand(2, -1))
    assert seen.segments is not None
    mask = causal(length) & (seen.segments[:, :, None] == seen.segments[:, None, :])[:, None]
    check(case(length, mask, heads=(1, 1)), seen, (1, 1), most=1e-13)


@pytest.mark.parametrize("merging", [merge, merge_in_turn])
def test_merging_ignores_parts_that_saw_nothing(merging: Callable[..., tuple[Tensor, Tensor]]) -> None:
    o, lse = torch.randn(3, 4, dtype=torch.float64), torch.tensor([0.5, -torch.inf, -torch.inf], dtype=torch.float64)
    other, other_lse = (
        torch.randn(3, 4, dtype=torch.float64),
        torch.tensor([-1e4, 3.0, -torch.inf], dtype=torch.float64),
    )
    o[1:], other[2] = 0, 0
    for parts in ([(o, lse), (other, other_lse)], [(other, other_lse), (o, lse)]):
        merged, total = merging(parts)
        assert torch.equal(merged, torch.stack([o[0], other[1], torch.zeros(4, dtype=torch.float64)]))
        assert torch.equal(total, torch.tensor([0.5, 3.0, -torch.inf], dtype=torch.float64))
    with pytest.raises(ValueError, match="no part"):
        Merger().result()


@pytest.mark.parametrize("merging", [merge, merge_in_turn])
def test_merging_is_exact_where_exponentials_overflow(merging: Callable[..., tuple[Tensor, Tensor]]) -> None:
    """Log-sum-exps far beyond exp's range, in fp32 and from bf16 outputs."""
    o = torch.randn(5, 3, 4).bfloat16()
    lse = torch.tensor([[900.0, 901.0, -900.0], [-5e3, -5e3, -5e3], [88.0, 89.0, 90.0], [0, -200, 200], [1e4, 1, 2]])
    merged, total = merging([(o[:, p], lse[:, p]) for p in range(3)])
    weights = lse.double().softmax(-1)
    assert merged.dtype == total.dtype == torch.float32
    torch.testing.assert_close(merged.double(), (weights[..., None] * o.double()).sum(1), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(total.double(), lse.double().logsumexp(-1), rtol=1e-6, atol=0)


def test_gradients_are_added_to_what_is_there() -> None:
    c = case(12, causal(12))
    seen, run = Visibility(CAUSAL, 12), TokenRun(0, 1, 12)
    o, lse, *gradients = expected(c)
    into = Gradients(*(torch.ones_like(x) for x in (c.q, c.k, c.v)))
    tile_backward(c.do, c.q, c.k, c.v, o, lse, run, run, seen, c.scale, into)
    for found, wanted in zip((into.dq, into.dk, into.dv), gradients, strict=True):
        torch.testing.assert_close(found, wanted + 1, rtol=0, atol=1e-13)


def test_a_device_without_a_kernel_is_refused_by_name() -> None:
    with pytest.raises(RewriterError, match=r"no kernel returns log-sum-exps for torch\.float32 on meta"):
        local._kernel(torch.empty(1, 1, 4, 8, device="meta"), None)


@pytest.mark.parametrize("spec", [CAUSAL, FULL], ids=["causal", "full"])
def test_bf16_over_a_grid_is_as_exact_as_one_kernel_call(spec: MaskSpec) -> None:
    """4 × 4 tiles, partial outputs in bf16, sums in fp32: at most twice the error of one call (summing in bf16 fails,
    by 2.5 for dq)."""
    length = 512
    c = case(length, causal(length) if spec is CAUSAL else everything(length), sizes=(64, 64))
    c = Case(*(x.bfloat16().double() for x in (c.q, c.k, c.v, c.do)), c.mask, c.scale)
    wanted = expected(c)
    whole, parts = [TokenRun(0, 1, length)], runs(4, length, 4)
    single, tiled = (
        errors(computed(c, held, held, Visibility(spec, length), torch.bfloat16), wanted) for held in (whole, parts)
    )
    for name, one, many in zip(["o", "lse", "dq", "dk", "dv"], single, tiled, strict=True):
        assert many <= 2 * max(one, 1e-6), (name, one, many)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_kernel_calls_are_operators_that_compile_and_differentiate(dtype: torch.dtype, masked: bool) -> None:
    """Schemas, fake kernels and gradients as torch.compile needs them; the gradient is that of the whole formula."""
    c = case(7, causal(7), sizes=(8, 5))
    seen = causal(7) if masked else None
    q, k, v = (x.to(dtype, copy=True).requires_grad_() for x in (c.q, c.k, c.v))
    torch.library.opcheck(local.kernel_forward, (q, k, v, seen, not masked, c.scale))
    o, lse = local.kernel_forward(q, k, v, seen, not masked, c.scale)
    detached = [x.detach() for x in (c.do.to(dtype), q, k, v, o, lse)]
    torch.library.opcheck(local.kernel_backward, (*detached, seen, not masked, c.scale))
    o.backward(c.do.to(dtype))
    found = [o.detach(), lse, *(x.grad for x in (q, k, v))]
    assert max(errors(found, expected(c))) < (1e-14 if dtype == torch.float64 else 3e-2)
    assert not lse.requires_grad  # the kernels have no gradient for it
