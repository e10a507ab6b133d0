"""Loss, KL and top-1 after a prompt, before and after `rewrite adapt`.

    python examples/real_models.py smollm2-135m-instruct models/smollm2
    python -m benchmarks.prefill.prose build/prose
    python -m benchmarks.prefill.healing models/smollm2 --tp 3 --recipe prefill-ladder-upper-half --tokens 25000 \
        --tokens 100000 [--way "weights for prompts"] [--rate 5e-4] [--record]

Training and held-out texts are those of `prose`. The beginning of each held-out text is one window: a prompt, and 64
tokens after it, which alone count. Windows of the packaged calibration text are measured beside them. Everything that
--way and --rate do not say is a default of `rewrite adapt`. The Hugging Face file that the run wrote computes the
prompt up to its last rewired token, and what follows reads its cache. After `--way "weights for prompts"` the original
computes what follows.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.healing.run import STAGES, WAYS, cases, trained
from benchmarks.prefill import page
from benchmarks.prefill.quality import AFTER, WINDOWS, compared, windows
from benchmarks.support.prompt_cache import cached_prompt
from rewriter.check.drift import CALIBRATION

PROMPTS = "weights for prompts"
WATCHED = 4  # windows
SHOWN = ("before", "after", "exact prompt")


def load(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True, dtype=torch.float32).eval()


def beginnings(tokenizer: Any, texts: Path, prompt: int) -> Tensor:
    """int64 [N, prompt + AFTER]: the beginning of each text that is long enough."""
    lines = [json.loads(line)["text"] for line in texts.read_text(encoding="utf-8").splitlines()]
    rows = [tokenizer(text[: 40 * (prompt + AFTER)]).input_ids[: prompt + AFTER] for text in lines]
    return torch.tensor([row for row in rows if len(row) == prompt + AFTER])


@torch.no_grad()
def after_prompts(prompts: Any, model: Any, ids_NT: Tensor) -> Tensor:
    """log-probabilities [N, AFTER, V] of the tokens after each prompt: `prompts` computes it up to its last rewired
    token, `model` what follows."""
    rows = []
    for ids in ids_NT.split(1):
        end, cached = cached_prompt(prompts, model, ids[:, :-AFTER])
        logits = model(ids[:, end:], use_cache=True, **cached).logits.float()
        rows.append(logits[0, -AFTER - 1 : -1].log_softmax(-1))
    return torch.stack(rows)


@torch.no_grad()
def exactly(model: Any, ids_NT: Tensor) -> Tensor:
    """The same where nothing is rewired."""
    phased = getattr(model.config, "rewriter_phase", None)
    told = {"rewired": torch.zeros(1, ids_NT.shape[1], dtype=torch.bool)} if phased else {}
    return torch.cat([model(ids, **told).logits.float()[:, -AFTER - 1 : -1].log_softmax(-1) for ids in ids_NT.split(1)])


def measured(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A record of each run."""
    tokenizer: Any = AutoTokenizer.from_pretrained(given.model)
    texts = {
        "manuals": beginnings(tokenizer, given.prose / "heldout.jsonl", given.prompt),
        "calibration": windows(tokenizer, CALIBRATION.read_text(encoding="utf-8"), given.prompt, WINDOWS),
    }
    watched = given.build / "watched.jsonl"  # what the run itself measures, which takes as long as training does
    rows = texts["manuals"][:WATCHED]
    lines = [json.dumps({"text": tokenizer.decode(row, skip_special_tokens=True)}) + "\n" for row in rows]
    watched.parent.mkdir(parents=True, exist_ok=True)
    watched.write_text("".join(lines), encoding="utf-8")
    data = ["--data", str(given.prose / "train.jsonl"), "--length", str(given.prompt + AFTER)]
    original = load(given.model)
    for case in cases(given):
        report = trained(case.directory, case.out, case.tokens, [*case.options, *data], str(watched))
        assert report is not None  # nothing stops it
        before, after = load(case.directory), load(case.out)
        models = (original, before, after, original if case.way == PROMPTS else after)
        yield {
            "model": given.model.name, "recipe": case.recipe, "way": case.way, "tp": given.tp, "prompt": given.prompt,
            "tokens": report["tokens"], "date": time.strftime("%Y-%m-%d"),
            "tokens_per_second": round(report["tokens_per_second"]),
            "texts": {name: {"windows": len(ids), **qualities(*models, ids)} for name, ids in texts.items()},
        }  # fmt: skip


def qualities(original: Any, before: Any, after: Any, following: Any, ids: Tensor) -> dict[str, Any]:
    """By what is measured: the original, what the recipe wrote, the healed model (`following` computes what comes after
    the prompt), and that with nothing rewired."""
    expected = exactly(original, ids)
    found = {
        "original": expected,
        "before": after_prompts(before, before, ids),
        "after": after_prompts(after, following, ids),
        "exact prompt": exactly(following, ids),
    }
    return {name: asdict(compared(one, expected, ids)) for name, one in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--prose", type=Path, default=Path("build/prose"))
    parser.add_argument("--recipe", action="append", required=True)
    parser.add_argument("--tokens", type=int, action="append", required=True)
    parser.add_argument("--way", action="append", choices=WAYS | STAGES)
    parser.add_argument("--rate", action="append", help="a learning rate, in place of the one that follows")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=256, help="tokens (default 256)")
    parser.add_argument("--build", type=Path, default=Path("build/healing"))
    parser.add_argument("--record", action="store_true", help="add what is found to record.json, and write the page")
    given = parser.parse_args()
    given.unpermuted = False
    for record in measured(given):
        for text, found in record["texts"].items():
            loss = found["original"]["loss"]
            told = [f"{n} {found[n]['loss'] / loss - 1:+.2%} (KL {found[n]['kl']:.3f})" for n in SHOWN]
            print(f"{record['recipe']}, {record['tokens']:,} tokens, {record['way']}, {text}: {', '.join(told)}")
        if given.record:
            page.RECORD.add("healing", record)
    if given.record:
        page.write()


if __name__ == "__main__":
    main()
