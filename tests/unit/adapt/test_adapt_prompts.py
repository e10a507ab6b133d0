"""Healing of models that rewire tokens of the prompt alone: which tokens are rewired, what counts, what is learned."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import adapted
import pytest
import torch
from adapt_runs import run
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, DynamicCache

from rewriter import RewriterError
from rewriter.adapt import objective
from rewriter.adapt.adaptation import adapt
from rewriter.adapt.loop import Order, PromptOrder
from rewriter.adapt.models import HuggingFaceModel, freeze_unchanged, share_frozen, trunk_of
from rewriter.adapt.options import AdaptOptions
from rewriter.adapt.prompt_weights import Prefilled, require_keys
from rewriter.adapt.prompts import EXACT_ROWS, REPEATED_ROWS, PromptRows, phase_of
from rewriter.adapt.ranks import RunRanks
from rewriter.adapt.schedule import plan, schedule
from rewriter.adapt.token_rows import load_rows
from rewriter.check.drift import load_tokenizer
from rewriter.convert.rewritten_source import open_output, source_config
from rewriter.ir.phases import PromptPhase
from rewriter.output.manifest import read_manifest
from rewriter.runtime.replicas import IGNORED

PHASE = PromptPhase(exact_tail=3, exact_head=2)
SHORTEST = 6
SIZES = ((20, 15, 5), (40,), (6, 7, 27))
LENGTH = 40
ON_CPU = {"use_cpu": True}


class Packed(Dataset[dict[str, Tensor]]):
    """Rows of segments of the `SIZES`, every token a target but the first of a segment."""

    def __len__(self) -> int:
        return len(SIZES)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(3, adapted.VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(index))
        segments = torch.cat([torch.full((size,), i) for i, size in enumerate(SIZES[index])])
        positions = torch.cat([torch.arange(size) for size in SIZES[index]])
        labels = torch.where(positions == 0, IGNORED, ids)
        return {"input_ids": ids, "labels": labels, "position_ids": positions, "segment_ids": segments}


def cuts(row: dict[str, Tensor], index: int) -> list[int | None]:
    """The length of each segment's prompt, by its last rewired token; None without one."""
    found, at = [], 0
    for size in SIZES[index]:
        own = torch.nonzero(row["rewired"][at : at + size]).flatten().tolist()
        found.append(own[-1] + 1 + PHASE.exact_tail if own else None)
        assert own == list(range(PHASE.exact_head, own[-1] + 1)) if own else True
        at += size
    return found


def counted(row: dict[str, Tensor]) -> list[int]:
    """Places of the tokens whose predictions count."""
    return torch.nonzero(row["labels"][1:] != IGNORED).flatten().tolist()


# Which tokens are rewired, and what counts


def test_cuts_follow_from_seed_row_and_epoch_and_cover_all_lengths() -> None:
    one, same, other = PromptRows(Packed(), PHASE, 7), PromptRows(Packed(), PHASE, 7), PromptRows(Packed(), PHASE, 8)
    seen: dict[tuple[int, int], set[int | None]] = {}
    without = 0
    epochs = 400
    for number in range(epochs * len(SIZES)):
        index, row = number % len(SIZES), one[number]
        assert all(torch.equal(row[name], value) for name, value in same[number].items())
        drawn = cuts(row, index)
        if not row["rewired"].any():
            without += 1
            assert torch.equal(row["labels"], Packed()[index]["labels"]), "all tokens count"
            continue
        for segment, cut in enumerate(drawn):
            seen.setdefault((index, segment), set()).add(cut)
    for (index, segment), found in seen.items():
        size = SIZES[index][segment]
        assert found == (set(range(SHORTEST, size)) or {None}), (index, segment)
    assert len(seen) == 7
    assert abs(without / (epochs * len(SIZES)) - EXACT_ROWS) < 0.05
    rows = [(mine["rewired"], theirs["rewired"]) for mine, theirs in ((one[i], other[i]) for i in range(60))]
    assert any(not torch.equal(a, b) for a, b in rows), "the seed has no say"
    assert any(not torch.equal(one[i]["rewired"], one[i + 3]["rewired"]) for i in range(60)), "nor has the epoch"


