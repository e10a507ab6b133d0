"""Padded sizes of every type that transformers registers as a causal LM: docs/figures/fit-types.md.

    python -m benchmarks.models.padded_types --jobs 2        # about 15 minutes
    python -m benchmarks.models.padded_types llama gemma3    # some types; writes nothing

Each type is built small, with random weights. `fit_ranks` pads it for so many ranks. Compared with the unmodified
eager model, in fp32 at lengths beyond every window: transformers' own classes with the padded weights, and simulated
ranks.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import transformers

from rewriter.check.comparison import RANKS, Verification
from rewriter.check.coverage import check as coverage
from rewriter.check.coverage.check import Subject
from rewriter.check.coverage.configs import require_registered
from rewriter.check.coverage.pool import run
from rewriter.check.coverage.report import Coverage
from rewriter.check.padded_model import padded_model, real_tokens
from rewriter.check.reference_modes import original_logits
from rewriter.ir.simulate import simulate
from rewriter.passes.fit_ranks import FitRanks
from rewriter.passes.tensor_parallel import TensorParallel

PAGE = Path(__file__).parents[2] / "docs" / "figures" / "fit-types.md"
LIMIT = 300.0  # seconds of one type


@dataclass
class Row(Coverage):
    """A type: whether padded sizes compute what it computes."""

    fitted: bool = False


def fit(subject: Subject, tp: int) -> None:
    """Pad a model for `tp` ranks, and compare."""
    with subject.noted("fitted"):
        program = subject.program
        made = FitRanks(waste=1e9).apply(program.with_(mesh={"tp": tp}, origin=program))
        ranks, found = TensorParallel().apply(made), Verification()
        model = padded_model(made) if made.source.padded else subject.model
        for ids, expected in zip(subject.batches, subject.expected, strict=True):
            padded = real_tokens(original_logits(model, ids), expected)
            found.require("padded sizes = original model", padded, expected, subject.limit)
            simulated = real_tokens(simulate(ranks, ids, host=model), expected)
            found.require("simulated ranks = original model", simulated, expected, RANKS)


def row(model_type: str, tp: int) -> Row:
    """One type. Raises nothing that a model may cause."""
    result = Row(model_type)
    coverage.checked(result, Subject, ("builds", "traces"), partial(fit, tp=tp))
    return result


def reason(one: Row) -> str:
    """The reason why a type is not padded, without the line of code and the next step."""
    said = one.reasons.get("fitted") or next(iter(one.reasons.values()), "it is not traced")
    return re.sub(r"( --tp \d+ needs no padding)?( \(rewriter/[^ ]*:\d+\))?$", "", said.removeprefix("fit_ranks: "))


def page(rows: Iterable[Row], tp: int) -> str:
    """docs/figures/fit-types.md."""
    done = sorted(rows, key=lambda one: one.type)
    exact = [one for one in done if one.fitted]
    wrong = [one for one in done if "fitted" in one.wrong]
    refused = [one for one in done if one.traces and not one.fitted and one not in wrong]
    table = "\n".join(f"| `{one.type}` | {reason(one).replace('|', '∣')} |" for one in refused)
    return f"""# Padded sizes, by type

`python -m benchmarks.models.padded_types` writes this page, with transformers {transformers.__version__}. It tries \
every type that transformers registers as a causal LM, small, padded for {tp} ranks \
([Any number of GPUs](../howto/any-number-of-gpus.md)).

{sum(one.traces for one in done)} of {len(done)} types are traced. {len(exact)} of them give the same results with \
padded sizes, by transformers' own classes and on ranks; {len(wrong)} give other results; {len(refused)} are refused.

Same results: {", ".join(f"`{one.type}`" for one in exact)}.

| refused | reason |
|---|---|
{table}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*")
    parser.add_argument("--tp", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    rows: list[Row] = []
    check = partial(row, tp=options.tp)
    for one in run(require_registered(options.types), check, jobs=options.jobs, limit=LIMIT, kind=Row):
        assert isinstance(one, Row)
        rows.append(one)
        print(one.type, "exact" if one.fitted else reason(one), flush=True)
    if not options.types:
        PAGE.write_text(page(rows, options.tp), encoding="utf-8")


if __name__ == "__main__":
    main()
