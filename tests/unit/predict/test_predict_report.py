"""What `rewrite predict` shows: tables for the terminal, one HTML file, from comparisons made by hand."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from page_parser import Balance
from predictions import comparison, phase
from rich.console import Console

from rewriter.common.errors import RewriterError
from rewriter.common.files import write_text
from rewriter.common.numbers import digits, duration, percent
from rewriter.common.svg import log_ticks, strokes, ticks
from rewriter.predict.as_json import to_json
from rewriter.predict.next_command import next_words
from rewriter.predict.results import (
    ExactChoice,
    FirstToken,
    PredictedPoint,
    Prediction,
    RecipeComparison,
    SkippedRecipe,
)
from rewriter.predict.verdict import heals, published, verdict
from rewriter.predict.workload import FIRST_TOKEN_PROMPTS
from rewriter.show.charts import pareto
from rewriter.show.predict import ComparisonReport, headline
from rewriter.show.predict import predict_page as page
from rewriter.show.timeline import scale, timeline, window


def shown(found: RecipeComparison, width: int, *, pareto: bool = False, verbose: bool = False) -> str:
    console = Console(width=width, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(ComparisonReport(found, pareto, verbose))
    return capture.get()


def drawn(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text)


def boxes(text: str, style: str) -> list[tuple[float, float]]:
    """(x, width) of the rectangles with this class."""
    return [
        (float(r.get("x", "")), float(r.get("width", ""))) for r in drawn(text).iter("rect") if r.get("class") == style
    ]


def test_numbers_have_three_digits_and_a_unit() -> None:
    assert [duration(s) for s in (0, 3e-9, 1.5e-6, 0.00412, 0.0999996, 2)] == [
        "0", "3.00 ns", "1.50 µs", "4.12 ms", "100 ms", "2.00 s",
    ]  # fmt: skip
    assert [digits(n) for n in (0.123, 9.996, 99.96, 1234.5)] == ["0.12", "10.0", "100", "1,234"]
    assert (percent(1, 4), percent(0, 0)) == ("25 %", "–")
    assert log_ticks(0.9, 21) == [1, 2, 5, 10, 20]
    assert log_ticks(1, 1e5) == [1, 10, 100, 1e3, 1e4, 1e5]
    assert ticks(0, 2.3) == [0, 0.5, 1, 1.5, 2]


@pytest.mark.parametrize("width", [140, 100, 80])
def test_a_row_per_recipe_says_what_it_gains(width: int) -> None:
    found = comparison()
    lines = shown(found, width).splitlines()
    row = next(line for line in lines if line.startswith("ladder "))
    p = found.predictions[1]
    for cell in (duration(p.seconds_per_token), f"{p.end_to_end:.2f}×", "12.0 µs"):
        assert cell in row
    assert (duration(p.prefill.seconds) in row, "18.40 GB" in row) == (width >= 100, width >= 140)
    assert any("prefill" in line and duration(p.prefill.seconds) in line for line in lines)
    assert percent(p.exposed_communication_seconds_per_token, p.seconds_per_token) in row
    assert ("80 %:" in "\n".join(lines)) == (" 80 % " in "\n".join(lines))  # explained, and shown
    assert all(len(line) <= width for line in lines)
    assert "MODELLED" not in "".join(lines)


@pytest.mark.parametrize("width", [160, 100, 80])
def test_times_to_first_token_stand_beside_the_time_per_token(width: int) -> None:
    found = comparison()
    first = tuple(FirstToken(prompt, prompt * 1e-5, prompt < 32768) for prompt in FIRST_TOKEN_PROMPTS)
    found = replace(found, predictions=tuple(replace(p, time_to_first_token=first) for p in found.predictions))
    lines = shown(found, width).splitlines()
    row = next(line for line in lines if line.startswith("ladder "))
    for cell in ("10.2 ms", "81.9 ms", "328 ms !", duration(found.predictions[1].seconds_per_token), "×"):
        assert cell in row
    head = next(line for line in lines if line.startswith("recipe "))
    assert head.index("TTFT 1k") < head.index("TTFT 8k") < head.index("TTFT 32k") < head.index("token")
    assert all(len(line) <= width for line in lines)
    assert "TTFT" not in shown(comparison(), width)
    assert "TTFT 32k" in page(found)
    assert "328 ms !" in page(found)


@pytest.mark.parametrize("width", [40, 60])
def test_a_narrow_terminal_gets_fewer_columns(width: int) -> None:
    found = comparison(modelled=True)
    lines = shown(found, width).splitlines()
    assert all(len(line) <= width for line in lines)
    p = found.predictions[2]
    row = next(line for line in lines if line.startswith("ladder-upper-half "))
    assert row.rstrip().endswith(f"{p.end_to_end:.2f}×")
    assert "18.40 GB" not in row
    assert any(line.startswith("MODELLED") for line in lines)


def test_every_speedup_names_what_it_is_over() -> None:
    alone = " ".join(shown(comparison(), 140).split())
    listed = "Decode speedup (one decode step), prefill speedup (the prefill), end to end (a whole generation)"
    assert f"{listed}: over tensor-parallel." in alone
    found = replace(comparison(), engine="vllm", over="2 replicas", over_decode="TP 8", over_prefill="TP 8")
    found = replace(found, exact=(exact("TP 8", 100.0), exact("2 replicas", 120.0)))
    words = " ".join(shown(found, 140).split())
    version = "vllm 0.33.0"
    assert f"Decode speedup (one decode step), prefill speedup (the prefill): over TP 8 ({version})." in words
    assert f"End to end (a whole generation): over 2 replicas ({version})." in words
    assert f"End to end: over 2 replicas ({version})." in words
    assert "prefill speedup (" not in " ".join(shown(found, 40).split()).lower()


def test_what_decides_nothing_is_printed_on_demand() -> None:
    found = comparison(notes=("Sums are extrapolated.",))
    found = replace(found, predictions=tuple(replace(p, details=("overlap: 0 of 60",)) for p in found.predictions))
    assert "Sums are extrapolated." in shown(found, 140)
    assert "overlap: 0 of 60" not in shown(found, 140)
    assert "overlap: 0 of 60" in shown(found, 140, verbose=True)
    assert "overlap: 0 of 60" in page(found)
    assert [one["details"] for one in to_json(found)] == [["overlap: 0 of 60"]] * 3


def test_prompts_that_do_not_fit_are_named() -> None:
    found = comparison()
    first, *others = found.predictions
    times = (FirstToken(1024, 0.1), FirstToken(32_768, 3.0, fits=False))
    found = replace(found, predictions=(replace(first, batch=16, time_to_first_token=times), *others))
    said = f"! More than a device's memory: {first.recipe} with 16 prompts of 32,768 tokens."
    assert said in " ".join(shown(found, 140).split())


def test_what_must_be_known_is_said_once() -> None:
    found = comparison(fits=False, notes=("Activations are estimated.",))
    found = replace(found, what_if=("all_reduce=+5us",), skipped=(SkippedRecipe("odd", "8 heads do not divide by 3."),))
    text = shown(found, 140)
    assert text.count("Activations are estimated.") == 1
    assert "18.40 GB !" in text
    assert "! More than a device's memory: tensor-parallel, ladder, ladder-upper-half." in text
    assert "what if: all_reduce=+5us" in text
    assert "odd: not predicted. 8 heads do not divide by 3." in text


def test_the_best_points_are_shown_on_demand() -> None:
    found = comparison()
    assert "Best TP degrees" not in shown(found, 140)
    text = shown(found, 140, pareto=True)
    best = sum(point.front for points in found.pareto.values() for point in points)
    rows = text.partition("Best TP degrees")[2].splitlines()[3:]
    assert len([row for row in rows if row.strip()]) == best


def test_lanes_are_as_long_as_what_they_show() -> None:
    slow, fast = phase(8, 30e-6, 19e-6, hidden=False), phase(8, 30e-6, 10e-6, hidden=False)
    common = scale([slow, fast])
    assert common.seconds == slow.seconds
    assert common.layers == (6, 7)
    for one in (slow, fast):
        text = timeline("slow", one, common)
        low, high = window(one, common.layers)
        waits = [s for s in one.spans if s.exposed and s.lane == "compute" and low <= s.start < high]
        per_second = (1000 - 104 - 12) / common.window
        assert [width for _, width in boxes(text, "zw")] == pytest.approx(
            [s.seconds * per_second for s in waits], abs=0.06
        )
        # a communication that nothing hides is exposed from its start to its end
        assert len(boxes(text, "ze")) == len(waits)
        assert "all-reduce mlp" in text
    hidden = phase(8, 30e-6, 10e-6, hidden=True)
    assert hidden.exposed_seconds == 0
    assert not boxes(timeline("hidden", hidden, scale([hidden])), "ze")


def test_a_partly_hidden_reduction_is_exposed_in_part() -> None:
    one = phase(8, 30e-6, 19e-6, hidden=True)
    assert 0 < one.exposed_seconds < one.communication_seconds
    spans = tuple(replace(s, exposed=True) if s.lane == "communication" else s for s in one.spans)
    text = timeline("partly", replace(one, spans=spans), scale([one]))
    exposed, waits, whole = (sum(width for _, width in boxes(text, style)) for style in ("ze", "zw", "zh"))
    assert exposed == pytest.approx(waits, abs=0.5)
    assert exposed < whole


def test_a_pass_without_layers_or_communication_is_drawn() -> None:
    one = phase(2, 1e-3, 0.0, hidden=False)
    bare = replace(one, spans=tuple(replace(s, layer=None) for s in one.spans if s.lane == "compute"))
    assert "layers" not in timeline("bare", bare, scale([bare]))
    drawn(timeline("bare", bare, scale([bare])))


def test_neighbours_in_a_lane_are_joined_without_drift() -> None:
    thousand = [(k * 0.9, k * 0.9 + 0.45) for k in range(1000)]
    data = strokes(thousand, 7)
    moves = [float(x) for x in re.findall(r"[mMh](-?[\d.]+)", data)]
    assert sum(moves) == pytest.approx(thousand[-1][1], abs=0.06)
    assert strokes([(0, 1), (1.1, 2)], 7) == "M0 7h2"


def test_points_stand_where_their_figures_are() -> None:
    found = comparison(("tensor-parallel", "ladder"))
    text = pareto(found.pareto)
    points = [q for line in found.pareto.values() for q in line]
    marks = [e for e in drawn(text).iter("path") if (e.get("class") or "").startswith("pp ")]
    assert len(marks) == len(points)
    assert sum(" h" in (m.get("class") or "") for m in marks) == sum(not q.fits for q in points)
    xs = [float(re.match(r"M(\S+)", m.get("d", "")).group(1)) for m in marks]  # type: ignore[union-attr]
    by_seconds = sorted(zip((q.seconds_per_token for q in points), xs, strict=True))
    assert [x for _, x in by_seconds] == sorted(xs)


def test_points_say_which_ranks_share_tokens() -> None:
    points = (PredictedPoint(1, 1, 1e-3, 100.0, True, True, sp=8), PredictedPoint(8, 1, 2e-3, 90.0, True, True))
    found = replace(comparison(("tensor-parallel",)), pareto={"tensor-parallel": points})
    assert "1 × sp 8" in shown(found, 100, pareto=True)
    assert "tp 1 × sp 8, batch 1" in pareto(found.pareto)
    assert pareto(found.pareto).count("8 GPUs") == 1


def test_the_page_is_one_file_that_needs_nothing_else() -> None:
    found = comparison(("tensor-parallel", "ladder", "upper-bound"), modelled=True)
    text = page(found, "rewrite predict x", [("flops", "989 TFLOP/s", "NVIDIA H100 data sheet")])
    assert text == page(found, "rewrite predict x", [("flops", "989 TFLOP/s", "NVIDIA H100 data sheet")])
    balance = Balance()
    balance.feed(text)
    assert balance.open == []
    tags = {tag for tag, _ in balance.seen}
    assert not tags & {"script", "link", "img", "iframe", "object", "use"}
    assert not re.search(r"https?://|@import|url\((?!#hatch)", text)
    ids = [attributes["id"] for _, attributes in balance.seen if attributes.get("id")]
    assert len(ids) == len(set(ids))
    drawings = [attributes for tag, attributes in balance.seen if tag == "svg" and "aria-hidden" not in attributes]
    assert all(attributes["role"] == "img" and attributes["aria-label"] for attributes in drawings)
    assert text.count("<desc>") == len(drawings) > 0
    for p in found.predictions:
        for value in (duration(p.seconds_per_token), duration(p.decode.exposed_seconds), p.recipe):
            assert value in text
    assert "MODELLED" in text
    assert "NVIDIA H100 data sheet" in text
    assert "prefers-color-scheme:dark" in text


def test_names_are_text_not_markup() -> None:
    evil = '<b onclick="x()">&amp;[red]'
    found = comparison((evil, "ladder"), notes=(f"{evil} note",), modelled=True)
    found = replace(found, model=evil, fabric=evil, what_if=(evil,), skipped=(SkippedRecipe(evil, evil),))
    text = page(found, evil, [(evil, evil, evil)])
    assert "<b" not in text.replace("<body", "")
    assert "&lt;b onclick=&#34;x()&#34;&gt;&amp;amp;" in text
    assert "[red]" in shown(found, 140, pareto=True)


def test_twenty_recipes_of_eighty_layers_stay_below_a_megabyte() -> None:
    found = comparison([f"{'ladder' * (k % 2)}-recipe-{k}" for k in range(20)], 80)
    assert len(page(found).encode()) < 1_000_000


def test_the_headline_names_the_best_that_can_be_run() -> None:
    whole = comparison(("tensor-parallel", "ladder", "upper-bound"))
    found = whole.predictions

    def said(*predictions: Prediction) -> str:
        return headline(replace(whole, predictions=predictions))

    assert found[1].recipe in said(*found)
    assert "9.00" not in said(found[0], replace(found[1], fits=False), replace(found[2], end_to_end=9.0))
    assert "None of the other recipes is faster." in said(found[0], replace(found[1], end_to_end=0.8))
    assert said() == "No recipe could be predicted."


def exact(name: str, tokens_per_second: float, **other: Any) -> ExactChoice:
    known: dict[str, Any] = dict(tp=8, stages=1, replicas=1, prefill_seconds=4e-3, decode_seconds=3e-3, fits=True)
    return ExactChoice(name, **{**known, **other}, tokens_per_second=tokens_per_second)


def compared(
    found: RecipeComparison, over: ExactChoice, *more: ExactChoice, kind: str = "approximating", **other: Any
) -> RecipeComparison:
    """`found` with exact choices, of which recipes are compared with `over`."""
    tokens = over.tokens_per_second
    changed = (replace(p, kind=kind, end_to_end=p.tokens_per_second / tokens) for p in found.predictions)
    return replace(found, predictions=tuple(changed), exact=(over, *more), over=over.name, **other)


def test_the_verdict_is_the_best_that_the_engine_has() -> None:
    found = replace(comparison(("tensor-parallel", "ladder-upper-half")), engine="vllm", link="pcie", bandwidth=3e9)
    tokens = found.predictions[1].tokens_per_second
    slow = exact("TP 8", tokens / 1.2)
    fast = exact("8 replicas of 1 GPU", tokens * 2, tp=1, replicas=8, switches=("--data-parallel-size",))
    lacking = exact("TP 8, L2 prefetch", tokens * 3, available=False)
    rounding = exact("TP 8, 8-bit prompt sums", tokens * 3, rounds=True)
    kept = verdict(compared(found, fast, slow, lacking, rounding))
    assert kept.startswith("Best as it is: 8 replicas of 1 GPU (vllm: --data-parallel-size)")
    assert (
        "Do not shard it. No recipe gains 5 % over that: keep the model (ladder-upper-half -50.0 % end to end)" in kept
    )
    some = verdict(compared(found, replace(fast, tp=2, replicas=4, name="4 replicas of 2 GPUs"), slow))
    assert "Recipes share layers among all 8 GPUs; --tp 2 compares them in one of these replicas." in some
    better = verdict(compared(found, slow, lacking, rounding, parameters=10**9))
    assert "ladder-upper-half gives 1.20× of that end to end: decode speedup" in better
    assert "nobody measured that it heals at this size" in better
    drafted = exact("TP 8, a draft of 3 tokens", tokens * 2, options=("draft",))
    assert "gives 1.20× of TP 8 end to end (both without a draft)" in verdict(compared(found, slow, drafted))
    same = verdict(compared(found, slow, kind="exact"))
    assert "ladder-upper-half gives 1.20×" in same
    assert "it computes the same" in same
    assert "No recipe" not in verdict(compared(found, exact("TP 8", tokens), kind="exact"))
    assert "Nothing fits" in verdict(compared(found, replace(slow, fits=False)))
    assert verdict(found) == ""


def test_the_next_command_follows_from_the_verdict() -> None:
    found = replace(comparison(("tensor-parallel", "ladder-upper-half")), engine="vllm")
    tokens = found.predictions[1].tokens_per_second
    words = ["predict", "my model", "--recipe", "tensor-parallel", "--tp=8", "--batch", "4"]

    def after(*choices: ExactChoice, **other: Any) -> list[str]:
        return next_words(compared(found, *choices, **other), words, "my model", ["ladder-upper-half"])

    slow = exact("TP 8", tokens / 1.2)
    assert after(slow) == ["rewrite", "my model", "--recipe", "ladder-upper-half", "--tp", "8"]
    replicas = dict(tp=1, replicas=8, options=("replicas", "fused-norm"), switches=("--data-parallel-size", "-cc.x=1"))
    fast = exact("8 replicas of 1 GPU", tokens * 2, **replicas)
    assert after(fast) == ["vllm", "serve", "my model", "--data-parallel-size", "8"]  # one GPU sums nothing
    fast = replace(fast, tp=2, replicas=4)
    assert after(fast) == ["rewrite", "predict", "my model", "--recipe", "tensor-parallel", "--batch", "4", "--tp", "2"]
    flags = ["--tensor-parallel-size", "2", "--data-parallel-size", "4", "-cc.x=1"]
    one_shot = exact("TP 8, one-shot", tokens * 2, options=("one-shot-pcie",), switches=("VLLM_SUMS=1",))
    assert after(one_shot) == ["VLLM_SUMS=1", "vllm", "serve", "my model", "--tensor-parallel-size", "8"]
    assert after(fast, kind="timing only") == ["vllm", "serve", "my model", *flags]
    assert after(slow, engine="tensorrt-llm", kind="timing only") == []
    assert after(replace(slow, fits=False))[-2:] == ["--tp", "16"]
    assert next_words(found, words, "my model") == []
    said = to_json(compared(found, slow), after(slow))[-1]
    assert said["next"] == "rewrite 'my model' --recipe ladder-upper-half --tp 8"
    assert said["verdict"].startswith("Best as it is")


def test_the_verdict_says_what_it_rests_on() -> None:
    found = replace(comparison(("tensor-parallel", "ladder-upper-half")), engine="vllm", link="pcie", bandwidth=3e9)
    over = exact("TP 8", found.predictions[1].tokens_per_second / 1.2)

    def said(**first: Any) -> str:
        one = compared(found, over)
        return verdict(replace(one, predictions=(replace(one.predictions[0], **first), *one.predictions[1:])))

    assert "all-reduces measured on such a machine, computing by roofline" in said()
    assert f"{published()['pcie']['points']} published figures over such a link" in said()
    assert "all-reduces extrapolated from those among other numbers of GPUs" in said(all_reduces="extrapolated")
    assert "all-reduces by formula" in said(all_reduces="by formula")
    assert said(all_reduces="none").endswith("Rests on: computing by roofline.")
    decode = replace(found.predictions[0].decode, measured_seconds=found.predictions[0].decode.compute_seconds)
    assert "100 % of the computing measured;" in said(decode=decode)
    assert "100 % of the computing extrapolated from kernels of a100_sxm" in said(decode=decode, kernels_of="a100_sxm")
    fast, unknown = (compared(found, over, **link) for link in ({"bandwidth": 9e11}, {"link": ""}))
    assert "no published figure over such a link" in verdict(fast)
    assert "no published figure over such a link" in verdict(unknown)


def test_the_verdict_says_whether_a_recipe_was_seen_to_heal() -> None:
    found = replace(comparison(("tensor-parallel", "ladder-upper-half")), engine="vllm")
    over = exact("TP 8", found.predictions[1].tokens_per_second / 1.2)
    small = verdict(compared(found, over, parameters=134515008))
    ended = "SmolLM2-135M-Instruct ended 2.6 % above its loss, Gemma-3-270M ended 29.7 % above its loss"
    assert f"it heals on some models: {ended}" in small
    one = replace(found.predictions[1], recipe="ladder-own-partial", tp=3)
    assert "it heals: SmolLM2-135M-Instruct ended 7.7 % above" in heals(one, 134515008)
    assert "nobody measured that it heals at this size on 8 ranks (SmolLM2" in heals(replace(one, tp=8), 134515008)


def test_exact_choices_are_a_table_that_says_what_the_engine_lacks() -> None:
    found = replace(comparison(), engine="vllm", over="TP 8")
    found = replace(found, exact=(exact("TP 8", 100.0), exact("TP 8, L2 prefetch", 120.0, available=False)))
    for width in (140, 90):
        lines = shown(found, width).splitlines()
        assert any(line.startswith("The model as it is, in vllm") for line in lines)
        assert any("L2 prefetch" in line and "1.20×" in line and "not in this engine" in line for line in lines)
        assert all(len(line) <= width for line in lines)
    assert "not in this engine" in shown(found, 40).replace("\n", " ")
    assert "not in this engine" in page(found)


def test_the_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "report.html"
    write_text(file, "old", "--html")
    with pytest.raises(UnicodeEncodeError):
        write_text(file, "new \ud800", "--html")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]
    with pytest.raises(RewriterError, match="there is no directory"):
        write_text(tmp_path / "missing" / "report.html", "new", "--html")
    with pytest.raises(RewriterError, match="it is a directory"):
        write_text(tmp_path, "new", "--html")
