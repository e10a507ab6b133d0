"""What was not written for it trains and scores an emitted checkpoint: Trainer, peft, trl's SFTTrainer, lm_eval."""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import emitted
import pytest
import torch
import zoo
from datasets import Dataset
from peft import LoraConfig, PeftModel
from repository import ROOT, TINY_LLAMA
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

from rewriter.adapt.models import isolates_segments
from rewriter.adapt.token_rows import Rows, load_rows
from rewriter.common.errors import RewriterError
from rewriter.emit.huggingface import emit_huggingface
from rewriter.ir import Program
from rewriter.passes.desync import Desync
from rewriter.passes.ladder import Ladder
from rewriter.passes.tensor_parallel import TensorParallel
from rewriter.tracing import trace

BOS, EOS, PAD = 256, 257, 258
CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
KINDS = ["ladder", "desync"]


@functools.cache
def source() -> Path:
    """A Llama of the zoo with the shipped byte-level tokenizer and a chat template."""
    path = emitted.source("llama").parent / "foreign-source"
    config = zoo.config("llama")
    config.update({"vocab_size": 264, "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD})
    config.max_position_embeddings = 512
    model = AutoModelForCausalLM.from_config(config)
    zoo.randomize(model, 0)
    model.save_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(TINY_LLAMA)
    tokenizer.chat_template, tokenizer.split_special_tokens = CHATML, False
    tokenizer.save_pretrained(path)
    return path


def rewritten(kind: str) -> Program:
    program = trace(source())
    if kind == "ladder":
        return Ladder([2, 3]).apply(program)
    return Desync(n=2).apply(TensorParallel().apply(program.with_(mesh={"tp": 4})))


@functools.cache
def checkpoint(kind: str) -> Path:
    path = source().parent / f"foreign-{kind}"
    emitted.write(emit_huggingface(rewritten(kind)), source(), path)
    return path


def tokenizer(kind: str) -> Any:
    return AutoTokenizer.from_pretrained(checkpoint(kind), trust_remote_code=True)


def examples(form: str) -> list[dict[str, Any]]:
    if form == "text":
        return [{"text": f"line {i} of text, " * (1 + i % 3)} for i in range(24)]
    turns = [
        [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": f"{i} " * 5}] for i in range(24)
    ]
    return [{"messages": messages} for messages in turns]


def rows(kind: str, form: str, tmp_path: Path) -> Rows:
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(map(json.dumps, examples(form))))
    return load_rows(path, tokenizer(kind), length=128)


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def options(tmp_path: Path) -> dict[str, Any]:
    return {
        "output_dir": str(tmp_path / "run"), "max_steps": 6, "learning_rate": 3e-3, "per_device_train_batch_size": 4,
        "logging_steps": 1, "report_to": "none", "use_cpu": True, "disable_tqdm": True, "bf16": False,
    }  # fmt: skip


def assert_same_model(model: Any, directory: Path) -> None:
    """What lies in `directory` computes what `model` does, by the code beside it."""
    ids = zoo.batch()
    with torch.no_grad():
        trained, again = (m.eval()(input_ids=ids).logits for m in (model, emitted.load(directory)))
        before = emitted.load(checkpoint("ladder"))(input_ids=ids).logits
    torch.testing.assert_close(trained, again, rtol=1e-4, atol=1e-4)
    assert (trained - before).abs().max() > 0.1


# A bare Trainer


@pytest.mark.parametrize("kind", [KINDS[0], pytest.param(KINDS[1], marks=pytest.mark.slow)])
@pytest.mark.parametrize("form", ["messages", pytest.param("text", marks=pytest.mark.slow)])
def test_trainer_trains_saves_and_goes_on(kind: str, form: str, tmp_path: Path) -> None:
    """On packed rows. A run that goes on from its checkpoint has the losses of the one that was not interrupted."""
    data = rows(kind, form, tmp_path)
    assert data.counts.examples > len(data) > 4

    def trainer() -> Trainer:
        arguments = TrainingArguments(**options(tmp_path), save_steps=3, save_strategy="steps")
        return Trainer(emitted.load(checkpoint(kind)), arguments, train_dataset=data)

    first = trainer()
    first.train()
    found = losses(first)
    assert len(found) == 6
    assert found[-1] < found[0] / 2
    assert_same_model(first.model, tmp_path / "run" / "checkpoint-6")
    second = trainer()
    second.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert losses(second) == found


@pytest.mark.parametrize("kind", KINDS)
def test_packed_segments_stay_apart(kind: str) -> None:
    """What both trainers above rely on, for layers of the generated file too."""
    assert isolates_segments(emitted.load(checkpoint(kind)))
    assert isolates_segments(emitted.load(checkpoint(kind), attn_implementation="sdpa"))


# trl


def sft(kind: str, form: str, tmp_path: Path, packing: bool, **more: Any) -> SFTTrainer:
    arguments = SFTConfig(**options(tmp_path), packing=packing, max_length=128, save_strategy="no")
    data = Dataset.from_list(examples(form))
    model = emitted.load(checkpoint(kind), attn_implementation="sdpa")
    return SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer(kind), **more)


FAST = {("ladder", "messages", True), ("desync", "text", False)}


@pytest.mark.parametrize(
    ("kind", "form", "packing"),
    [
        pytest.param(*case, marks=() if case in FAST else pytest.mark.slow)
        for case in [(k, f, p) for k in KINDS for f in ("messages", "text") for p in (True, False)]
    ],
)
@pytest.mark.fast("desync-text-False")
def test_trls_sft_trainer(kind: str, form: str, packing: bool, tmp_path: Path) -> None:
    trainer = sft(kind, form, tmp_path, packing)
    batch = next(iter(trainer.get_train_dataloader()))
    if packing:  # several examples, told apart by their positions alone
        assert batch.get("attention_mask") is None
        assert int((batch["position_ids"] == 0).sum()) > len(batch["input_ids"])
    trainer.train()
    found = losses(trainer)
    assert found[-1] < found[0] / 2
    trainer.save_model(str(tmp_path / "saved"))
    assert_same_model(trainer.model, tmp_path / "saved")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.fast("ladder")
def test_pefts_lora_in_trls_sft_trainer(kind: str, tmp_path: Path) -> None:
    """Of desync, on projections that read per-rank residuals too."""
    config = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = sft(kind, "messages", tmp_path, packing=False, peft_config=config)
    trainer.args.learning_rate = 3e-2
    frozen = {n: p.clone() for n, p in trainer.model.named_parameters() if not p.requires_grad}
    trainer.train()
    found = losses(trainer)
    assert found[-1] < found[0] / 2
    assert all(torch.equal(p, frozen[n]) for n, p in trainer.model.named_parameters() if n in frozen)
    trainer.save_model(str(tmp_path / "adapter"))
    adapted = PeftModel.from_pretrained(emitted.load(checkpoint(kind)), tmp_path / "adapter")
    merged = adapted.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    assert_same_model(trainer.model, tmp_path / "merged")


# lm_eval


def bits_per_byte(model: PreTrainedModel, texts: list[str]) -> float:
    """Of each text by itself, after the first token."""
    bits, size = 0.0, 0
    for text in texts:
        ids = torch.tensor([[BOS, *text.encode()]])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, :-1]
        bits += float(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")) / math.log(2)
        size += len(text.encode())
    return bits / size


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_lm_eval_scores_it_on_a_local_task(kind: str, tmp_path: Path) -> None:
    model = f"pretrained={checkpoint(kind)},trust_remote_code=True,dtype=float32,add_bos_token=False"
    command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", model, "--tasks", "tiny_heldout"]
    command += ["--include_path", str(ROOT / "examples" / "evaluation"), "--device", "cpu", "--limit", "3"]
    command += ["--output_path", str(tmp_path / "scores.json")]
    places = {"HF_DATASETS_CACHE": str(tmp_path / "cache"), "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **places}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (scores,) = tmp_path.glob("scores*.json")
    found = json.loads(scores.read_text())["results"]["tiny_heldout"]["bits_per_byte,none"]
    text = (TINY_LLAMA / "heldout.txt").read_text()
    paragraphs = [part for part in text.split("\n\n") if part][:3]
    assert max(map(len, paragraphs)) < 512  # the context: each is scored in one piece
    assert found == pytest.approx(bits_per_byte(emitted.load(checkpoint(kind)), paragraphs), rel=1e-4)
    assert found != pytest.approx(bits_per_byte(emitted.load(source()), paragraphs), rel=1e-3)


# The Hub, through the package that these trainers brought


def test_the_hub_out_of_reach_is_told() -> None:
    """The tests run without a network."""
    with pytest.raises(RewriterError, match=r"^owner/name:test: no such file, and no data set that could be loaded .*"):
        load_rows("owner/name:test", tokenizer("ladder"), length=8)
