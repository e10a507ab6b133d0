"""Drift of a rewritten model from the original, on real weights and text; and golden logits from the same weights."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rewriter.common.errors import RewriterError, VerificationError
from rewriter.common.files import read_json
from rewriter.common.text_settings import check_tokens, vocabulary_size
from rewriter.common.text_windows import begins_texts, text_windows
from rewriter.common.tokenizer_code import own_code
from rewriter.ir import Program
from rewriter.ir.absolute_positions import most_tokens
from rewriter.ir.phases import prompt_phase
from rewriter.ir.simulate import load_weights, simulate
from rewriter.output.manifest import Drift
from rewriter.passes.phases import both_wirings
from rewriter.tracing.meta_model import needs_own_code

CALIBRATION = Path(__file__).with_name("calibration.txt")
GOLDEN_TOKENS = 16
WINDOW = 256
# Multiply-adds that a measurement may take: about a minute on two cores.
_BUDGET = 1.5e12
_FEWEST, _MOST = 64, 2048


class DriftSums:
    """Sums over windows of a text: what a `Drift` is the mean of."""

    def __init__(self) -> None:
        self.divergences: list[float] = []  # nats per token, by window
        self.tokens = self.predicted = self.agreement = 0
        self.divergence = self.before = self.after = 0.0

    def add(self, tokens: torch.Tensor, original: torch.Tensor, rewritten: torch.Tensor) -> None:
        """One window: token ids int64 [T] and the logits of both models after each, [T, vocabulary]."""
        old, new = original.float().log_softmax(-1), rewritten.float().log_softmax(-1)
        divergence = float((old.exp() * (old - new)).sum())
        self.divergences.append(divergence / len(tokens))
        self.divergence += divergence
        self.agreement += int((old.argmax(-1) == new.argmax(-1)).sum())
        self.tokens += len(tokens)
        following = tokens[1:, None]
        self.before -= float(old[:-1].gather(-1, following).sum())
        self.after -= float(new[:-1].gather(-1, following).sum())
        self.predicted += len(tokens) - 1

    @property
    def kl(self) -> float:
        """Mean KL(original ‖ rewritten), nats per token; rounding never makes it negative."""
        return max(self.divergence / self.tokens, 0.0)

    def result(self, text: str) -> Drift:
        """The means; perplexities of e^700 at most. `text` says what was read. Raises VerificationError for logits that
        were not finite."""
        if not all(map(math.isfinite, (self.divergence, self.before, self.after))):
            raise VerificationError(
                f"drift on {text}: logits are not finite, although the weights are. The model computes beyond the "
                "range of fp32"
            )
        predicted = max(self.predicted, 1)
        return Drift(
            kl=self.kl,
            top1_agreement=self.agreement / self.tokens,
            perplexity_before=math.exp(min(self.before / predicted, 700.0)),
            perplexity_after=math.exp(min(self.after / predicted, 700.0)),
            tokens=self.tokens,
            text=text,
        )


@torch.no_grad()
def drift(
    original: Program,
    rewritten: Program,
    tokens: torch.Tensor,
    *,
    weights: Mapping[str, torch.Tensor] | None = None,
    rewritten_weights: Mapping[str, torch.Tensor] | None = None,
    text: str = "given tokens",
) -> Drift:
    """Compare two programs over one checkpoint on `tokens`, int64 [T]; a sharded one is computed on all its ranks.

    The tokens are read in `windows`. Where passes rewire the prompt alone, four fifths of a window (of 320 then) are a
    prompt, and what comes after it counts. `weights` are full fp32 tensors by runtime name, `rewritten_weights` those
    of the rewritten program where they differ (a pass may fuse or repeat parameters); by default the checkpoint is
    read. Raises RewriterError for fewer than two tokens or a
    program without weights.
    """
    if tokens.ndim != 1 or len(tokens) < 2:
        raise RewriterError(f"drift: {list(tokens.shape)} tokens; at least two in one row are needed")
    if weights is None:
        weights = load_weights(original, torch.float32)
    if rewritten_weights is None:
        rewritten_weights = other_weights(rewritten, original, weights)
    sums, rewritten = DriftSums(), both_wirings(rewritten)
    pieces = read_in(original, rewritten, tokens)
    for window, prompt in pieces:
        before = simulate(original, window[None], weights=weights)[0]
        phase = prompt_phase(rewritten)
        rewired = None if phase is None else phase.rewired(len(window), prompt=prompt)
        after = simulate(rewritten, window[None], weights=rewritten_weights, rewired=rewired)[0]
        first = max(prompt - 1, 0)  # the last token of a prompt is the first whose logits count
        sums.add(window[first:], before[first:], after[first:])
    return sums.result(text + (f", after prompts of {pieces[0][1]}" if pieces[0][1] else ""))


def read_in(original: Program, rewritten: Program, tokens: torch.Tensor) -> list[tuple[torch.Tensor, int]]:
    """`tokens`, int64 [T], in windows, and how many tokens of each are a prompt, whose own logits do not count.

    0 where all tokens are computed alike. Else a fifth of each window, of 320 tokens or as many as there are or the
    model has positions, comes after the prompt.
    """
    if prompt_phase(rewritten) is None:
        return [(window, 0) for window in windows(original, tokens)]
    length = min(WINDOW * 5 // 4, most_tokens(original), len(tokens))
    prompt = length * 4 // 5
    return [(window, prompt) for window in windows(original, tokens, length) if len(window) > prompt]


def windows(program: Program, tokens: torch.Tensor, length: int = WINDOW) -> list[torch.Tensor]:
    """`tokens`, int64 [T], in windows of `length` or as many as the model has positions; the last may be shorter.

    Where the first token begins every text of the model, it begins each window.
    """
    begins = begins_texts(tokens, program.source.config)
    return text_windows(tokens, min(length, most_tokens(program)), begins=begins)


def other_weights(
    program: Program, original: Program, weights: Mapping[str, torch.Tensor]
) -> Mapping[str, torch.Tensor]:
    """The weights of `program`, given those of the `original` that it was made from: equal ones are shared, not copied.

    Only parameters that the original has not, or makes from other tensors of the checkpoint, are read again.
    """
    same = {
        name: weights[name]
        for name, parameter in program.parameters.items()
        if name in weights and parameter.expression == original.parameters[name].expression
    }
    if len(same) == len(program.parameters):
        return same
    rest = {name: parameter for name, parameter in program.parameters.items() if name not in same}
    return same | load_weights(program.with_(parameters=rest), torch.float32)


def calibration_tokens(program: Program, text: str | None = None) -> tuple[torch.Tensor, str]:
    """(token ids int64 [T], what they are): of `text`, by default the packaged one, by the checkpoint's tokenizer.

    Without a tokenizer the tokens are random, and the description says so. T is bounded by the size of the model. Of
    the packaged text, tokens beyond the vocabulary are left out, and the description says so; a given `text` that has
    some raises RewriterError.
    """
    most = max(_FEWEST, min(_MOST, int(_BUDGET / (2 * max(parameter_count(program), 1)))))
    vocabulary = vocabulary_of(program)
    ids: list[int] = []
    described = "a given text" if text is not None else "the packaged calibration text"
    tokenizer = load_tokenizer(program.source.path, program.source.remote_code)
    if tokenizer is not None:
        ids = tokenizer(text if text is not None else CALIBRATION.read_text(encoding="utf-8")).input_ids
        if text is not None:
            check_tokens("--calibration", ids, vocabulary, tokenizer)
        elif len(kept := [i for i in ids if i < vocabulary]) < len(ids):
            described += f", without {len(ids) - len(kept)} tokens beyond the model's vocabulary of {vocabulary}"
            ids = kept
    if len(ids) >= 2:
        return torch.tensor(ids[:most]), described
    generator = torch.Generator().manual_seed(0)
    why = "the checkpoint has no tokenizer" if tokenizer is None else "the tokenizer gives too few tokens"
    return torch.randint(vocabulary, (min(most, 512),), generator=generator), f"random tokens, since {why}"


def tokenizer_files(directory: Path) -> list[str]:
    """The files of a tokenizer that lie in a directory."""
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
    return [name for name in names if (directory / name).is_file()]


def load_tokenizer(path: str | None, trust_remote_code: bool = False) -> Any | None:
    """The checkpoint's tokenizer, or None where it has none that loads.

    Raises RewriterError for one that needs code of its own, which was not allowed to run or fails.
    """
    if path is None or not tokenizer_files(Path(path)):
        return None
    from transformers import AutoTokenizer

    try:
        config = None if trust_remote_code else _config_without_code(Path(path))
        return AutoTokenizer.from_pretrained(path, config=config, trust_remote_code=trust_remote_code)
    except Exception as error:  # tokenizers come in many forms, and fail in as many ways
        if not (code := own_code(path)):
            return None
        if trust_remote_code:
            reason = " ".join(str(error).split())
            raise RewriterError(f"{path}: its tokenizer's own code ({code[0]}) fails: {reason:.300}") from error
        raise RewriterError(
            f"{path}: its tokenizer brings its own Python code ({code[0]}). Read it, then pass --trust-remote-code to "
            "run it"
        ) from error


def _config_without_code(directory: Path) -> Any | None:
    """A config by which transformers finds a tokenizer's class, where that of `directory` needs code of its own, as an
    output's does; else None. By itself transformers reads such a config as one of no type, which fails for most kinds
    of rotary positions (llama3, yarn, longrope)."""
    from transformers import AutoConfig, PreTrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    file = directory / "config.json"
    config = read_json(file, "Copy it anew.") if file.is_file() else {}
    if not needs_own_code(config):
        return None
    kind = str(config.get("model_type", "")).removeprefix("rewriter_")
    own = {"tokenizer_class": config.get("tokenizer_class")}
    return AutoConfig.for_model(kind, **own) if kind in CONFIG_MAPPING else PreTrainedConfig(**own)


def golden_tokens(program: Program) -> torch.Tensor:
    """The fixed short sequence of golden logits: int64 [1, 16], spread over the vocabulary.

    Where passes rewire the prompt alone, it has 16 rewired tokens as far as the model has positions.
    """
    vocabulary, phase = vocabulary_of(program), prompt_phase(program)
    count = GOLDEN_TOKENS + (phase.exact_head + phase.exact_tail if phase is not None else 0)
    steps = torch.arange(1, min(count, most_tokens(program)) + 1)
    return ((steps * 7919 + steps * steps * 104729) % vocabulary)[None]


@torch.no_grad()
def golden_logits(program: Program, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Logits [vocabulary], fp32, of a single-device program after the golden tokens: they depend on all of them."""
    return simulate(both_wirings(program), golden_tokens(program), weights=weights)[0, -1].float().contiguous()


