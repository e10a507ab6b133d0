"""transformers' conversions of checkpoints as expressions: what each converter makes of random tensors, to the bit."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import conversion_mapping
from transformers.core_model_loading import Chunk, WeightConverter

from rewriter.common.errors import RewriterError
from rewriter.tracing import parameters as conversions
from rewriter.tracing.parameters import converted
from rewriter.weights import Checkpoint
from rewriter.weights.expressions import Tensor

OPERATIONS = {"MergeModulelist", "Concatenate", "Transpose", *conversions._MOVING}
EXPERTS = 3


def installed_converters() -> dict[str, WeightConverter]:
    """Every converter of language models that transformers has, each once, by type and pattern."""
    found: dict[str, WeightConverter] = {}
    for name, mapping in conversion_mapping._build_checkpoint_conversion_mapping().items():
        for each in mapping:
            known = isinstance(each, WeightConverter) and {type(o).__name__ for o in each.operations} <= OPERATIONS
            if known and not any("\\" in p and "(" in p for p in (*each.source_patterns, *each.target_patterns)):
                found[f"{name} {each.source_patterns[0]}"] = each
    return found


class Subject:
    """Random tensors for a converter, and a model that has the parameters that it makes."""

    def __init__(self, converter: WeightConverter, number: int) -> None:
        self.converter = converter
        kinds = {type(o).__name__ for o in converter.operations}
        dims = {getattr(o, name, 0) for o in converter.operations for name in ("dim", "dim0", "dim1")}
        count = EXPERTS if "MergeModulelist" in kinds else 1
        rank = 3 if max(dims) > 1 and count == 1 else 2
        sizes = (24, 16, 8)[:rank] if "Concatenate" not in kinds else (24, 24, 24)[:rank]
        self.target = f"model.layers.0.{converter.target_patterns[0].strip('^.$')}.weight"
        self.sources, self.tensors = {}, {}
        for index, pattern in enumerate(converter.source_patterns):
            names = [f"{number}.{index}.{copy}" for copy in range(count)]
            self.sources[pattern] = names
            self.tensors |= {name: torch.randn(sizes) for name in names}
        self.config = SimpleNamespace(num_attention_heads=2, unpadded_vocab_size=5)
        self.config.get_text_config = lambda: self.config
        self.shape = torch.Size(sizes)

    def get_parameter(self, name: str) -> torch.Tensor:
        """What `Split` measures: 5, 7, 7, … rows, and the rest for the last."""
        patterns = [p.strip("^.$") for p in self.converter.target_patterns]
        if not any(type(o).__name__ == "Split" for o in self.converter.operations):
            return torch.empty(self.shape, device="meta")
        place = max((len(p), i) for i, p in enumerate(patterns) if f".{p}.weight" in name)[1]
        rows = [5, *[4] * (len(patterns) - 2)]
        return torch.empty([*rows, 24 - sum(rows)][place], *self.shape[1:], device="meta")

    def expected(self) -> dict[str, torch.Tensor]:
        """What transformers makes of the tensors."""
        converter = copy.deepcopy(self.converter)
        for pattern, names in self.sources.items():
            for name in names:
                converter.add_tensor(self.target, name, pattern, lambda name=name: self.tensors[name].clone())
        return converter.convert(self.target, model=self, config=self.config)

    def found(self, checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
        """What our expressions give."""
        tensors = {name: Tensor(name) for name in self.tensors}
        model: Any = self
        made = converted(model, self.converter, self.sources, self.target, tensors, checkpoint.shapes)
        return {name: checkpoint.evaluate(expression) for name, expression in made.items()}


def differing(subjects: dict[str, Subject], folder: Path) -> list[str]:
    save_file({n: t for s in subjects.values() for n, t in s.tensors.items()}, folder / "model.safetensors")
    checkpoint = Checkpoint.open(folder)
    wrong = []
    for name, subject in subjects.items():
        expected, found = subject.expected(), subject.found(checkpoint)
        if expected.keys() != found.keys() or not all(torch.equal(expected[n], found[n]) for n in expected):
            wrong.append(name)
    return wrong


def test_every_converter_gives_what_transformers_makes(tmp_path: Path) -> None:
    subjects = {name: Subject(c, i) for i, (name, c) in enumerate(installed_converters().items())}
    used = {type(o).__name__ for s in subjects.values() for o in s.converter.operations}
    assert {"MergeModulelist", "Concatenate", "Chunk"} <= used
    assert len(subjects) > 100
    assert differing(subjects, tmp_path) == []


def test_exchanged_chunks_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above can fail: the operation gives its pieces in another order to us."""
    subjects = {n: Subject(c, i) for i, (n, c) in enumerate(installed_converters().items()) if "Chunk" in str(kinds(c))}
    right = Chunk.convert

    def exchanged(self: Any, given: Any, *args: Any, **options: Any) -> Any:
        found = right(self, given, *args, **options)
        ours = isinstance(options.get("model"), conversions._PlacesModel)
        return dict(zip(found, reversed(found.values()), strict=True)) if ours else found

    monkeypatch.setattr(Chunk, "convert", exchanged)
    assert len(differing(subjects, tmp_path)) == len(subjects) > 1


def kinds(converter: WeightConverter) -> list[str]:
    return [type(operation).__name__ for operation in converter.operations]


def test_a_conversion_that_computes_is_refused_by_name(tmp_path: Path) -> None:
    class Doubles(Chunk):
        """Its places would look like rows to take."""

    subject = Subject(WeightConverter("a", ["b", "c"], [Doubles(dim=0)]), 0)
    save_file(subject.tensors, tmp_path / "model.safetensors")
    with pytest.raises(RewriterError, match=re.escape("model.layers.0.b.weight: transformers makes it by Doubles")):
        subject.found(Checkpoint.open(tmp_path))
