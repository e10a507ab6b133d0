"""The schedules of quantized collectives on many ranks in one process: how errors of ranks add up, and seeds.

Programs are those that real ranks run, with messages that change hands between their steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from quantized_oracle import relative
from torch import Tensor

from rewriter.kernels import dequantize, quantize
from rewriter.runtime.collectives.exchange import Transfer
from rewriter.runtime.quantized import schedules
from rewriter.runtime.quantized.topology import Topology


@dataclass
class Lockstep:
    """An axis whose messages lie in a box of all ranks until the next step."""

    ranks: int
    rank: int
    line: tuple[str, int]
    box: dict[Any, dict[int, Tensor]]
    step: int = field(default=0)

    def all_to_all_start(self, sent_PB: Tensor, name: str) -> Transfer:
        message = self._put(sent_PB)
        return Transfer([], lambda: torch.stack([message[p][self.rank] for p in range(self.ranks)]))

    def gather_start(self, rows_PB: Tensor, name: str) -> Transfer:
        message = self._put(rows_PB[self.rank].clone())
        return Transfer([], lambda: torch.stack([message[p] for p in range(self.ranks)], out=rows_PB))

    def _put(self, x: Tensor) -> dict[int, Tensor]:
        self.step += 1
        message = self.box.setdefault((self.line, self.step), {})
        message[self.rank] = x
        return message


def grid_place(nodes: int, local: int, rank: int, box: dict[Any, dict[int, Tensor]]) -> Topology:
    y, place = divmod(rank, local)
    return Topology(
        intra=Lockstep(local, place, ("local", y), box),  # type: ignore[arg-type]
        inter=Lockstep(nodes, y, ("node", place), box),  # type: ignore[arg-type]
        nodes=True,
    )


def scattered(xs: list[Tensor], nodes: int, local: int, formats: str, seed: int | None = None) -> Tensor:
    """[P, N]: what reduce_scatter leaves on each of nodes × local ranks that hold `xs` [P, N]."""
    box: dict[Any, dict[int, Tensor]] = {}
    out = torch.empty(nodes * local, xs[0].shape[1])
    programs = []
    for rank, x in enumerate(xs):
        where = grid_place(nodes, local, rank, box)
        call = schedules.QuantizedCall(where, schedules.step_formats(formats, where, ""), seed=seed)
        programs.append(schedules.reduce_scatter(x, out[rank], 1.0, call))
    running = [(program, next(program)) for program in programs]
    while running:
        for _, transfer in running:
            transfer.wait()
        running = [(program, transfer) for program, _ in running if (transfer := next(program, None)) is not None]
    return out


def correlated(ranks: int, rho: float, draw) -> list[Tensor]:
    shared = draw()
    return [rho**0.5 * shared + (1 - rho) ** 0.5 * draw() for _ in range(ranks)]


def test_two_hops_over_64_ranks_err_as_measured():
    """Heavy tails, 8 × 8 ranks, 8 bits inside nodes and 4, rotated, between: at most .045 where ranks have a fifth of
    their variance in common. Sums of numbers that have nothing in common err as much as one 4-bit message does, .1."""
    torch.manual_seed(0)
    draw = torch.distributions.StudentT(4.0).sample
    for rho, least, most in ((0.2, 0.03, 0.045), (0.0, 0.08, 0.1)):
        xs = correlated(64, rho, lambda: draw((64, 128)))
        error = relative(scattered(xs, 8, 8, "int8/int4-hadamard"), torch.stack(xs).double().sum(0))
        assert least < error <= most, rho


def test_dithered_errors_of_ranks_cancel():
    """64 ranks, correlated (ρ = .9), 2 bits: the mean's error is at most .12; to the nearest level it does not shrink.
    Ranks of several nodes that hold the same numbers err each in its own way too."""
    torch.manual_seed(0)
    xs = correlated(64, 0.9, lambda: torch.randn(64, 128))
    expected = torch.stack(xs).double().sum(0)
    assert relative(scattered(xs, 1, 64, "int2-hadamard", seed=1), expected) <= 0.12
    assert relative(scattered(xs, 1, 64, "int2-hadamard"), expected) > 0.16
    x = torch.randn(16, 256)
    one = relative(dequantize(quantize(x, "int4", seed=1), "int4", x.shape, torch.float32, seed=1), x.double())
    # Of 4 × 4 ranks' parts 12 are quantized inside nodes, and the sums of 3 nodes, 4 times as large, between them.
    error = relative(scattered([x] * 16, 4, 4, "int4", seed=1), 16 * x.double())
    assert 0.85 < error / (one * (12 + 3 * 16) ** 0.5 / 16) < 1.15


def test_no_two_messages_share_a_seed():
    """Not those of two ranks or hops of a collective, nor those of two collectives."""
    used = []
    for seed in range(20):
        for rank in range(4):
            where = grid_place(2, 2, rank, {})
            call = schedules.QuantizedCall(where, schedules.step_formats("int8", where, ""), seed=seed)
            inside, between = call.intra_seed + where.intra.rank, call.inter_seed + where.inter.rank
            gathered = call.gather_seed + where.intra.rank * 2 + where.inter.rank
            used += [inside, between, gathered]
    assert len({seed % 2**32 for seed in used}) == len(used) == 20 * 4 * 3
