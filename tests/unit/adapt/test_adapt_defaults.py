"""`rewrite adapt` without settings: what follows from the number of tokens, text of the original's own, and layers
that are computed once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import adapted
import pytest
import torch
from adapt_runs import run
from repository import TINY_LLAMA
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rewriter import RewriterError
from rewriter.adapt import adaptation, objective, self_written
from rewriter.adapt.adaptation import adapt
from rewriter.adapt.data_set import OwnText
from rewriter.adapt.loop import read_metrics
from rewriter.adapt.models import HuggingFaceModel, freeze_unchanged, share_frozen, trunk_of
from rewriter.adapt.options import AdaptOptions
from rewriter.adapt.ranks import RunRanks
from rewriter.adapt.schedule import HIGHEST_RATE, WIDTH, Budget, plan
from rewriter.adapt.self_written import chat_turns
from rewriter.adapt.self_written import self_written as write
from rewriter.api import convert
from rewriter.check.drift import load_tokenizer
from rewriter.common.run_context import RunContext
from rewriter.common.text_settings import stream_width
from rewriter.convert.rewritten_source import open_output
from rewriter.convert.save_options import SaveOptions
from rewriter.output.manifest import read_manifest

CPU = torch.device("cpu")
CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache for what models write that is this test's alone."""
    place = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(place))
    return place


# What follows from the number of tokens


def test_rates_fall_and_steps_grow_with_the_tokens() -> None:
    budgets = [Budget(tokens) for tokens in (10_000, 24_576, 10**6, 33 * 10**6, 3 * 10**9)]
    rates = [budget.settings(CPU)["learning_rate"] for budget in budgets]
    assert rates == sorted(rates, reverse=True)
    assert (rates[2], rates[3]) == (1.5e-4, 5e-5)
    assert Budget(3 * 10**9, 4096).rate == 5e-6, "the paper's, of an 8B"
    assert Budget(10**6, 512).rate == 2 * Budget(10**6, 1024).rate
    assert Budget(24_576, 8).rate == HIGHEST_RATE
    steps = [budget.tokens // (budget.length(8192) * budget.rows(budget.length(8192), 1)) for budget in budgets]
    assert steps == sorted(steps)
    assert steps[1] >= 40, "with fewer steps a small run learns nothing"
    assert [budget.length(8192) for budget in budgets] == [256, 256, 512, 4096, 4096]
    for budget in budgets:
        for replicas in (1, 3, 8):
            assert budget.rows(64, replicas) % replicas == 0


def test_a_backward_pass_on_a_cpu_takes_no_more_tokens_than_it_has_to() -> None:
    for given, micro in (({}, 2), ({"per_device_train_batch_size": 4}, 4), ({"per_device_train_batch_size": 1}, 1)):
        options = AdaptOptions(method="distill", tokens=10**6, settings=given)
        _, sizes = plan(None, options, rows=300, length=512, width=576, replicas=1, device=CPU)
        assert (sizes.micro_batch, sizes.batch, sizes.micro_batch * sizes.accumulation) == (micro, 4, 4)
    options = AdaptOptions(method="distill", tokens=10**6)
    for length, device, micro in ((2048, CPU, 1), (256, torch.device("cuda"), 8)):
        _, sizes = plan(None, options, rows=300, length=length, width=576, replicas=1, device=device)
        assert sizes.micro_batch == micro


def test_bf16_where_the_device_multiplies_it_and_matrices_are_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    for told, expected in (({"avx512_bf16": True}, True), ({"amx_bf16": True}, True), ({"avx512_f": True}, False)):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda told=told: told, raising=False)
        assert Budget(10**6, 1024).settings(CPU)["bf16"] == expected
        assert not Budget(10**6, 256).settings(CPU)["bf16"]
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    assert not Budget(10**6, 1024).settings(CPU)["bf16"], "torch does not say"


