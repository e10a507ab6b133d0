"""How far a real model heals in how many tokens, with the settings that `rewrite adapt` chooses itself.

    python examples/real_models.py smollm2-135m-instruct models/smollm2
    python -m benchmarks.healing.run models/smollm2 --recipe ladder-upper-half --tokens 24576
    python -m benchmarks.healing.run models/smollm2 --rate 2e-4 --rate 5e-4 --rate 1e-3    # and learning rates
    python -m benchmarks.healing.run models/smollm2 --way "cross entropy"    # and other methods
    python -m benchmarks.healing.run models/smollm2 --tp 3 --recipe ladder-own-partial [--unpermuted]
    python -m benchmarks.healing.run models/smollm2 --tp 3 --recipe prefill-desync-2x-sum [--way "weights for prompts"]
    python -m benchmarks.healing.run models/smollm2 --steps-only     # speed of a distillation step
    python -m benchmarks.healing.run --page                          # docs/results/adaptation.md from record.json

The data are what the original writes itself. Losses are measured on text that it writes with other seeds, or on --eval
FILE ({"text": …} per line). Results are kept in build/healing, a JSON file each; what is there is not trained again,
and what was interrupted goes on. With --record they are added to record.json, of which the page
is made.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.healing import page as healing_page
from rewriter.adapt import objective
from rewriter.adapt.checkpoints import place_of
from rewriter.adapt.loop import read_metrics
from rewriter.adapt.models import Batch, HuggingFaceModel, freeze_unchanged, share_frozen, trunk_of
from rewriter.api import convert
from rewriter.check.drift import CALIBRATION
from rewriter.common.text_windows import begins_texts, text_windows
from rewriter.convert.save_options import SaveOptions
from rewriter.recipes import Recipe

WAYS: dict[str, list[str]] = {
    "defaults": [],
    "all weights, fp32": ["--train", "all", "--set", "bf16=false"],
    "bf16": ["--train", "all", "--set", "bf16=true"],
    "from the first rewritten layer": ["--train", "rewritten", "--set", "bf16=false"],
}
"""What is compared, by the options that differ from the defaults; the speed of these is measured too."""
STAGES: dict[str, list[str]] = {
    "cross entropy": ["--cross-entropy", "0.1"],
    "cross entropy alone": ["--method", "sft", "--train", "rewritten"],
    "weights for prompts": ["--prompt-weights"],
}
"""What else could be minimised at the same tokens."""
STEP = (8, 256)  # rows and tokens of a row, of the step that is timed
REPEATS = 3  # of a timed step, unless --repeats says otherwise
QUESTIONS = (
    "What is the capital of France?", "What is the capital of Japan?", "How many days are in a week?",
    "What colour is the sky on a clear day?", "What is two plus two?", "Which planet do we live on?",
    "What do bees make?", "What is the opposite of hot?", "Who wrote Romeo and Juliet?", "What is frozen water called?",
)  # fmt: skip
MOST_ANSWERED = 24  # tokens
PROSE, WINDOW = 2_048, 256  # tokens of other text, and those that are read at once


def trained(
    directory: Path,
    out: Path,
    tokens: int,
    options: list[str],
    evaluation: str,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any] | None:
    """What a run of `rewrite adapt` in a process of its own reports, with its peak memory in bytes. None where `stop`
    ended it: the same call goes on with it."""
    result = out.with_suffix(".json")
    if result.is_file():
        found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        return found
    fixed = ["--out", str(out), "--tokens", str(tokens), "--eval", evaluation, "--verify", "none", "--json"]
    resume = ["--resume"] if place_of(out).exists() else []
    command = [sys.executable, "-m", "rewriter.cli", "adapt", str(directory), *fixed, *options, *resume]
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        process = subprocess.Popen(command, stdout=output)
        status, usage = _ended(process, stop)
        if usage is None:
            return None
        if status:
            raise subprocess.CalledProcessError(status, command)
        output.seek(0)
        report = json.load(output)
    metrics = read_metrics(out / "training")
    speeds = [entry["tokens_per_second"] for entry in metrics if "tokens_per_second" in entry]
    measured = {"peak_bytes": usage.ru_maxrss * 1024, "tokens_per_second": statistics.median(speeds)}
    found = report["adaptation"] | measured
    result.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return found


def _ended(process: subprocess.Popen[bytes], stop: Callable[[], bool]) -> tuple[int, resource.struct_rusage | None]:
    """(the status, what the process used); without the latter where `stop` ended it."""
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            return process.returncode, usage
        if stop():
            process.terminate()
            return process.wait(), None
        time.sleep(0.1)


def answers(directory: Path) -> list[str]:
    """Greedy answers to the questions; of a model without a chat template, what it writes after them."""
    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True, dtype=torch.float32)
    found = []
    for question in QUESTIONS:
        text = f"Question: {question}\nAnswer:"
        if tokenizer.chat_template:
            asked = [{"role": "user", "content": question}]
            text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        inputs = tokenizer(text, return_tensors="pt", add_special_tokens=not tokenizer.chat_template)
        written = model.generate(**inputs, max_new_tokens=MOST_ANSWERED, do_sample=False)
        found.append(tokenizer.decode(written[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip())
    return found


@functools.cache  # of the original it is asked for with every run
@torch.no_grad()
def perplexity(directory: Path) -> float:
    """Of the packaged text, its first 2,048 tokens in windows of 256, which no run has trained on."""
    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True, dtype=torch.float32).eval()
    ids = torch.tensor(tokenizer(CALIBRATION.read_text(encoding="utf-8")).input_ids[:PROSE])
    windows = text_windows(ids, WINDOW, begins=begins_texts(ids, model.config.to_dict()))
    losses = [float(model(input_ids=window[None], labels=window[None]).loss) * (len(window) - 1) for window in windows]
    return math.exp(sum(losses) / sum(len(window) - 1 for window in windows))


def timed_steps(model: Path, directory: Path, repeats: int) -> dict[str, list[float]]:
    """Seconds of this process's cores for forward and backward of a distillation step, by way, each `repeats` times in
    turns: what else the machine does is not in them."""
    ids = torch.randint(0, 1000, STEP, generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids, "position_ids": torch.arange(STEP[1]).expand_as(ids)}
    steps = {}
    for way, options in WAYS.items():
        student = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True, dtype=torch.float32)
        teacher = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval().requires_grad_(False)
        if "all" not in options:
            freeze_unchanged(student)
            share_frozen(student, teacher)
        steps[way] = _step(student, teacher, batch, "bf16=false" not in options)
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for repeat in range(repeats + 1):  # the first one warms up
        for way, step in steps.items():
            before = time.process_time()
            step()
            if repeat:
                times[way].append(time.process_time() - before)
    return times


def _step(student: Any, teacher: Any, batch: Batch, bf16: bool) -> Any:
    trunk = trunk_of(student, teacher)
    ours, theirs = HuggingFaceModel(student, None), HuggingFaceModel(teacher, None)

    def step() -> None:
        student.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            with torch.no_grad(), contextlib.nullcontext() if trunk is None else trunk.kept():
                taught = theirs(batch)
            with contextlib.nullcontext() if trunk is None else trunk.given():
                computed = ours(batch)
            loss = objective.divergence(computed, taught, objective.own_targets(batch["labels"], computed.indices))
        loss.backward()

    return step


@dataclass(frozen=True)
class Case:
    """One run: `directory` is what the recipe wrote, and what is trained comes to `out`."""

    recipe: str
    way: str
    options: tuple[str, ...]
    tokens: int
    tp: int | None
    directory: Path
    out: Path

    def run(self, model: Path, evaluation: str) -> dict[str, Any]:
        """What is recorded of it."""
        found = trained(self.directory, self.out, self.tokens, list(self.options), evaluation)
        assert found is not None  # nothing stops it
        entries = [entry for entry in read_metrics(self.out / "training") if "divergence" in entry]
        return {
            "model": model.name,
            "recipe": self.recipe,
            "way": self.way,
            "tp": self.tp,
            "tokens": found["tokens"],
            "date": time.strftime("%Y-%m-%d"),
            "losses": {name: found["losses"][name] for name in ("original", "before", "after")},
            "tokens_per_second": round(found["tokens_per_second"]),
            "peak_bytes": found["peak_bytes"],
            "curve": [[entry["tokens"], round(entry["divergence"], 4)] for entry in entries],
        }


def cases(given: argparse.Namespace) -> Iterator[Case]:
    """Every recipe at every number of tokens in every way."""
    ways = {way: (WAYS | STAGES)[way] for way in given.way or ["defaults"]}
    ways |= {f"rate {rate}": ["--set", f"learning_rate={rate}"] for rate in given.rate or []}
    for recipe in given.recipe or ["ladder-upper-half"]:
        name = Path(recipe).stem + ("-unpermuted" if given.unpermuted else "")
        directory = given.build / name
        if not directory.exists():
            loaded = Recipe.load(recipe)
            if given.unpermuted:
                kept = tuple(p for p in loaded.passes if p.pass_name != "permute")
                loaded = loaded.model_copy(update={"passes": kept})
            convert(given.model, loaded, out=directory, tp=given.tp or 1, options=SaveOptions(verify="none"))
        for tokens in given.tokens or [24_576]:
            for way, options in ways.items():
                out = given.build / f"{name}-{tokens}-{way.replace(' ', '-').replace(',', '')}"
                yield Case(name, way, tuple(options), tokens, given.tp, directory, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--recipe", action="append", help="a name, or a file")
    parser.add_argument("--tokens", type=int, action="append")
    parser.add_argument("--way", action="append", choices=WAYS | STAGES)
    parser.add_argument("--rate", action="append", help="a learning rate, in place of the one that follows")
    parser.add_argument("--eval", default="self:16384")
    parser.add_argument("--tp", type=int, default=None, help="ranks of a recipe that is bound to them")
    parser.add_argument("--unpermuted", action="store_true", help="leave heads and channels in their order")
    parser.add_argument("--steps-only", action="store_true")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--ask", action="store_true", help="ask original, rewritten and healed model ten questions")
    parser.add_argument("--build", type=Path, default=Path("build/healing"))
    parser.add_argument("--record", action="store_true", help="add what is found to benchmarks/healing/record.json")
    parser.add_argument("--page", action="store_true", help="write docs/results/adaptation.md, and do nothing else")
    given = parser.parse_args()
    if given.page:
        healing_page.write()
        return
    if given.model is None:
        parser.error("a model is needed: a checkpoint directory")
    given.build.mkdir(parents=True, exist_ok=True)
    for case in cases(given):
        if given.steps_only:
            seconds = timed_steps(given.model, case.directory, given.repeats)
            found = {"model": given.model.name, "recipe": case.recipe, "tokens": STEP[0] * STEP[1], "seconds": seconds}
            kind = "steps"
        else:
            found, kind = case.run(given.model, given.eval), "runs"
            read = zip(("original", "before", "after"), (given.model, case.directory, case.out), strict=True)
            found["perplexity"] = {name: round(perplexity(place), 2) for name, place in read}
            if given.ask:
                asked = zip(QUESTIONS, *map(answers, (given.model, case.directory, case.out)), strict=True)
                found["answers"] = [[" ".join(cell.split()) for cell in row] for row in asked]
        print(json.dumps(found, ensure_ascii=False))
        if given.record:
            healing_page.add(kind, found)


if __name__ == "__main__":
    main()