def test_a_share_of_prompts_is_followed_by_rewired_tokens_of_its_own() -> None:
    rows, plain = PromptRows(Packed(), PHASE, 5, repeats=True), Packed()
    repeats, starts, prompted = 0, set(), 0
    for number in range(300 * len(SIZES)):
        index, row = number % len(SIZES), rows[number]
        if not row["rewired"].any():
            assert torch.equal(row["input_ids"], plain[index]["input_ids"])
            continue
        prompted += 1
        changed, at = False, 0
        for size, cut in zip(SIZES[index], cuts(row, index), strict=True):
            own, before = row["input_ids"][at : at + size], plain[index]["input_ids"][at : at + size]
            labels = row["labels"][at : at + size]
            assert torch.equal(own[: cut or size], before[: cut or size]), "the prompt itself"
            if cut is not None and not torch.equal(own, before):
                changed = True
                prompt = own[PHASE.exact_head : cut - PHASE.exact_tail].tolist()
                count = min(len(prompt), size - cut)
                again = own[cut : cut + count].tolist()
                found = [i for i in range(len(prompt) - count + 1) if prompt[i : i + count] == again]
                assert found, "no run of rewired tokens"
                starts.update(found)
                assert torch.equal(own[cut + count :], before[cut + count :])
            if cut is not None:
                assert torch.equal(labels[cut:], own[cut:])
            at += size
        repeats += changed
    assert abs(repeats / prompted - REPEATED_ROWS) < 0.05
    assert len(starts) > 10


@pytest.mark.parametrize("seed", [0, None])
def test_what_exact_tokens_after_the_rewired_ones_predict_counts(seed: int | None) -> None:
    """To train on; to measure a loss, what comes after the prompt."""
    rows = PromptRows(Packed(), PHASE, seed)
    for number in range(60):
        index, row = number % len(SIZES), rows[number]
        if not row["rewired"].any():
            continue
        expected, at = [], 0
        for size, cut in zip(SIZES[index], cuts(row, index), strict=True):
            for place in range(size - 1):  # the last one predicts nothing
                first = None if cut is None else cut - PHASE.exact_tail if seed is not None else cut - 1
                if first is not None and place >= first:
                    expected.append(at + place)
            at += size
        assert counted(row) == expected
        assert not row["rewired"][expected].any()


def test_a_loss_is_measured_after_four_fifths_of_an_example() -> None:
    rows = PromptRows(Packed(), PHASE)
    assert [cuts(rows[i], i) for i in range(3)] == [[16, 12, None], [32], [None, 6, 21]]


