"""Comparison of two models' results: the figure, its limit, and where they differ most."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from rewriter.common.errors import VerificationError
from rewriter.ir import Program
from rewriter.ir.residual import carries_state

# fp32 against fp32 in another order of additions; measured on every family: 1e-7 to 4e-6.
EXACT = 1e-5
# Partial sums of several ranks are added in yet another order.
RANKS = 1e-4
# Deep trained models carry rounding through every layer, and some hold activations a thousand times their median.
REAL_WEIGHTS = 1e-4
# What is quantized jumps where rounding differs, and jumps make others: at few tokens in the few layers of a shrunken
# copy, and until two right computations differ like two independent errors in a deep model. In parts of the error of
# quantization itself; sums that are exact, or made in another way, differ by about 1 at every token.
QUANTIZED, QUANTIZED_REAL_WEIGHTS = 0.5, 2.0
NEXT = "`rewrite bisect` finds the pass, layer and operator"
MEDIAN = (
    "the figure of quantized sums is not the largest relative error, but the difference at the median token, in parts "
    "of what quantization changes there"
)
# Below this, a rewritten model could pass as the original, and agreement with its reference would mean nothing.
DIFFERENT = 1e-2


def exact_limit(program: Program) -> float:
    """The limit for a program that computes in fp32 what a model does, on one device.

    Recurrences come in chunks, in transformers too, whose delta rule is off by 3e-6 at 100 tokens before it passes any
    other layer: as much as sums in another order.
    """
    return RANKS if any(map(carries_state, program.modules.values())) else EXACT


@dataclass(frozen=True)
class Check:
    """One comparison: `error` is the largest difference over the largest expected magnitude, `limit` what may be."""

    name: str
    error: float
    limit: float
    worst: str = ""

    @property
    def passed(self) -> bool:
        return self.error <= self.limit


@dataclass
class Verification:
    """Comparisons that held, and notes on what was not compared and why."""

    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def require(self, name: str, actual: torch.Tensor, expected: torch.Tensor, limit: float) -> None:
        """Compare two tensors and keep the figure. Raises VerificationError with the worst position beyond `limit`."""
        check = compare(name, actual, expected, limit)
        if not check.passed:
            raise VerificationError(
                f"{name}: {check.worst}; relative error {check.error:.2e}, limit {limit:.0e}. {NEXT}"
            )
        # The same comparison at several lengths is one line: its worst.
        for index, earlier in enumerate(self.checks):
            if earlier.name == name:
                self.checks[index] = max(earlier, check, key=lambda c: c.error)
                return
        self.checks.append(check)

    def require_quantized(
        self,
        name: str,
        actual: Sequence[torch.Tensor],
        expected: Sequence[torch.Tensor],
        exact: Sequence[torch.Tensor],
        limit: float,
    ) -> None:
        """Compare logits [..., vocabulary] that come of quantized sums. `exact` are those of exact sums.

        The figure is the median, over the tokens of all batches, of ‖actual − expected‖ ÷ ‖expected − exact‖. Raises
        VerificationError beyond `limit`.
        """
        figures = [_of_change(*batch) for batch in zip(actual, expected, exact, strict=True)]
        error = float(torch.cat(figures).median())
        if not error <= limit:
            raise VerificationError(
                f"{name}: at half of the tokens the logits differ by {error:.2f} or more, limit {limit:.1f}. {NEXT}"
            )
        self.checks.append(Check(name, error, limit))
        if MEDIAN not in self.notes:
            self.notes.append(MEDIAN)

    def figures(self) -> dict[str, float]:
        """Relative error by name of comparison, in order."""
        return {check.name: check.error for check in self.checks}


def _of_change(actual: torch.Tensor, expected: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Per token, the difference of `actual` from `expected` in parts of that of `expected` from `exact`; fp64 [tokens].

    0 where quantization changes nothing and neither differs.
    """
    if actual.shape != expected.shape:
        return torch.full((1,), math.inf, dtype=torch.float64)
    difference, change = ((v.double() - expected.double()).flatten(0, -2).norm(dim=-1) for v in (actual, exact))
    return torch.where(difference == 0, difference, difference / change)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over largest expected magnitude, in float64; infinite where shapes differ, and where one of
    them holds a number that is not finite: nothing agrees with that, not even itself."""
    if actual.shape != expected.shape or not all(bool(values.isfinite().all()) for values in (actual, expected)):
        return float("inf")
    scale = float(expected.detach().double().abs().max())
    difference = float((actual.detach().double() - expected.detach().double()).abs().max())
    return difference / scale if scale else (0.0 if difference == 0 else float("inf"))


def compare(name: str, actual: torch.Tensor, expected: torch.Tensor, limit: float) -> Check:
    """Compare two tensors of logits, [..., tokens, vocabulary] or any shape."""
    error = relative_error(actual, expected)
    return Check(name, error, limit, _worst(actual, expected))


def _worst(actual: torch.Tensor, expected: torch.Tensor) -> str:
    if actual.shape != expected.shape:
        return f"the shape is {list(actual.shape)}, expected {list(expected.shape)}"
    for values, which in ((actual, ""), (expected, "expected ")):
        if count := int((~values.isfinite()).sum()):
            return f"{count} of {values.numel()} {which}values are not finite"
    difference = (actual.double() - expected.double()).abs()
    flat = int(difference.argmax())
    place = [int(i) for i in torch.unravel_index(torch.tensor(flat), actual.shape)]
    labels = (
        ("row", "token", "vocabulary entry")[-len(place) :]
        if len(place) <= 3
        else [f"axis {i}" for i in range(len(place))]
    )
    where = ", ".join(f"{label} {index}" for label, index in zip(labels, place, strict=True))
    return f"worst at {where}: {float(actual.flatten()[flat]):.6g}, expected {float(expected.flatten()[flat]):.6g}"
