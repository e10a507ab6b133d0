"""One run of the experiment in a process of its own: `python benchmarks/adaptation_train.py spec.json result.json`.

The spec holds the run, the settings, the converted directory of the run's recipe, and the directory of tiny_corpus.py.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from adaptation_runs import Result, Run, Settings
from numpy.typing import NDArray
from torch import nn

import rewriter
from rewriter.adapt.run_log import read_metrics
from rewriter.api import adapt

POINTS = 50  # of the training curve
EVALUATION = (
    20  # excerpts that `adapt` measures on; the figures of the page are taken from the result, window by window
)
Ids = NDArray[np.int64]


def train(student: Path, run: Run, settings: Settings, texts: list[str], held_out: list[str], scratch: Path) -> Path:
    """`rewrite adapt` of a converted directory; returns its result."""
    files = {}
    for name, some in (("train", texts), ("evaluation", [text[: settings.length] for text in held_out[:EVALUATION]])):
        files[name] = scratch / f"{name}.jsonl"
        files[name].write_text("".join(json.dumps({"text": text}) + "\n" for text in some if text), encoding="utf-8")
    steps = (run.tokens - run.refit) // settings.batch
    distils = {"hidden_states": settings.hidden} if run.method == "distill" else {}
    adapt(
        student,
        data=files["train"],
        eval=files["evaluation"],
        out=scratch / "out",
        verify="none",
        method=run.method,
        **distils,
        refit=run.refit,
        anneal=round(run.anneal * steps),
        from_scratch=run.scratch,
        length=settings.length,
        too_long="split",
        set={
            "max_steps": steps, "per_device_train_batch_size": settings.batch // settings.length,
            "gradient_accumulation_steps": 1, "learning_rate": run.learning_rate, "lr_scheduler_type": "linear",
            "warmup_steps": max(1, round(settings.warmup * steps)), "weight_decay": settings.weight_decay,
            "adam_beta2": 0.95, "bf16": True, "seed": settings.seed, "save_steps": steps, "use_cpu": True,
        },
    )  # fmt: skip
    return scratch / "out"


def curve_of(result: Path, tokens: int) -> list[tuple[int, float]]:
    """The loss of training by tokens, averaged over a fiftieth of the run."""
    lines = read_metrics(result / "training")
    parts = np.array_split(np.arange(len(lines)), min(POINTS, len(lines)))
    before = tokens - lines[-1]["tokens"]  # those of the refit
    return [(before + lines[part[-1]]["tokens"], float(np.mean([lines[i]["loss"] for i in part]))) for part in parts]


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


def load(directory: str | Path) -> nn.Module:
    return rewriter.load(directory, dtype=torch.float32).eval()


def main(spec_file: str, result_file: str) -> None:
    torch.set_num_threads(1)
    spec = json.loads(Path(spec_file).read_text(encoding="utf-8"))
    run, settings = Run(**spec["run"]), Settings(**spec["settings"])
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    sys.path.insert(0, spec["corpus"])
    corpus = importlib.import_module("tiny_corpus")
    train_files, held_out_files = corpus.split(corpus.standard_library())
    held_out = corpus.token_stream(held_out_files)
    if not run.tokens:
        found = Result(window_losses(load(spec["student"]), held_out, settings), [], 0.0)
    else:
        with tempfile.TemporaryDirectory() as scratch:
            texts = [list(files.values()) for files in (train_files, held_out_files)]
            result = train(Path(spec["student"]), run, settings, *texts, Path(scratch))
            done: dict[str, Any] = json.loads((result / "rewrite.json").read_text(encoding="utf-8"))["adaptation"]
            losses = window_losses(load(result), held_out, settings)
            found = Result(losses, curve_of(result, run.tokens), done["seconds"])
    Path(result_file).write_text(json.dumps(asdict(found)), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