@pytest.mark.parametrize("method", ["distill", pytest.param("sft", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_bf16_is_what_student_and_teacher_compute_in(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.dtype] = []
    computed = HuggingFaceModel.__call__

    def watched(self: HuggingFaceModel, *args: Any, **kwargs: Any) -> Any:
        layer = self.module.model.layers[-1].mlp.down_proj  # type: ignore[union-attr, index]
        hook = layer.register_forward_hook(lambda m, a, y: seen.append(y.dtype))
        found = computed(self, *args, **kwargs)
        hook.remove()
        return found

    monkeypatch.setattr(HuggingFaceModel, "__call__", watched)
    files = (adapted.directory("ladder-upper-half"), adapted.text_file(), adapted.text_file(20, 1))
    for bf16, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        run(tmp_path / str(bf16), files=files, method=method, settings={"bf16": bf16, "max_steps": 1})
        assert set(seen) == {dtype}
        seen.clear()


@pytest.mark.parametrize(
    ("config", "width"),
    [({"hidden_size": 64}, 64), ({"n_embd": 96}, 96), ({"text_config": {"hidden_size": 640}}, 640), ({}, 1024)],
)
def test_the_width_is_that_of_the_stream(config: dict[str, Any], width: int) -> None:
    assert (stream_width(config) or WIDTH) == width


def test_what_is_rewritten_is_trained_where_it_can_be_apart() -> None:
    assert AdaptOptions().resolved(True).train == "rewritten"
    for options in ({"lora": 4}, {"tp": 2}, {"zero": "3"}, {"ep": 2}, {"train": "all"}):
        assert AdaptOptions(**options).resolved(True).train == "all"  # type: ignore[arg-type]
    for options in ({}, {"from_scratch": True}, {"method": "sft"}):
        assert AdaptOptions(**options).resolved(False).train == "all"  # type: ignore[arg-type]


def test_without_settings_a_run_distils_what_the_original_wrote(tmp_path: Path, own_cache: Path) -> None:
    directory = adapted.directory("ladder-upper-half")
    report = adapt(directory, out=tmp_path / "out", verify="none", options=AdaptOptions(tokens=6144, settings=ON_CPU))
    done = read_manifest(tmp_path / "out").adaptation
    assert done is not None
    assert (done.method, done.options) == ("distill", {"tokens": 6144, "train": "rewritten"})
    assert 0.8 * 6144 < done.tokens <= 6144
    width = stream_width(json.loads((directory / "config.json").read_text()))
    assert width is not None
    assert done.settings["learning_rate"] == Budget(done.tokens, width).rate
    assert not done.settings["bf16"], "for such small matrices"
    assert done.settings["warmup_steps"] == -(-done.steps // 20)
    assert report.losses["after"] < report.losses["before"]
    assert done.data.startswith("self-")
    assert len(list(own_cache.rglob("part-*.jsonl"))) == 5, "of 1,536 tokens each"


ON_CPU = {"use_cpu": True}


def test_settings_that_are_given_stay_and_steps_follow_from_the_tokens(tmp_path: Path) -> None:
    given = {**ON_CPU, "learning_rate": 1e-2, "gradient_accumulation_steps": 1, "per_device_train_batch_size": 2}
    options = AdaptOptions(tokens=960, length=48, settings=given)
    adapt(adapted.directory("ladder"), data=adapted.text_file(), out=tmp_path / "out", verify="none", options=options)
    done = read_manifest(tmp_path / "out").adaptation
    assert done is not None
    assert (done.settings["learning_rate"], done.rows_per_step, done.steps) == (1e-2, 2, 10)


@pytest.mark.slow
def test_what_was_trained_learns_from_the_data_where_no_original_is_given(tmp_path: Path) -> None:
    settings = {**ON_CPU, "max_steps": 1}
    run(tmp_path / "first", settings=settings)
    where: dict[str, Any] = {"out": tmp_path / "second", "verify": "none"}
    adapt(tmp_path / "first", data=adapted.text_file(), **where, options=AdaptOptions(length=48, settings=settings))
    done = read_manifest(tmp_path / "second").adaptation
    assert done is not None
    assert done.method == "sft"
    for data in (None, "self:100"):
        with pytest.raises(RewriterError, match=r"the original is not known.*--teacher"):
            adapt(tmp_path / "first", data=data, out=tmp_path / "third", options=AdaptOptions())


# Text of the original's own


def test_text_is_written_once_and_again_the_same(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapted.directory("ladder")
    source = adapted.root() / "llama"
    first = write(source, 2000, CPU, RunContext()).read_text()
    held = write(source, 2000, CPU, RunContext(), held_out=True).read_text()
    assert not set(first.splitlines()) & set(held.splitlines())
    parts = sorted(own_cache.rglob("part-*.jsonl"))
    assert len(parts) == 2
    kept = parts[0].read_text()
    parts[0].unlink()
    fewer = write(source, 1000, CPU, RunContext()).read_text()
    assert first.startswith(fewer)
    assert 0 < len(fewer) < len(first)
    assert parts[0].read_text() == kept
    monkeypatch.setattr(self_written, "load_model", lambda *_: pytest.fail("it was written already"))
    assert write(source, 2000, CPU, RunContext()).read_text() == first
    model = AutoModelForCausalLM.from_pretrained(source)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(2)
    model.save_pretrained(tmp := own_cache / "other")
    load_tokenizer(str(source)).save_pretrained(tmp)
    with pytest.raises(pytest.fail.Exception, match="written already"):
        write(tmp, 2000, CPU, RunContext())


@pytest.mark.slow
def test_text_is_that_of_the_source_whatever_order_its_channels_are_in(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_written, "ROW", 48)  # tokens
    tiny = TINY_LLAMA
    convert(tiny, "desync-2x-sum", out=tmp_path / "out", tp=2, options=SaveOptions(verify="none"))
    opened = open_output(tmp_path / "out")
    text = OwnText(opened, AdaptOptions(), None, True, RunRanks(), CPU, RunContext()).file_of("self:1000")
    before, after = (load_file(place / "model.safetensors") for place in (tiny, tmp_path / "out"))
    assert any(not torch.equal(before[name], after[name]) for name in before), "channels are permuted"
    assert text == str(write(tiny, 1000, CPU, RunContext()))
    assert len(list(own_cache.rglob("part-*.jsonl"))) == 1


def test_what_is_written_follows_what_the_model_predicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the original's own loss: its text is likely under it, the same tokens in another order are not."""
    monkeypatch.setattr(self_written, "ROW", 48)  # tokens
    source = TINY_LLAMA
    lines = write(source, 1500, CPU, RunContext()).read_text().splitlines()
    tokenizer = load_tokenizer(str(source))
    rows = [tokenizer(json.loads(line)["text"], return_tensors="pt")["input_ids"] for line in lines]
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)

    def loss(of: list[torch.Tensor]) -> float:
        with torch.no_grad():
            return sum(float(model(input_ids=ids, labels=ids).loss) for ids in of) / len(of)

    shuffled = [row[:, torch.randperm(row.shape[1], generator=torch.Generator().manual_seed(0))] for row in rows]
    assert loss(rows) < loss(shuffled) - 1


def test_an_instruct_model_writes_both_sides_of_a_conversation(tmp_path: Path) -> None:
    source = adapted.write_source(tmp_path / "chat")
    tokenizer = load_tokenizer(str(source))
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(source)
    turns = chat_turns(load_tokenizer(str(source)))
    assert turns is not None
    assert tokenizer.decode(turns.start) == "<|user|>"
    assert tokenizer.decode(turns.answer) == f"{tokenizer.eos_token}<|assistant|>"
    assert tokenizer.decode(turns.question) == f"{tokenizer.eos_token}<|user|>"
    texts = [json.loads(line)["text"] for line in write(source, 1536, CPU, RunContext()).read_text().splitlines()]
    chats = [text for text in texts if text.startswith("<|user|>")]
    assert len(chats) == 16, "half of the streams"
    for text in chats:
        question, _, answer = text.removeprefix("<|user|>").partition(f"{tokenizer.eos_token}<|assistant|>")
        assert len(question.encode()) <= 60, "a question is a quarter of a stream at most"
        assert answer


@pytest.mark.parametrize("template", [None, "{% for m in messages %}{{ m.content }}{% endfor %}", "{{ 1 / 0 }}"])
def test_a_template_that_cannot_be_followed_is_left_out(template: str | None) -> None:
    tokenizer = load_tokenizer(str(adapted.directory("ladder")))
    tokenizer.chat_template = template
    # of the second, nothing stands between question and answer
    assert chat_turns(tokenizer) is None


def test_a_wrong_number_of_tokens_is_refused(tmp_path: Path) -> None:
    for wrong in ("self:", "self:many", "self:0", "self:-3"):
        with pytest.raises(RewriterError, match=f"{wrong}: expected self:N"):
            adapt(adapted.directory("ladder"), data=wrong, out=tmp_path / "out")
    with pytest.raises(RewriterError, match="--tokens 0: expected 1 or more"):
        AdaptOptions(tokens=0)


# Layers that are computed once


def models(recipe: str = "ladder-upper-half") -> tuple[Any, Any]:
    """(student, teacher), the former frozen below its first rewritten layer, and sharing what is frozen."""
    directory = adapted.directory(recipe)
    student = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True, dtype=torch.float32)
    teacher = AutoModelForCausalLM.from_pretrained(adapted.root() / "llama", dtype=torch.float32)
    freeze_unchanged(student)
    share_frozen(student, teacher.eval().requires_grad_(False))
    return student, teacher


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 256, (3, 32), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids, "position_ids": torch.arange(32).expand_as(ids)}


def test_loss_and_gradients_are_those_of_computing_everything() -> None:
    student, teacher = models()
    trunk = trunk_of(student, teacher)
    assert trunk is not None
    assert [id(layer) for layer in trunk.own] == [id(student.model.layers[0])]
    ours, theirs = HuggingFaceModel(student, None), HuggingFaceModel(teacher, None)
    calls: list[int] = []
    student.model.layers[0].mlp.register_forward_hook(lambda *_: calls.append(0))

    def step(shared: bool) -> tuple[float, dict[str, torch.Tensor]]:
        student.zero_grad()
        if shared:
            with torch.no_grad(), trunk.kept():
                taught = theirs(batch())
            with trunk.given():
                computed = ours(batch())
        else:
            with torch.no_grad():
                taught = theirs(batch())
            computed = ours(batch())
        targets = objective.own_targets(batch()["labels"], computed.indices)
        loss = objective.divergence(computed, taught, targets)
        loss.backward()
        return float(loss), {name: p.grad.clone() for name, p in student.named_parameters() if p.grad is not None}

    step(False), calls.clear()  # a first call tries whether the head is apart
    whole, expected = step(False)
    assert len(calls) == 1
    shared, found = step(True)
    assert len(calls) == 1, "the student's own first layer was not computed again"
    assert "forward" not in student.model.layers[0].__dict__
    assert shared == pytest.approx(whole, rel=1e-5)
    assert found.keys() == expected.keys()
    assert not any(name.startswith(("model.layers.0.", "model.embed")) for name in found)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-5)


def test_what_is_frozen_is_in_memory_once() -> None:
    student, teacher = models()
    held = {p.data_ptr(): name for name, p in student.named_parameters()}
    shared = {held[p.data_ptr()] for p in teacher.parameters() if p.data_ptr() in held}
    assert shared == {name for name, p in student.named_parameters() if not p.requires_grad}
    assert teacher.lm_head.weight is student.lm_head.weight, "what is tied, too"


def test_a_layer_that_differs_or_that_others_read_is_no_trunk() -> None:
    student, teacher = models("ladder")
    assert trunk_of(student, teacher) is None, "the first layer is rewritten"
    assert not student.get_input_embeddings().weight.requires_grad
    student, teacher = models()
    with torch.no_grad():
        other = AutoModelForCausalLM.from_pretrained(adapted.root() / "llama", dtype=torch.float32)
        other.model.layers[0].mlp.up_proj.weight.mul_(1.01)
    share_frozen(student, other)
    assert trunk_of(student, other) is None, "other weights"
    seen: list[torch.Tensor] = []
    student.model.layers[0].mlp.register_forward_hook(lambda m, args, y: seen.append(y))
    student.model.layers[3].register_forward_hook(lambda m, args, y: y + seen[-1].mean())
    student(input_ids=batch()["input_ids"])
    assert trunk_of(student, teacher) is None, "the last layer reads what the first has computed inside"


@pytest.mark.slow
def test_a_run_leaves_frozen_weights_as_they_were_and_learns_in_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(adaptation, "loss_of", lambda *args: made.append(args[-1]) or objective.loss_of(*args))
    directory = adapted.directory("ladder-upper-half")
    files = (directory, adapted.text_file(), adapted.text_file(20, 1))
    settings = {"learning_rate": 1e-3}
    run(tmp_path / "out", files=files, method="distill", train="rewritten", settings=settings)
    assert made[0] is not None
    before, after = (load_file(place / "model.safetensors") for place in (directory, tmp_path / "out"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name.split(".")[2] for name in changed if "layers" in name} == {"1", "2", "3"}
    assert "model.embed_tokens.weight" not in changed
    lines = read_metrics(tmp_path / "out" / "training")
    assert lines[-1]["divergence"] < 0.9 * lines[0]["divergence"]
    run(tmp_path / "all", files=files, method="distill", train="all", settings=settings)
    assert made[1] is None
    first = read_metrics(tmp_path / "all" / "training")[0]
    assert first["divergence"] == pytest.approx(lines[0]["divergence"], rel=1e-4), "the same function"


def test_parts_that_do_not_train_apart_are_refused() -> None:
    for options in ({"lora": 4}, {"tp": 2}, {"zero": "3"}, {"from_scratch": True}, {"ep": 2}):
        with pytest.raises(RewriterError, match="--train rewritten with"):
            AdaptOptions(train="rewritten", **options)  # type: ignore[arg-type]
