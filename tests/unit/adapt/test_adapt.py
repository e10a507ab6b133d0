"""`rewrite adapt` on one device: what is learned, what is written, and what an interruption costs: nothing."""

from __future__ import annotations

import functools
import json
import math
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import adapted
import pytest
import ranks  # noqa: F401
import torch
from adapt_runs import SAVED, SETTINGS, own_files, run
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemWriter
from transformers import AutoConfig, AutoModelForCausalLM, TrainingArguments

from rewriter import RewriterError
from rewriter.adapt import checkpoints, objective, output
from rewriter.adapt.adaptation import adapt
from rewriter.adapt.checkpoints import claimed, place_of
from rewriter.adapt.loop import AdaptTrainer, Order, on_device, read_metrics
from rewriter.adapt.models import HuggingFaceModel, TokenStates
from rewriter.adapt.objective import evaluate
from rewriter.adapt.options import AdaptOptions, parse_settings
from rewriter.adapt.ranks import RunRanks
from rewriter.adapt.schedule import schedule
from rewriter.adapt.token_rows import load_rows
from rewriter.adapt.unshard import write_model
from rewriter.check.drift import load_tokenizer
from rewriter.convert.rewritten_source import Opened, write_source
from rewriter.emit.card import model_card
from rewriter.output.manifest import read_manifest
from rewriter.weights import Checkpoint

_context = multiprocessing.get_context("forkserver")  # which has imported what `ranks` names


def losses(out: Path) -> list[tuple[float, float, float]]:
    return [(line["loss"], line["grad_norm"], line["learning_rate"]) for line in read_metrics(out / "training")]


@functools.cache
def undisturbed(recipe: str, **options: Any) -> Path:
    """The result of a run that nothing interrupts."""
    out = adapted.root() / f"undisturbed-{recipe}"
    run(out, files=files_of(recipe), **options)
    return out


def files_of(recipe: str) -> tuple[Path, Path, Path]:
    return adapted.directory(recipe), *own_files()[1:]


@pytest.fixture(scope="module")
def plain() -> Path:
    return undisturbed("ladder")


def test_the_loss_falls_and_the_result_is_what_was_measured(plain: Path) -> None:
    manifest = read_manifest(plain)
    done = manifest.adaptation
    assert done is not None
    assert done.losses["after"] < done.losses["before"] - 1
    assert (done.steps, done.rows_per_step, done.tokens) == (6, 8, 6 * 8 * adapted.LENGTH)
    assert done.losses["original"] != done.losses["before"]
    # the loss in the manifest is that of the file, read as any user reads it
    model = AutoModelForCausalLM.from_pretrained(plain, trust_remote_code=True, dtype=torch.float32)
    rows = load_rows(adapted.text_file(20, 1), load_tokenizer(str(plain)), length=adapted.LENGTH)
    again = evaluate(HuggingFaceModel(model, None), rows, 4, RunRanks(), torch.device("cpu"))
    assert math.isclose(again, done.losses["after"], rel_tol=1e-5)
    names = {name: t.dtype for name, t in load_file(plain / "model.safetensors").items()}
    assert names == {n: t.dtype for n, t in load_file(adapted.directory("ladder") / "model.safetensors").items()}


def test_the_result_says_what_was_done(plain: Path) -> None:
    text, losses = (plain / "README.md").read_text(), read_manifest(plain).adaptation.losses
    first = text.split("\n# ")[1].split("\n\n")[1]
    share = (losses["before"] - losses["after"]) / (losses["before"] - losses["original"])
    by = f" by {share:.0%}" if losses["after"] > losses["original"] else ""
    assert first == (
        f"> **Healed{by}** by a fine-tuning on 2,304 tokens: its loss was {losses['before']:.4f} nats per target after "
        f"the rewrite and is {losses['after']:.4f} now; the original's is {losses['original']:.4f}."
    )
    manifest = read_manifest(plain)
    for after, said in ((2.5, "Healed by 50%"), (2.0, "Healed"), (3.5, "Not healed")):
        manifest.adaptation.losses.update(before=3.0, original=2.0, after=after)
        assert f"\n> **{said}** by a fine-tuning on" in model_card(manifest)
    card = " ".join(text.split())
    assert "## Fine-tuning" in card
    for part in ("text-60-0.jsonl", "6 steps of 8 rows of 48 tokens", "0.01", "after training, as stored"):
        assert part in card
    lines = read_metrics(plain / "training")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert all(line["tokens_per_second"] > 0 for line in lines)
    assert any("tfevents" in path.name for path in (plain / "training").iterdir())
    assert not place_of(plain).exists()
    assert "training/metrics.jsonl" in read_manifest(plain).files


# Interruptions