def test_targets_of_an_answer_come_after_its_prompt() -> None:
    class Answers(Packed):
        def __getitem__(self, index: int) -> dict[str, Tensor]:
            row = super().__getitem__(index)
            return row | {"labels": torch.where((row["position_ids"] // 5) % 2 == 1, row["labels"], IGNORED)}

    rows = PromptRows(Answers(), PHASE, 3)
    found = [rows[1 + 3 * epoch] for epoch in range(200)]
    ends = {cuts(row, 1)[0] for row in found if row["rewired"].any()}
    assert ends == set(range(SHORTEST, 40)), "a target is left after every one of them"
    assert all(counted(row) for row in found)


def test_rows_have_the_same_prompts_on_any_number_of_ranks() -> None:
    seen = []
    for replicas in (1, 2):
        sizes = schedule({"num_train_epochs": 3}, None, 50, replicas)
        orders = [PromptOrder(50, sizes, RunRanks(r, replicas), 7) for r in range(replicas)]
        plain = [Order(50, sizes, RunRanks(r, replicas), 7) for r in range(replicas)]
        for numbered, rows in zip(orders, plain, strict=True):
            assert [[n % 50 for n in batch] for batch in numbered] == list(rows)
        each, lists = range(sizes.accumulation), [list(order) for order in orders]
        seen.append([n for s in range(sizes.steps) for o in lists for i in each for n in o[s * sizes.accumulation + i]])
    assert seen[0] == seen[1]
    assert sorted(seen[0][50:100]) == list(range(50, 100)), "the second epoch has numbers of its own"


def test_rows_that_hold_no_prompt_are_refused(tmp_path: Path) -> None:
    directory, where = adapted.directory("prompt-ladder"), {"out": tmp_path / "out", "data": adapted.text_file()}
    with pytest.raises(RewriterError, match=r"--length 6: .* fewer than 7 tokens .* --length 256, or less from 7"):
        adapt(directory, **where, options=AdaptOptions(length=6, settings=ON_CPU))
    short = tmp_path / "short.jsonl"
    short.write_text('{"text": "x"}\n' * 40)
    with pytest.raises(RewriterError, match=r"no example has 7 tokens.*a greater --length"):
        adapt(directory, out=tmp_path / "out", data=short, options=AdaptOptions(length=24, settings=ON_CPU))
    options = AdaptOptions(length=24, settings=ON_CPU | {"max_steps": 1})
    with pytest.raises(RewriterError, match=r"none of the 40 texts to train on has 7 tokens.*a greater --length"):
        adapt(directory, **where | {"data": short}, evaluation=where["data"], options=options)
    short.write_text('{"text": "for else in class"}\n' * 20 + '{"text": "x"}\n' * 3)
    done = adapt(directory, **where | {"data": short}, evaluation=where["data"], options=options).adaptation["counts"]
    assert done["segments_without_rewired_tokens"] == 3, "the report says how many teach nothing"


# What is learned


@functools.cache
def models() -> tuple[Any, Any]:
    """The original, and the rewritten model."""
    path = adapted.directory("prompt-ladder")
    original = AutoModelForCausalLM.from_pretrained(adapted.root() / "llama", dtype=torch.float32)
    return original.eval(), loaded(path)


def loaded(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True, dtype=torch.float32).eval()


def divergences(original: Any, student: Any, row: dict[str, Tensor], sizes: tuple[int, ...], flip: bool) -> Tensor:
    """KL at the tokens that count, summed: each segment computed alone, token by token."""
    total, at = torch.zeros(()), 0
    for size in sizes:
        ids, rewired = row["input_ids"][None, at : at + size], row["rewired"][None, at : at + size]
        with torch.no_grad():
            theirs = original(input_ids=ids).logits[0].softmax(-1)
            ours = student(input_ids=ids, rewired=~rewired if flip else rewired).logits[0].log_softmax(-1)
        for place in range(size - 1):
            if row["labels"][at + place + 1] != IGNORED:
                total = total + (theirs[place] * (theirs[place].log() - ours[place])).sum()
        at += size
    return total


def test_the_loss_is_that_of_the_tokens_that_count() -> None:
    original, student = models()
    rows = PromptRows(Packed(), PHASE, 1)
    drawn = [n for n in range(12) if rows[n]["rewired"].any()][:3]
    batch = objective.stack([rows[n] for n in drawn])
    options = AdaptOptions(method="distill")
    loss_of = objective.loss_of(options, torch.no_grad, HuggingFaceModel(original, None), None)
    found = loss_of(HuggingFaceModel(student, None), batch, student)["loss"]
    expected, inverted = (
        sum(divergences(original, student, rows[n], SIZES[n % 3], flip) for n in drawn) for flip in (False, True)
    )
    assert torch.allclose(found, expected, rtol=1e-4)
    assert not torch.allclose(found, inverted, rtol=0.05), "the mask has no say"


def after_prompts(model: Any) -> tuple[float, float]:
    """KL of a model from the original, on rows that no run saw: after prompts, and where all tokens are exact."""
    original, _ = models()
    rows, sums = PromptRows(held_out(), PHASE), []
    for exact in (False, True):
        batch = objective.stack([rows[i] for i in range(len(rows))])
        batch |= {"rewired": torch.zeros_like(batch["rewired"])} if exact else {}
        with torch.no_grad():
            theirs, ours = (HuggingFaceModel(m, None)(batch) for m in (original, model))
        targets = objective.own_targets(batch["labels"], ours.indices)
        sums.append(float(objective.divergence(ours, theirs, targets)) / int((targets != IGNORED).sum()))
    return sums[0], sums[1]


@functools.cache
def held_out() -> Dataset[dict[str, Tensor]]:
    """Text that no run is trained on."""
    tokenizer = load_tokenizer(str(adapted.root() / "llama"))
    return load_rows(adapted.text_file(20, 1), tokenizer, length=adapted.LENGTH)


TRAINED = {"max_steps": 40, "learning_rate": 3e-3, "use_cpu": True}


def heal(directory: Path, out: Path, settings: dict[str, Any] | None = None, **options: Any) -> Any:
    return fit(directory, out, settings=TRAINED | (settings or {}), prompt_weights=False, **options)


def fit(directory: Path, out: Path, **options: Any) -> Any:
    where = {"data": adapted.text_file(), "evaluation": adapted.text_file(20, 1), "out": out, "verify": "none"}
    chosen = {"length": adapted.LENGTH, "settings": {"use_cpu": True}, "prompt_weights": True, **options}
    return adapt(directory, **where, options=AdaptOptions(**chosen))


def test_one_set_of_weights_heals_the_prompt_and_keeps_the_exact_phase(tmp_path: Path) -> None:
    before, exact = after_prompts(models()[1])
    assert exact < 1e-6 < 0.01 < before
    report = heal(adapted.directory("prompt-ladder"), tmp_path / "out")
    after, exact = after_prompts(loaded(tmp_path / "out"))
    assert after < 0.75 * before
    assert exact < 0.4 * before
    done = read_manifest(tmp_path / "out").adaptation
    assert done is not None
    assert "after prompts of four fifths" in done.evaluation
    assert abs(report.losses["after"] - report.losses["original"]) < 0.3


def test_an_inverted_mask_does_not_heal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A seeded fault: the student is told that exact tokens are rewired, and the other way round."""
    plain = PromptRows.__getitem__

    def inverted(self: PromptRows, index: int) -> dict[str, Tensor]:
        row = plain(self, index)
        return row | {"rewired": ~row["rewired"]}

    monkeypatch.setattr(PromptRows, "__getitem__", inverted)
    heal(adapted.directory("prompt-ladder"), tmp_path / "out")
    monkeypatch.undo()
    before, _ = after_prompts(models()[1])
    after, exact = after_prompts(loaded(tmp_path / "out"))
    assert after > 0.75 * before or exact > 0.4 * before


@pytest.mark.slow
def test_a_resumed_run_sees_the_same_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rewriter.adapt.loop import AdaptTrainer, read_metrics

    files = (adapted.directory("prompt-ladder"), adapted.text_file(), adapted.text_file(20, 1))
    options: dict[str, Any] = {"files": files, "method": "distill", "train": "all"}
    run(tmp_path / "whole", settings={"save_steps": 2}, **options)
    step, calls = AdaptTrainer.training_step, []

    def stopped(self: AdaptTrainer, *args: Any, **kwargs: Any) -> Tensor:
        calls.append(1)
        if len(calls) == 2 * 3:
            raise KeyboardInterrupt
        return step(self, *args, **kwargs)

    monkeypatch.setattr(AdaptTrainer, "training_step", stopped)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "out", settings={"save_steps": 2}, **options)
    monkeypatch.undo()
    run(tmp_path / "out", resume=True, settings={"save_steps": 2}, **options)
    ours, theirs = (read_metrics(tmp_path / name / "training") for name in ("out", "whole"))
    assert [line["loss"] for line in ours] == [line["loss"] for line in theirs]


@pytest.mark.parametrize("recipe", ["prompt-ladder", "prompt-desync"])
def test_layers_below_are_computed_once_for_rewired_tokens_too(recipe: str) -> None:
    student = loaded(adapted.directory(recipe, 2))  # which also writes the original
    original = loaded(adapted.root() / "llama")
    freeze_unchanged(student)
    share_frozen(student, original)
    trunk = trunk_of(student, original)
    assert (trunk is not None) == (recipe == "prompt-ladder")
    if trunk is None:
        return
    batch = objective.stack([PromptRows(Packed(), PHASE, 1)[n] for n in range(3)])
    theirs, ours = HuggingFaceModel(original, None), HuggingFaceModel(student, None)
    losses = [
        objective.loss_of(AdaptOptions(method="distill"), torch.no_grad, theirs, t)(ours, batch, student)["loss"]
        for t in (None, trunk)
    ]
    assert torch.allclose(*losses, rtol=1e-5)


def test_weights_of_both_phases_have_a_lower_rate() -> None:
    options = AdaptOptions(method="distill", tokens=24_576)
    given: dict[str, Any] = {"rows": 96, "length": 256, "width": 576, "replicas": 1, "device": torch.device("cpu")}
    rates = [plan(None, options, **given, both_phases=both)[0]["learning_rate"] for both in (False, True)]
    assert rates == [5e-4, 1e-4]


def test_the_original_of_a_phased_output_has_no_phase() -> None:
    opened = open_output(adapted.directory("prompt-ladder"))
    assert opened.config["rewriter_phase"] == {"exact_tail": 3, "exact_head": 2}
    assert not [name for name in source_config(opened) if name.startswith("rewriter")]
    assert phase_of(opened, AdaptOptions()) == phase_of(opened, AdaptOptions(tp=2)) == PHASE
    assert phase_of(open_output(adapted.directory("ladder")), AdaptOptions()) is None


# Weights of the prompt's own


def key_errors(student: Any, ids: Tensor) -> list[float]:
    """By layer, the squared error of keys and values over their squares, of all tokens of one row."""
    caches = []
    for model, told in ((models()[0], {}), (student, {"rewired": torch.arange(ids.shape[1])[None] >= 2})):
        cache = DynamicCache()
        with torch.no_grad():
            model.model(input_ids=ids, use_cache=True, past_key_values=cache, **told)
        caches.append([(layer.keys, layer.values) for layer in cache.layers])
    return [
        sum(float((mine - wanted).square().sum() / wanted.square().sum()) for wanted, mine in zip(*pair, strict=True))
        for pair in zip(*caches, strict=True)
    ]


@pytest.mark.parametrize("recipe", ["prompt-ladder", "prompt-desync"])
def test_prompt_weights_come_nearer_to_the_keys_and_values_of_the_original(recipe: str, tmp_path: Path) -> None:
    source = adapted.directory(recipe, 2)
    report = fit(source, tmp_path / "out")
    ids = held_out()[0]["input_ids"][None, :30]
    before, after = key_errors(loaded(source), ids), key_errors(loaded(tmp_path / "out"), ids)
    assert sum(after) < 0.9 * sum(before), "of random layers, little is linear"
    done = read_manifest(tmp_path / "out").adaptation
    assert done is not None
    assert (done.method, done.options) == (
        "prompt weights",
        {"prompt_weights": True, "train": "rewritten", "packing": False, "length": adapted.LENGTH, "tokens": 512},
    )
    assert set(report.losses) == {"original", "before", "after"}
    first = 1 if recipe == "prompt-ladder" else 0
    kept, made = load_file(source / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    changed = {name for name in kept if not torch.equal(kept[name], made[name])}
    assert changed
    assert all(name.startswith("model.layers.") and int(name.split(".")[2]) >= first for name in changed)
    assert {name.split(".")[-2] for name in changed} == {"k_proj", "v_proj"}
    assert (done.steps, done.settings) == (1, {"seed": 0})


def test_the_original_reads_the_keys_of_the_prompt() -> None:
    """Prompt weights are judged by what the original makes of their cache: of the original's own, what it would."""
    original, student = models()
    rows = PromptRows(Packed(), PHASE)
    batch = {name: value[None] for name, value in rows[1].items()}
    alone = HuggingFaceModel(original, None)(batch)
    targets = objective.own_targets(batch["labels"], alone.indices)
    with torch.no_grad():
        own, handed, whole = (
            float(objective.cross_entropy(model(batch), targets))
            for model in (
                HuggingFaceModel(original, None),
                Prefilled(HuggingFaceModel(student, None), HuggingFaceModel(original, None)),
                HuggingFaceModel(student, None),
            )
        )
    assert abs(handed - whole) < 1e-3, "with the same weights it is what the two phases compute"
    assert abs(handed - own) > 1e-2


@pytest.mark.slow
def test_files_that_prompt_weights_leave_as_they_were_are_links(tmp_path: Path) -> None:
    source = split_over_files(adapted.directory("prompt-ladder"), tmp_path / "source")
    fit(source, tmp_path / "out", link=True)
    linked = {p.name: os.path.samefile(p, source / p.name) for p in (tmp_path / "out").glob("*.safetensors")}
    for name, same in linked.items():
        with safe_open(source / name, "pt") as held, safe_open(tmp_path / "out" / name, "pt") as made:
            equal = all(torch.equal(held.get_tensor(t), made.get_tensor(t)) for t in held.keys())  # noqa: SIM118
        assert same == equal, name
    assert set(linked.values()) == {True, False}


def split_over_files(source: Path, out: Path) -> Path:
    """The model of an output, its weights in several files, rewritten again."""
    from rewriter.api import convert
    from rewriter.convert.save_options import SaveOptions

    model = AutoModelForCausalLM.from_pretrained(adapted.root() / "llama", dtype=torch.bfloat16)
    model.save_pretrained(out.with_name("original"), max_shard_size="20KB")
    for file in (adapted.root() / "llama").glob("token*"):
        (out.with_name("original") / file.name).write_bytes(file.read_bytes())
    convert(out.with_name("original"), adapted.recipe_of("prompt-ladder"), out=out, options=SaveOptions(verify="none"))
    return out


def refusals() -> Iterator[tuple[dict[str, Any], str]]:
    yield {"method": "sft"}, "--prompt-weights with --method sft"
    yield {"tp": 2}, "--prompt-weights with --tp or --sp"
    yield {"zero": "3"}, "--prompt-weights with --zero 3"
    yield {"lora": 4}, "--prompt-weights with --lora"
    yield {"settings": {"learning_rate": 1e-3, "bf16": True}}, "--prompt-weights with --set bf16, learning_rate"
    yield {"temperature": 2.0}, "--prompt-weights with --temperature"


@pytest.mark.parametrize(("options", "message"), [*refusals()], ids=lambda x: x if isinstance(x, str) else "")
def test_prompt_weights_refuse_what_has_no_meaning_for_them(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RewriterError, match=message):
        AdaptOptions(prompt_weights=True, **options)


def test_prompt_weights_need_a_phase_and_keys(tmp_path: Path) -> None:
    from transformers import AutoConfig

    with pytest.raises(RewriterError, match=r"computes all tokens alike.*phase: prompt"):
        fit(adapted.directory("ladder"), tmp_path / "out")
    require_keys(AutoConfig.for_model("gemma2"))
    for kind in ("qwen3_next", "mamba2"):
        with pytest.raises(RewriterError, match=rf"--prompt-weights: {kind} .*LinearAttentionLayer"):
            require_keys(AutoConfig.for_model(kind))
