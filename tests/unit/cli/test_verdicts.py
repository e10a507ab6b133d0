"""The verdict on an output, and the next command, from the data of a report."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rewriter.adapt.adaptation import AdaptReport
from rewriter.cli import rendering
from rewriter.cli.doctor_report import Command, Doctor, Finding
from rewriter.convert.report import ConversionReport
from rewriter.recipes.verdicts import TRY

EXACT = {"name": "tensor_parallel", "kind": "exact", "summary": "split", "notes": [], "fired": True, "routine": False}
ROUTINE = {"name": "overlap", "kind": "exact", "summary": "0 of 60", "notes": [], "fired": False, "routine": True}
LADDER = {"name": "ladder", "kind": "approximating", "summary": "late", "notes": [], "fired": True, "routine": False}
HELD = {"sharded module = original model": 1e-6}


def drift(after: float, kl: float = 0.04) -> dict[str, Any]:
    found = {"kl": kl, "top1_agreement": 0.5, "perplexity_before": 10.0, "perplexity_after": after}
    return found | {"tokens": 2056, "text": "a text"}


def converted(*passes: dict[str, Any], out: str = "out", **other: Any) -> dict[str, Any]:
    report = ConversionReport("tiny", "some", out, {"tp": 2}, list(passes), **other)
    found: dict[str, Any] = json.loads(report.to_json())
    return found


def test_an_exact_output_is_the_same_function() -> None:
    found = converted(EXACT, ROUTINE, verification=HELD)
    assert (found["verdict"], found["next"]) == ("Same function as tiny.", "rewrite serve out")
    found = converted(EXACT)
    assert "nothing was compared" in found["verdict"]
    assert found["next"] == ""
    idle = LADDER | {"fired": False}
    assert converted(idle, verification=HELD)["verdict"] == "Same function as tiny."


@pytest.mark.parametrize(
    ("after", "verdict", "next_word"),
    [
        (20.0, "Not yet usable: the loss is 30 % above the original's on 2,056 tokens.", "adapt"),
        (12.9, "Not yet usable: the loss is 11 % above the original's on 2,056 tokens.", "adapt"),
        (12.3, "Not healed: the loss is 9.0 % above the original's on 2,056 tokens, KL 0.04 nats.", "adapt"),
        (10.3, "Not healed: the loss is 1.3 % above the original's on 2,056 tokens, KL 0.04 nats.", "adapt"),
        (10.2, f"Close to tiny: the loss is 0.9 % above the original's on 2,056 tokens. {TRY}", "serve"),
        (9.9, f"Close to tiny: the loss is 0.4 % below the original's on 2,056 tokens. {TRY}", "serve"),
    ],
)
def test_an_approximating_output_is_judged_by_its_loss(after: float, verdict: str, next_word: str) -> None:
    found = converted(EXACT, LADDER, verification=HELD | {"drift": drift(after)})
    assert found["verdict"] == verdict
    assert found["next"].split()[1] == next_word


def test_an_equal_loss_of_other_predictions_is_not_close() -> None:
    found = converted(EXACT, LADDER, verification=HELD | {"drift": drift(9.9, kl=0.6)})
    assert found["verdict"] == ("Not healed: the loss is 0.4 % below the original's on 2,056 tokens, KL 0.6 nats.")
    assert found["next"].split()[1] == "adapt"


def test_the_next_command_is_quoted_for_a_shell() -> None:
    found = converted(LADDER, out="an out/")
    assert found["verdict"].startswith("Not yet usable: it computes another function than tiny, and its loss was not")
    words = ["rewrite", "adapt", "an out/", "--out", "an out-healed", "--tokens", "100000"]
    assert shlex.split(found["next"]) == words


def test_a_dry_run_says_what_the_output_would_compute() -> None:
    assert "would compute the same function as tiny" in converted(EXACT, dry_run=True)["verdict"]
    found = converted(LADDER, dry_run=True)
    assert "would compute another function than tiny" in found["verdict"]
    assert found["next"] == ""


def adapted(
    original: float | None,
    before: float,
    after: float,
    tokens: int = 8192,
    words: Sequence[str] = (),
    out: str = "healed",
) -> dict[str, Any]:
    losses = {} if original is None else {"original": original}
    losses |= {"before": before, "after": after}
    done = {"tokens": tokens, "method": "distill", "data": "self", "steps": 1, "seconds": 1.0, "counts": {},
            "evaluation": "1 of 2 rows"}  # fmt: skip
    found: dict[str, Any] = json.loads(AdaptReport(out, losses, done, "my dir").to_json(words))
    return found


def test_a_fine_tuning_says_how_much_of_the_gap_it_closed() -> None:
    found = adapted(2.0, 3.0, 2.1)
    assert found["gap_closed"] == pytest.approx(0.9)
    assert found["verdict"] == (f"The loss is 5.0 % above the original's. 90 % of the gap is closed. {TRY}")
    assert found["next"] == "rewrite serve healed"
    found = adapted(2.0, 3.0, 2.5)
    assert found["verdict"] == "Not healed yet: the loss is 25 % above the original's. 50 % of the gap is closed."
    assert found["next"] == "rewrite adapt 'my dir' --out healed-100000 --tokens 100000"
    assert adapted(2.0, 3.0, 2.5, 100_000)["next"].endswith("--tokens 400000")
    level = adapted(2.0, 2.0, 1.9)  # no gap
    assert level["gap_closed"] is None
    assert level["verdict"] == f"The loss is 5.0 % below the original's. {TRY}"
    unknown = adapted(None, 3.0, 2.5)
    assert unknown["verdict"] == f"The loss went from 3 to 2.5; the original's was not measured. {TRY}"


@pytest.mark.parametrize(
    ("original", "before", "after"),
    [(2.0, 3.0, 3.5), (None, 3.0, 5.0), (2.0, 2.05, 2.19), (2.0, 3.0, math.inf), (2.0, 3.0, math.nan)],
)
def test_a_loss_that_rose_is_not_to_be_served(original: float | None, before: float, after: float) -> None:
    found = adapted(original, before, after)
    assert found["verdict"].startswith(f"Not healed: training took the loss from {before:.3g} to {after:.3g}")
    assert found["next"] == ""


def test_the_next_fine_tuning_keeps_the_options() -> None:
    words = ["adapt", "my dir", "--data", "a b.jsonl", "--out=h d/", "--lora", "16", "--tokens", "8192", "--resume"]
    found = adapted(2.0, 3.0, 2.5, words=words, out="h d/")
    again = [
        "rewrite",
        "adapt",
        "my dir",
        "--data",
        "a b.jsonl",
        "--lora",
        "16",
        "--out",
        "h d-100000",
        "--tokens",
        "100000",
    ]
    assert shlex.split(found["next"]) == again


def test_a_path_that_looks_like_an_option_is_told_apart() -> None:
    found = converted(EXACT, LADDER, verification=HELD | {"drift": drift(20.0)}, out="-dash")
    assert found["next"] == "rewrite adapt ./-dash --out ./-dash-healed --tokens 100000"


def test_the_verdict_is_printed_last_and_the_command_on_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = str(Path("a-long-folder") / ("o" * 80))
    rendering.print_report(json.dumps(converted(LADDER, ROUTINE, out=out, verification={"drift": drift(20.0)})))
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == f"Next: rewrite adapt {out} --out {out}-healed --tokens 100000"
    assert "0 of 60" not in printed
    rendering.print_report(json.dumps(converted(LADDER, ROUTINE, verification={})), verbose=True)
    assert "0 of 60" in capsys.readouterr().out
    rendering.print_adaptation(json.dumps(adapted(2.0, 3.0, 2.1)))
    assert "90 % of the gap is closed." in capsys.readouterr().out


def test_doctor_says_what_to_install_first() -> None:
    lacking = "vllm, or for one process fastapi (pip install 'rewriter[serve]')"
    some = Doctor((Finding("torch", "ok", "2.13"),), (Command("predict"), Command("serve", "no", lacking)))
    assert some.verdict == "What every command needs is here. 1 of 2 commands work in full; not serve."
    assert some.next == "pip install 'rewriter[serve]'"
    whole = Doctor(some.findings, (Command("predict"),))
    assert (whole.verdict, whole.next) == ("What every command needs is here. All commands work.", "rewrite recipes")
    none = Doctor((Finding("rich", "missing", "not installed", "pip install 'rich>=13.8'"),), some.commands)
    assert none.verdict == "Something that every command needs is missing: rich."
    assert json.loads(none.to_json())["next"] == "pip install 'rich>=13.8'"
