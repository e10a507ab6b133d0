"""One run of the experiment in a process of its own: `python benchmarks/adaptation_train.py spec.json result.json`.

The spec holds the run, the settings, the converted directories of the run's recipe and of the original, and the
directory of tiny_corpus.py.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from adaptation_runs import Result, Run, Settings
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

import rewriter

POINTS = 50  # of the training curve
Ids = NDArray[np.int64]


def train(student: nn.Module, teacher: nn.Module | None, text: Ids, run: Run, settings: Settings) -> list[Any]:
    """Train `student` in place on windows of `text`; returns the curve.

    With a teacher the loss is KL(teacher ‖ student) + `settings.hidden` × the relative squared error of the residual
    stream behind every layer, else cross entropy. AdamW, bf16 autocast, gradient norm clipped at 1.
    """
    if run.anneal:
        raise NotImplementedError(f"{run.name}: plain training knows no annealing")
    decayed = [p for p in student.parameters() if p.ndim > 1]
    others = [p for p in student.parameters() if p.ndim <= 1]
    groups: list[Any] = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": others}]
    optimizer = torch.optim.AdamW(groups, lr=run.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    steps = run.tokens // settings.batch
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, steps, settings.warmup))
    source = windows(text, settings.length, np.random.default_rng(settings.seed))
    curve, recent = [], []
    for step in range(steps):
        ids_BS = torch.from_numpy(np.stack([next(source) for _ in range(settings.batch // settings.length)]))
        with torch.autocast("cpu", torch.bfloat16):
            loss = step_loss(student, teacher, ids_BS, settings.hidden)
        loss.backward()
        nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        recent.append(loss.item())
        if (step + 1) % max(1, steps // POINTS) == 0:
            curve.append(((step + 1) * settings.batch, float(np.mean(recent))))
            recent = []
    return curve


def rate(step: int, steps: int, warmup: float) -> float:
    """Share of the peak rate: up over the first `warmup` of the steps, linearly to zero over the others."""
    first = max(1, round(warmup * steps))
    return min((step + 1) / first, (steps - step) / max(1, steps - first))


def step_loss(student: nn.Module, teacher: nn.Module | None, ids_BS: Tensor, hidden: float) -> Tensor:
    """Nats per token. `ids_BS` has one token more than is read."""
    read, wanted = ids_BS[:, :-1], ids_BS[:, 1:]
    if teacher is None:
        logits = student(input_ids=read, use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), wanted.flatten())
    ours = student(input_ids=read, use_cache=False, output_hidden_states=hidden > 0)
    with torch.no_grad():
        theirs = teacher(input_ids=read, use_cache=False, output_hidden_states=hidden > 0)
    log_q, log_p = (F.log_softmax(found.logits.float().flatten(0, 1), -1) for found in (ours, theirs))
    loss = F.kl_div(log_q, log_p, log_target=True, reduction="batchmean")
    if hidden:
        pairs = zip(ours.hidden_states[1:], theirs.hidden_states[1:], strict=True)
        errors = [F.mse_loss(s.float(), t.float()) / t.float().square().mean() for s, t in pairs]
        loss = loss + hidden * torch.stack(errors).mean()
    return loss


def windows(text: Ids, length: int, rng: np.random.Generator) -> Iterator[Ids]:
    """Endless windows of length + 1 ids; an epoch visits the whole text once, shuffled, from a random offset."""
    while True:
        starts = np.arange(rng.integers(length), len(text) - length - 1, length)
        rng.shuffle(starts)
        for start in starts:
            yield text[start : start + length + 1]


@torch.no_grad()
def window_losses(model: nn.Module, text: Ids, settings: Settings) -> list[float]:
    """Mean loss, nats per token, of each of `settings.windows` windows of `text` at even distances; fp32."""
    places = (len(text) - 1) // settings.length
    if places < settings.windows:
        raise ValueError(f"{places} windows of {settings.length} tokens in the text, expected {settings.windows}")
    starts = np.linspace(0, places - 1, settings.windows).astype(int) * settings.length
    found: list[float] = []
    for some in np.array_split(starts, max(1, len(starts) // 16)):
        ids_BS = torch.from_numpy(np.stack([text[start : start + settings.length + 1] for start in some]))
        logits = model(input_ids=ids_BS[:, :-1], use_cache=False).logits
        losses_BS = F.cross_entropy(logits.float().transpose(1, 2), ids_BS[:, 1:], reduction="none")
        found += losses_BS.mean(1).tolist()
    return found


def load(directory: str) -> nn.Module:
    return rewriter.load(directory, dtype=torch.float32).train()


def random_model(directory: str) -> nn.Module:
    """The model of a converted directory with random weights; what writes into the residual stream starts small, as
    its variance would otherwise grow with depth."""
    config = AutoConfig.from_pretrained(directory, trust_remote_code=True)
    model: nn.Module = AutoModelForCausalLM.from_config(config, trust_remote_code=True, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.data.mul_((2 * config.num_hidden_layers) ** -0.5)
    return model.train()


def main(spec_file: str, result_file: str) -> None:
    torch.set_num_threads(1)
    spec = json.loads(Path(spec_file).read_text(encoding="utf-8"))
    run, settings = Run(**spec["run"]), Settings(**spec["settings"])
    torch.manual_seed(settings.seed)
    sys.path.insert(0, spec["corpus"])
    corpus = importlib.import_module("tiny_corpus")
    train_files, held_out_files = corpus.split(corpus.standard_library())
    student = random_model(spec["student"]) if run.scratch else load(spec["student"])
    teacher = load(spec["original"]) if run.method == "distill" else None
    begin = time.perf_counter()
    curve = train(student, teacher, corpus.token_stream(train_files), run, settings) if run.tokens else []
    seconds = time.perf_counter() - begin
    losses = window_losses(student.eval(), corpus.token_stream(held_out_files), settings)
    Path(result_file).write_text(json.dumps(asdict(Result(losses, curve, seconds))), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
