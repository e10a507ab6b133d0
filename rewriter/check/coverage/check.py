"""One type: build it small, trace it, rewrite it in every way, and compare each result with an independent reference.

Every comparison is in fp32 with the unmodified eager model, loaded from the checkpoint that was traced, or with a
reference made of that model by hooks; at lengths beyond every window. A refusal is a result too, with its reason.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as hf_logging

from rewriter.check.comparison import DIFFERENT, RANKS, compare, exact_limit, relative_error
from rewriter.check.coverage.configs import small_config
from rewriter.check.coverage.report import PARTS, Coverage, explain
from rewriter.check.random_model import EAGER, build_model, random_ids, randomize, save_model
from rewriter.check.reference_modes import original_logits, reference_of
from rewriter.check.shrunken_check import apply_passes, candidates, test_lengths
from rewriter.check.stream_hooks import decoder_layers
from rewriter.common.errors import RewriterError, VerificationError
from rewriter.common.files import scratch_folder
from rewriter.common.model_class import auto_class
from rewriter.emit.huggingface import emit_huggingface
from rewriter.emit.module import emit_runtime_module
from rewriter.ir import Program, ops
from rewriter.ir.marks import marks
from rewriter.ir.residual import residual_blocks
from rewriter.ir.simulate import load_weights, simulate
from rewriter.passes.desync import Desync
from rewriter.passes.ladder import Ladder
from rewriter.passes.merge_reductions import MergeReductions
from rewriter.passes.tensor_parallel import TensorParallel
from rewriter.tracing import trace


def check(
    model_type: str, then: Callable[[Subject], None] = lambda subject: None, checks: Collection[str] = PARTS
) -> Coverage:
    """These checks of one type; `then` is called with what was checked, unless it does not build or trace.

    Raises nothing that a model or a rewrite may cause: that is in the result.
    """
    result = Coverage(model_type)
    checked(result, Subject, checks, then)
    return result


def checked(
    result: Coverage,
    kind: type[Subject],
    checks: Collection[str],
    then: Callable[[Subject], None] = lambda subject: None,
) -> None:
    """Fill in a row by these checks of a kind of subjects."""
    begin = time.perf_counter()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    with (
        scratch_folder("coverage") as scratch,
        torch.no_grad(),
        contextlib.suppress(Stopped),
    ):
        subject = kind(result, scratch)
        subject.try_all(checks)
        then(subject)
    result.seconds = round(time.perf_counter() - begin, 2)


_Reference = Callable[[torch.Tensor], torch.Tensor]
"""Logits [rows, tokens, vocabulary] of tokens [rows, tokens]."""


# what is tried where another thing holds
_OF_STREAMS = {"desync": "stream", "emitted": "ladder"}


class Stopped(Exception):
    """Without this check there is nothing to compare in those that follow."""


class Subject:
    """One small model, its program, and what its logits must be."""

    def __init__(self, result: Coverage, scratch: Path, changes: Mapping[str, Any] = MappingProxyType({})) -> None:
        self.result, self.scratch, self.changes = result, scratch, changes
        self.source = scratch / "model"

    def small_config(self) -> PreTrainedConfig:
        """The config of the model that is tried."""
        return small_config(self.result.type, self.changes)

    def try_all(self, checks: Collection[str]) -> None:
        """Make these checks."""
        self.run(checks)

    def run(self, checks: Collection[str] = PARTS) -> None:
        """Make these checks; "builds" and "traces" are needed by the others."""
        with self.noted("builds", needed=True):
            self.config = self.small_config()
            model = build_model(self.config)
        with self.noted("traces", needed=True):
            self.model = self._checkpoint(model)
            self.batches = [random_ids(self.config, length) for length in test_lengths(self.config)]
            self.original = functools.partial(original_logits, self.model)
            self.expected = [self.original(ids) for ids in self.batches]
            self.weights = load_weights(self.program, torch.float32)
            self.limit = exact_limit(self.program)
            self._require(self.program, self.expected, self.original, self.limit, "the traced program")
        self.result.blocks = len(residual_blocks(self.program))
        self.result.stream = self.result.blocks > 0
        parts: dict[str, Callable[[], None]] = {
            "ladder": self._ladder,
            "tp2": functools.partial(self._tensor_parallel, 2),
            "tp4": functools.partial(self._tensor_parallel, 4),
            "desync": self._desync,
            "emitted": self._emitted,
        }
        for name, part in parts.items():
            if name in checks and (name not in _OF_STREAMS or getattr(self.result, _OF_STREAMS[name])):
                with self.noted(name):
                    part()
        for name in _OF_STREAMS.keys() & set(checks):  # what is not tried has the reason that the ladder has
            if not getattr(self.result, name):
                self.result.reasons.setdefault(name, self.result.reasons.get("ladder", ""))

    @contextlib.contextmanager
    def noted(self, name: str, *, needed: bool = False) -> Iterator[None]:
        """Note whether the block ran through. What stops one that is `needed` stops those that follow, too."""
        try:
            yield
        except Exception as error:  # models, and what reads them, may raise any error
            self.result.reasons[name] = explain(error).replace(str(self.scratch), "…")
            if isinstance(error, VerificationError):
                self.result.wrong.append(name)
            if needed:
                raise Stopped from error
        else:
            setattr(self.result, name, True)

    def _checkpoint(self, model: PreTrainedModel) -> PreTrainedModel:
        """The model with weights that show a wrong ladder, saved as a checkpoint that is traced, and loaded from it."""
        built = [model]

        def build(strength: float) -> PreTrainedModel:
            made = built.pop() if built else build_model(self.config)
            randomize(made, strength)
            return made

        save_model(model, self.config, self.source)
        self.program = trace(self.source)  # of all weights the same
        for model in candidates(self.config, build):
            ids = random_ids(self.config, 21)
            original = original_logits(model, ids)
            if not bool(original.isfinite().all()):
                raise RewriterError("with large random weights the model's own logits are not finite")
            try:
                rewired = ladder_reference(self.program, range(len(decoder_layers(model))))(model, ids)
            except Exception:  # a model without reference still has a trace; the ladder's check says the reason
                break
            if relative_error(rewired, original) >= DIFFERENT:
                break
        save_model(model, self.config, self.source)
        loaded: PreTrainedModel = auto_class(self.config).from_pretrained(self.source, **EAGER)
        return loaded.eval()

    def _require(
        self, program: Program, expected: list[torch.Tensor], reference: _Reference, limit: float, what: str
    ) -> None:
        """Raise VerificationError unless `program` gives the logits that `reference` gives for the batches.

        Where an expert is hardly better than the next one, rounding chooses. Other tokens, drawn twice, then tell that
        from a wrong program.
        """
        for ids, logits in zip(self.batches, expected, strict=True):
            try:
                _require_equal(simulate(program, ids, weights=self.weights), logits, limit, what)
            except VerificationError:
                for others in random_ids(self.config, ids.shape[1], 6)[2:].split(2):
                    _require_equal(simulate(program, others, weights=self.weights), reference(others), limit, what)

    def _ladder(self) -> None:
        """Every layer, then every second one: both transitions. The last one is what is emitted."""
        every = self._layers()
        for layers in (set(every), set(every[1::2])):
            program = Ladder(sorted(layers)).apply(self.program)
            reference = functools.partial(ladder_reference(self.program, layers), self.model)
            expected = [reference(ids) for ids in self.batches]
            self._require_different(expected)
            self._require(program, expected, reference, self.limit, "the ladder")
            self.rewritten, self.rewritten_logits = program, expected

    def _layers(self) -> list[int]:
        """Layers that can be rewired. One may have no block: cross-attention with nothing to attend to is skipped."""
        having = sorted({block.layer for block in residual_blocks(self.program)})
        return having or list(range(self.program.source.num_layers))

    def _tensor_parallel(self, ranks: int) -> None:
        program = apply_passes(self.program, [TensorParallel()], {"tp": ranks})
        if ranks == 2:
            self.result.split = shared_parameters(program, ranks)
        self._require(
            program,
            self.expected,
            self.original,
            RANKS,
            f"the program on {ranks} ranks",
        )
        with contextlib.suppress(RewriterError):  # a runtime module cannot hold everything
            compile(emit_runtime_module(program), "module.py", "exec")
        entry = program.history[-1]
        self.result.reductions = sum(
            n.target is ops.all_reduce for n in program.graph.nodes if marks(n).layer is not None
        )
        self.result.replicated += [note for note in entry.notes if note not in self.result.replicated]

    def _desync(self) -> None:
        """The recipe desync-2x on two ranks: every second reduction is dropped, kept ones resync by mean."""
        passes = [TensorParallel(), MergeReductions(), Desync(self._layers(), n=2)]
        program = apply_passes(self.program, passes, {"tp": 2})
        logits = functools.partial(reference_of(program, passes).logits, self.model)
        expected = [logits(ids) for ids in self.batches]
        self._require_different(expected)
        self._require(program, expected, logits, RANKS, "desync on 2 ranks")

    def _require_different(self, expected: list[torch.Tensor]) -> None:
        """Refuse a comparison that the unmodified model would pass as well."""
        difference = max(relative_error(a, b) for a, b in zip(expected, self.expected, strict=True))
        if difference < DIFFERENT:
            raise RewriterError(
                f"shows nothing: the rewritten model differs from the original by {difference:.1e} only, "
                f"{DIFFERENT:.0e} is needed to tell them apart"
            )

    def _emitted(self) -> None:
        """The adapted checkpoint of the ladder, loaded as its users load it, where `rewriter` cannot be imported."""
        out = self.scratch / f"emitted_{self.result.type.replace('-', '_')}"
        shutil.copytree(self.source, out)
        files = emit_huggingface(self.rewritten)
        (out / "config.json").write_text(json.dumps(files.config), encoding="utf-8")
        if files.modeling_name is not None and files.modeling is not None:
            (out / files.modeling_name).write_text(files.modeling, encoding="utf-8")
        with mock.patch.dict(sys.modules, {"rewriter": None}):
            model, loaded = AutoModelForCausalLM.from_pretrained(
                out, trust_remote_code=True, output_loading_info=True, **EAGER
            )
        code = type(model).__init__.__globals__
        if "SMALL" in code and (difference := code["difference"]()):
            raise RewriterError(f"a version of transformers that its file does not name would be refused: {difference}")
        for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if names := sorted(map(str, loaded.get(what) or ())):
                raise RewriterError(f"{what.replace('_', ' ')}: {', '.join(names[:3])} ({len(names)} in all)")
        for ids, expected in zip(self.batches, self.rewritten_logits, strict=True):
            _require_equal(original_logits(model.eval(), ids), expected, self.limit, "the emitted checkpoint")
        self.emitted = model


def shared_parameters(program: Program, ranks: int) -> float | None:
    """The share of the layers' parameters that `ranks` ranks share: 0 where each holds all, 1 where each is held once;
    None without layers."""
    total = surplus = 0
    for name, parameter in program.parameters.items():
        if name.startswith(f"{program.source.layers}."):
            elements = math.prod(parameter.full_shape or parameter.shape)
            total += elements
            surplus += math.prod(parameter.shape) * ranks - elements
    return 1 - surplus / (ranks - 1) / total if total else None


def ladder_reference(program: Program, layers: Collection[int]) -> Callable[..., torch.Tensor]:
    """The ladder on `layers` of the unmodified model that is given with its input."""
    return reference_of(program, [Ladder(sorted(layers))]).logits


def _require_equal(actual: torch.Tensor, expected: torch.Tensor, limit: float, what: str) -> None:
    done = compare(what, actual, expected, limit)
    if not done.passed:
        raise VerificationError(
            f"WRONG: {what} differs at {expected.shape[1]} tokens: {done.worst}; relative error {done.error:.1e}"
        )
