"""The chosen mix trained lightly, by distillation from the original on texts that it writes itself, and measured
again."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from rewriter.adapt.adaptation import adapt
from rewriter.adapt.options import Options
from rewriter.common.errors import RewriterError
from rewriter.common.scratch import scratch_folder
from rewriter.common.text_settings import quantization_settings
from rewriter.convert.conversion import convert
from rewriter.convert.preflight import check_free
from rewriter.convert.rewritten_source import open_output, rewritten, write_source
from rewriter.ir import Program
from rewriter.passes.base import single_device
from rewriter.passes.quantize_collectives import always_quantized, is_quantized
from rewriter.recipes import Recipe
from rewriter.search.losses import Rise, rise_of
from rewriter.search.result import Healed, SearchResult
from rewriter.search.streamed_weights import StreamedWeights
from rewriter.search.tails import Tails
from rewriter.search.texts import Text, written
from rewriter.verify.drift import load_tokenizer
from rewriter.verify.simulate import simulate

_ROWS = 8  # at least


@dataclass(frozen=True)
class Healing:
    """Train on `tokens` tokens, with the settings that `rewrite adapt` has for so many, into the directory `out`."""

    tokens: int
    out: Path

    def check(self, program: Program) -> None:
        """Refuse, before any work, what cannot be trained. Raises RewriterError."""
        check_free(self.out)
        if load_tokenizer(program.source.path, program.source.remote_code) is None:
            raise RewriterError(
                f"--heal {self.tokens}: {program.source.path} has no tokenizer, and `rewrite adapt` reads text. Put "
                "tokenizer.json into the directory, or leave out --heal"
            )


def heal(
    found: SearchResult, healing: Healing, tails: Tails, text: Text, seed: int, progress: Callable[..., None]
) -> Healed:
    """Convert, train and measure the chosen mix of `found`. Raises RewriterError and VerificationError as these do."""
    program = tails.computed.original
    length = text.held_out.shape[1]
    rows = max(_ROWS, -(-healing.tokens // length))
    with scratch_folder("heal") as place:
        data = place / "own.jsonl"
        recipe = Recipe.parse(found.recipe)
        tp, sp, trust = found.ranks["tp"], found.ranks["sp"], program.source.remote_code
        stored = bool(quantization_settings(program.source.config))
        source, out = str(program.source.path), place / "rewritten"
        convert(source, recipe, out=out, tp=tp, sp=sp, verify="none", trust_remote_code=trust, dequantize=stored)
        _write_texts(program, data, rows, length, seed + 1, progress)
        settings = {"seed": seed, "use_cpu": True}
        options = Options(tokens=rows * length, length=length, trust_remote_code=trust, settings=settings)
        adapt(out, data=data, out=healing.out, verify="none", options=options, progress=progress)
        opened = open_output(healing.out)
        after = _rise(rewritten(opened, write_source(opened, place / "source")), tails, text)
    assert found.chosen.held_out is not None
    return Healed(rows * length, found.chosen.held_out, after, str(healing.out))


def _write_texts(
    program: Program, file: Path, rows: int, length: int, seed: int, progress: Callable[..., None]
) -> None:
    tokenizer = load_tokenizer(program.source.path, program.source.remote_code)
    assert tokenizer is not None
    with file.open("w", encoding="utf-8") as lines:
        for first in range(0, rows, 32):
            progress("healing: the model writes a text", first, rows)
            ids = written(program, min(32, rows - first), length, seed + first)
            for row in ids.tolist():
                lines.write(json.dumps({"text": tokenizer.decode(row, skip_special_tokens=True)}) + "\n")


@torch.no_grad()
def _rise(trained: Program, tails: Tails, text: Text) -> Rise:
    """The rise in loss of a rewritten program with weights of its own, on what was held out."""
    computed = always_quantized(trained) if is_quantized(trained) else single_device(trained)
    weights = StreamedWeights(computed)
    changes, loss, predicted = [], 0.0, 0
    for ids in text.held_out:
        *_, (_, final) = tails.streams(ids)
        reference = tails.reference(ids, final)
        changes.append(reference.change(simulate(computed, ids[None], weights=weights)[0]))
        loss, predicted = loss + reference.loss, predicted + len(ids) - 1
    return rise_of(changes, loss / predicted, text.own)