def parameter_count(program: Program) -> int:
    """Elements of all parameters of the full model."""
    return sum(math.prod(spec.full_shape or spec.shape) for spec in program.parameters.values())


def largest_parameter(program: Program) -> int:
    """Elements of the largest parameter of the full model."""
    return max(math.prod(spec.full_shape or spec.shape) for spec in program.parameters.values())


def too_large(program: Program, copies: int = 1) -> str | None:
    """Reason why the real weights cannot be computed with here; None when they fit into half of the free memory."""
    shortage = memory_shortage(copies * parameter_count(program))
    return shortage and f"the real weights were not run: in fp32 they take {shortage}"


def memory_shortage(elements: int) -> str | None:
    """Message on the memory that fp32 numbers take and what is free; None when they fit into half of that."""
    needed, free = 4 * elements, available_memory()
    return None if needed <= free / 2 else f"{needed / 1e9:.1f} GB, and half of the free memory is {free / 2e9:.1f} GB"


def available_memory() -> int:
    """Bytes of memory that can be used without swapping, within the limit of this process's control group."""
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        if limit.isdigit():
            free = min(free, int(limit) - used)
    except (OSError, ValueError):
        pass  # no Linux, or no control group: the first answer stands
    return max(free, 0)


def vocabulary_of(program: Program) -> int:
    """The rows of the model's table of token embeddings. Raises RewriterError where its config does not say."""
    size = program.source.vocabulary or vocabulary_size(program.source.config)
    if size is None:
        raise RewriterError(f"model type {program.source.model_type!r}: its config names no vocab_size")
    return size