def logged(out: Path) -> list[int]:
    """The steps whose losses TensorBoard shows."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(out / "training")).Reload()
    return [event.step for event in shown.Scalars("train/loss")]


def _killed(out: Path, where: str, files: tuple[Path, Path, Path], options: dict[str, Any]) -> None:
    """A run that is killed at the moment that `where` names."""

    def die(*args: Any, **kwargs: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if where == "in a step":
        before = AdaptTrainer.training_step
        calls = []

        def step(self: AdaptTrainer, *args: Any, **kwargs: Any) -> torch.Tensor:
            calls.append(1)
            return before(self, *args, **kwargs) if len(calls) < 10 else die()  # type: ignore[return-value]

        AdaptTrainer.training_step = step  # type: ignore[method-assign]
    elif where == "in a checkpoint":
        save = checkpoints.save

        def half(place: Path, *args: Any) -> None:
            save(place, *args)
            if "checkpoint-4" in place.name:
                (place / "trainer_state.json").write_text("{")
                die()

        checkpoints.save = half
    elif where == "before the first checkpoint":
        checkpoints.writing = die
    else:
        output.save = die  # when the result is written
    run(out, files=files, settings=SAVED, **options)


FROZEN = {"method": "distill", "train": "rewritten"}  # below the first rewritten layer
MOMENTS = [
    ("in a checkpoint", "ladder", {}),
    pytest.param("in a step", "ladder-upper-half", FROZEN, marks=pytest.mark.slow),
    pytest.param("before the first checkpoint", "ladder", {}, marks=pytest.mark.slow),
    pytest.param("when the result is written", "ladder", {}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("where", "recipe", "options"), MOMENTS)
def test_a_killed_run_goes_on_with_the_same_losses(
    where: str, recipe: str, options: dict[str, Any], tmp_path: Path
) -> None:
    out, files, whole = tmp_path / "out", files_of(recipe), undisturbed(recipe, **options)
    process = _context.Process(target=_killed, args=(out, where, files, options))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    assert not out.exists()
    with pytest.raises(RewriterError, match="--resume, or delete"):
        run(out, files=files, **options)
    with pytest.raises(RewriterError, match=r"--resume: the run in .* had settings .*0\.01.*, this one has .*0\.02"):
        run(out, resume=True, files=files, settings={"learning_rate": 0.02}, **options)
    run(out, resume=True, files=files, settings=SAVED, **options)
    assert losses(out) == losses(whole)
    assert logged(out) == logged(whole)
    expected = load_file(whole / "model.safetensors")
    assert all(torch.equal(t, expected[n]) for n, t in load_file(out / "model.safetensors").items())
    assert read_manifest(out).adaptation.losses == read_manifest(whole).adaptation.losses  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("fault", "raised", "words"),
    [
        (OSError(5, "Input/output error"), OSError, "Input/output"),
        (ValueError("bad"), RewriterError, "rank 0: ValueEr"),
    ],
)
def test_a_checkpoint_that_cannot_be_written_is_an_error_not_a_traceback(
    fault: Exception, raised: type[Exception], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> None:
        raise fault

    monkeypatch.setattr(FileSystemWriter, "write_data", broken)
    with pytest.raises(raised, match=words) as found:
        run(tmp_path / "out", settings={"save_steps": 1})
    assert "Traceback" not in str(found.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exact, calls = objective.cross_entropy, []

    def broken(computed: TokenStates, targets: torch.Tensor) -> torch.Tensor:
        calls.append(computed.states.requires_grad)
        bad = sum(calls) == 2 * 4 + 1  # the first pass of step 5
        return exact(computed, targets) * (math.nan if bad else 1.0)

    monkeypatch.setattr(objective, "cross_entropy", broken)
    out = tmp_path / "out"
    with pytest.raises(RewriterError, match=r"step 5: the loss is nan; .*the last good checkpoint is .*checkpoint-4"):
        run(out, settings={"save_steps": 4})
    assert not out.exists()
    kept = checkpoints.last(place_of(out))
    assert kept is not None
    assert kept.name == "checkpoint-4"
    monkeypatch.setattr(objective, "cross_entropy", exact)
    run(out, resume=True)
    assert all(map(math.isfinite, [loss for loss, *_ in losses(out)]))


# Places of work


def test_a_directory_where_a_run_is_at_work_is_not_to_be_deleted(tmp_path: Path) -> None:
    with claimed(tmp_path / "out", {}, resume=False):
        for resume in (False, True):
            with pytest.raises(RewriterError, match=r"another run is at work there\. Wait for it"):
                claimed(tmp_path / "out", {}, resume).__enter__()
    with pytest.raises(KeyboardInterrupt), claimed(tmp_path / "out", {}, resume=False):
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir()), "without a checkpoint there is nothing to go on from"


def test_the_pieces_of_an_optimizer_that_two_ranks_had_are_refused_by_one(tmp_path: Path) -> None:
    for rank in (0, 1):
        (tmp_path / f"optimizer-{rank}-of-2.pt").touch()
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    constant = torch.optim.lr_scheduler.ConstantLR(optimizer)
    with pytest.raises(RewriterError, match=r"in pieces: optimizer-0-of-2\.pt, .* Resume on as many ranks"):
        checkpoints.load_rest(tmp_path, model, optimizer, constant, RunRanks(), 0)


# Refusals


def test_what_cannot_be_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    out = tmp_path / "out"
    cases: list[tuple[dict[str, Any], str]] = [
        ({"sp": 2, "lora": 4}, r"--lora with --sp 2: adapters are added to the Hugging Face model"),
        ({"tp": 2, "zero": "1"}, r"--zero 1 with --tp 2: .*Use --zero 3"),
        ({"method": "distil"}, r"--method distil: expected sft, distill"),
        ({"method": "sft", "cross_entropy": 1.0}, r"--cross-entropy 1.0 is a part of the distillation loss"),
        ({"method": "distill", "from_scratch": True}, r"--from-scratch --method distill"),
        ({"length": 1}, r"--length 1: expected 2 or more"),
        ({"too_long": "cut"}, r"--too-long cut: expected truncate, split, refuse"),
        ({"sp": 2, "settings": {"gradient_checkpointing": True}}, r"--set gradient_checkpointing with --sp 2"),
        ({"tp": 2, "settings": {"neftune_noise_alpha": 5}}, r"--set neftune_noise_alpha with --tp 2"),
        ({"ep": 2, "tp": 2}, r"--tp with --ep 2: its ranks share heads and channels"),
        ({"ep": 2, "zero": "3"}, r"--zero with --ep 2: each rank steps all that it holds"),
        ({"ep": 0}, r"--ep 0: expected 1 or more"),
        ({"base": "int8"}, r"--base int8: weights that are trained cannot be quantized\. Add --lora R"),
        ({"base": "int9", "lora": 4}, r"--base: .*int9"),
        ({"base": "int8", "lora": 4, "zero": "plus-plus"}, r"--base int8 with --zero plus-plus: .*Use --zero 3"),
        ({"tp": 2, "zero": "node-local"}, r"--zero node-local with --tp 2"),
    ]
    for options, message in cases:
        with pytest.raises(RewriterError, match=message):
            AdaptOptions(**options)
    with pytest.raises(RewriterError, match=r"--tp × --sp = 2 ranks share .* but 1 runs\. Start it with torchrun"):
        adapt(adapted.directory("ladder"), data=adapted.text_file(), out=out, options=AdaptOptions(sp=2))
    with pytest.raises(RewriterError, match=r"--ep 2 ranks share the experts of a layer, but 1 runs"):
        adapt(adapted.directory("ladder"), data=adapted.text_file(), out=out, options=AdaptOptions(ep=2))
    with pytest.raises(RewriterError, match="bound to tp=2, and its file computes all ranks"):
        adapt(adapted.directory("desync-2x", 2), data=adapted.text_file(), out=out, options=AdaptOptions(ep=2))
    with pytest.raises(RewriterError, match="bound to tp=2, so it cannot be trained with --tp 4"):
        adapt(adapted.directory("desync-2x", 2), data=adapted.text_file(), out=out, options=AdaptOptions(tp=4))
    with pytest.raises(RewriterError, match="48 positions"):
        adapt(adapted.directory("ladder"), data=adapted.text_file(), out=out, options=AdaptOptions(length=64))
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "x"}\nnot json\n')
    with pytest.raises(RewriterError, match=r"bad\.jsonl:2: .*JSON"):
        adapt(adapted.directory("ladder"), data=bad, out=out, options=AdaptOptions())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.jsonl"]


@pytest.mark.slow
def test_what_was_trained_can_be_trained_again_but_not_be_its_own_teacher(plain: Path, tmp_path: Path) -> None:
    again = dict(data=adapted.text_file(), evaluation=adapted.text_file(20, 1), out=tmp_path / "out", verify="none")
    with pytest.raises(RewriterError, match=r"no longer the original's\. Give the original model as --teacher"):
        adapt(plain, options=AdaptOptions(method="distill"), **again)  # type: ignore[arg-type]
    settings = {**SETTINGS, "max_steps": 1, "eval_steps": 1}
    options = AdaptOptions(method="distill", length=adapted.LENGTH, too_long="truncate", settings=settings)
    report = adapt(plain, teacher=adapted.root() / "llama", options=options, **again)  # type: ignore[arg-type]
    first = read_manifest(plain).adaptation
    assert first is not None
    assert math.isclose(report.losses["original"], first.losses["original"], rel_tol=1e-6)
    assert math.isclose(report.losses["before"], first.losses["after"], rel_tol=1e-5)
    (measured,) = (line["eval_loss"] for line in read_metrics(tmp_path / "out" / "training") if "eval_loss" in line)
    assert math.isclose(report.losses["after"], measured, rel_tol=1e-2), "but for the rounding to bf16"


# Names and files


def test_trained_weights_go_back_under_the_names_and_into_the_files_of_the_source(tmp_path: Path) -> None:
    """As of gpt2 on the Hub: without the prefix of the model below the head, with a mask that is no weight."""
    config = AutoConfig.for_model("gpt2", n_embd=8, n_layer=2, n_head=2, vocab_size=16, n_positions=8)
    model = AutoModelForCausalLM.from_config(config)
    source, mask = tmp_path / "source", torch.ones(2, 2).tril()
    model.transformer.save_pretrained(source)
    stored = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    files = {"one.safetensors": dict(list(stored.items())[:9]), "two.safetensors": dict(list(stored.items())[9:])}
    files["two.safetensors"] |= {"h.0.attn.bias": mask, "lm_head.weight": stored["wte.weight"].clone()}
    for name, tensors in files.items():
        save_file(tensors, source / name)
    index = {"weight_map": {tensor: name for name, tensors in files.items() for tensor in tensors}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    opened = Opened(source, read_manifest(adapted.directory("ladder")), config.to_dict())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    trained = write_source(opened, tmp_path / "trained", weights=False)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    write_model(model, state, Checkpoint.open(source), tmp_path / "made", trained)
    found = Checkpoint.open(trained)
    assert {tensor: info.file.name for tensor, info in found.tensors.items()} == index["weight_map"]
    for name, before in (stored | {"lm_head.weight": stored["wte.weight"]}).items():
        assert torch.equal(found.read(name), before + 1)
    assert torch.equal(found.read("h.0.attn.bias"), mask)
    # a weight that the source has no name for is not lost in silence
    save_file({n: t for n, t in files["two.safetensors"].items() if n != "ln_f.weight"}, source / "two.safetensors")
    del index["weight_map"]["ln_f.weight"]
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(RewriterError, match=r"transformer\.ln_f\.weight has no tensor there"):
        write_model(model, state, Checkpoint.open(source), tmp_path / "made", trained)


def test_a_rank_keeps_to_its_own_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    assert on_device(arguments, torch.device("cpu")).device == torch.device("cpu")
    # as on a machine with four of them
    arguments.__dict__["_setup_devices"], arguments._n_gpu = torch.device("cuda", 0), 4
    on_device(arguments, torch.device("cuda", 3))
    assert (arguments.device, arguments.n_gpu) == (torch.device("cuda", 3), 1)
    assert chosen == [torch.device("cuda", 3)]


def test_settings_are_the_trainers() -> None:
    assert parse_settings(["learning_rate=1e-4", "lr_scheduler_type=linear", "bf16=true"]) == {
        "learning_rate": 1e-4, "lr_scheduler_type": "linear", "bf16": True,
    }  # fmt: skip
    with pytest.raises(RewriterError, match="Did you mean 'learning_rate'"):
        parse_settings(["learning_rat=1"])
    with pytest.raises(RewriterError, match="expected NAME=VALUE"):
        parse_settings(["max_steps"])
    for wrong in ("max_steps=1.5", "learning_rate=fast", "bf16=1", "seed=true", "data_seed=null"):
        with pytest.raises(RewriterError, match=f"--set {wrong.partition('=')[0]}=.*: expected"):
            parse_settings([wrong])
    with pytest.raises(RewriterError, match="twice"):
        parse_settings(["seed=1", "seed=2"])


def test_a_step_sees_the_same_rows_on_any_number_of_ranks() -> None:
    settings, seen = {"num_train_epochs": 3}, []
    for replicas in (1, 2, 4):
        sizes = schedule(settings, None, 50, replicas)
        assert (sizes.batch, sizes.steps) == (32, 4)
        # ranks in pairs that share rows
        orders = [list(Order(50, sizes, RunRanks(2 * replica, 2 * replicas, 2), 7)) for replica in range(replicas)]
        each = range(sizes.accumulation)
        seen.append([
            [row for order in orders for i in each for row in order[step * sizes.accumulation + i]]
            for step in range(sizes.steps)
        ])  # fmt: skip
    assert seen[0] == seen[1] == seen[2]
    flat = [row for step in seen[0] for row in step]
    assert sorted(flat[:50]) == sorted(flat[50:100]) == list(range(50)), "an epoch has every row once"
    assert flat[:50] != flat[50:100]
    with pytest.raises(RewriterError, match="32 rows cannot be divided over 3"):
        schedule(settings, None, 50, 3)
