"""Trains the shipped tiny Llama: byte-level, from scratch, on the source text of the Python standard library.

    python examples/train_tiny.py --out examples/tiny-llama

Plain torch and transformers. Most steps see short windows, because attention is what costs on a CPU; every few steps
see long ones, so that the model knows all positions it promises. The learning rate warms up, stays, and falls linearly
to zero; matrices are trained with Muon, embedding and norms with AdamW. The held-out loss in the card is that of the
weights as stored.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import tiny_corpus as corpus
import torch
import torch.nn.functional as F
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    logging,
)

Files = tuple[corpus.Corpus, corpus.Corpus]
"""Training files, held-out files."""

SAMPLE_PROMPT = "class Error(Exception):\n"
CARD = """---
license: other
license_name: psf-2.0
license_link: https://docs.python.org/3/license.html
library_name: transformers
pipeline_tag: text-generation
language: code
tags: [llama, byte-level, tiny, python]
---
# Tiny byte-level Llama

A Llama of {parameters:,} parameters, trained from scratch on the source text of the Python standard library. It is
small enough to ship and trained well enough that a change to its wiring shows in its loss. It writes text that looks
like Python; it is no assistant and its code does not run.

| | |
|---|---|
| Architecture | {shape} |
| Tokenizer | id = byte; `<|bos|>` 256, `<|eos|>` 257, `<|pad|>` 258, 5 rows unused; no merges; exact round trip |
| Text | Python {python}: {rule} |
| Split | by SHA-256 of the relative path modulo 20: 0 is held out |
| Training files | {train_files} ({train_bytes:,} bytes) |
| Held-out files | {held_out_files} ({held_out_bytes:,} bytes) |
| Training | {steps} steps, {tokens:,} tokens ({epochs:.2f} epochs), {minutes:.0f} minutes, {threads} CPU thread(s) |
| Optimizer | Muon for matrices, AdamW for embedding and norms; bf16 autocast, gradient norm clipped at 1, seed {seed} |
| Learning rate | {lr:g} after {warmup} steps, to zero over the last {decay_share:.0%}; weight decay {weight_decay:g} |
| Windows | {context} tokens, every {long_every}th step {max_context} |
| **Held-out loss** | **{loss:.4f} nats/byte = {bits:.4f} bits/byte** |

The held-out loss is that of the bf16 weights as stored, computed in fp32 on all held-out files, in adjoining windows
of {max_context} tokens; the cost of the marks that begin and end a file is counted, their number is not.
`heldout.txt` holds the beginnings of the held-out files.

Made by
```
{command}
```
{schedule}

Loss on a fixed slice of the held-out text (nats/byte) by step:

{curve}

In the last fifth of the run it fell by {late_fall:.4f}. A rate that falls to zero flattens any curve: at {ratio:.0f}
tokens per parameter, a longer run would still go lower.

Greedy continuation of `{prompt!r}` (chosen; most prompts soon end in a loop):
```text
{sample}
```

## Licence of the text

The training text and `heldout.txt` are parts of the Python standard library, under the PSF licence:
`LICENSE.txt`.

{copyright}
"""


@dataclass
class History:
    """What the card tells about a run."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    losses: list[tuple[int, float]] = field(default_factory=list)  # (step, nats per byte on the fixed held-out slice)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="checkpoint directory")
    parser.add_argument("--steps", type=int, default=2200)
    parser.add_argument("--batch", type=int, default=8192, help="tokens per step")
    parser.add_argument("--context", type=int, default=256, help="window of most steps")
    parser.add_argument("--max-context", type=int, default=1024, help="window of the other steps and of evaluation")
    parser.add_argument("--long-every", type=int, default=4, help="one step in so many has the long window")
    parser.add_argument("--lr", type=float, default=4e-3, help="peak learning rate")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--warmup", type=int, default=60, help="steps of linear warm-up")
    parser.add_argument("--decay-share", type=float, default=0.6, help="share of the steps in which the rate falls")
    parser.add_argument("--minutes", type=float, help="finish in this time: the schedule is brought forward if needed")
    parser.add_argument("--save-every", type=int, default=300, help="steps between checkpoints in --out")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-compile", action="store_true", help="train in eager mode (slower)")
    return parser.parse_args()


def build_model(max_context: int) -> LlamaForCausalLM:
    """A Llama of about 2.5 M parameters whose heads, widths and vocabulary divide by 2, 4 and 8."""
    config = LlamaConfig(
        vocab_size=corpus.VOCABULARY,
        hidden_size=192,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=24,
        intermediate_size=512,
        max_position_embeddings=max_context,
        tie_word_embeddings=True,
        bos_token_id=corpus.BOS,
        eos_token_id=corpus.EOS,
        pad_token_id=corpus.PAD,
    )
    model = LlamaForCausalLM(config)
    # What writes into the residual stream starts small: its variance would otherwise grow with depth.
    scale = (2 * config.num_hidden_layers) ** -0.5
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.data.mul_(scale)
    return model


def blockwise_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Causal attention, one block of queries after the other, against the keys that it can see.

    On a CPU about twice as fast as scaled_dot_product_attention, backward included: the other scores are never formed.
    `query` is (B, H, S, D), `key` and `value` are (B, K, S, D), H a multiple of K; returns (B, S, H, D). No padding.
    """
    batch, heads, length, width = query.shape
    groups = heads // key.shape[1]
    size = max(64, length // 8)
    blocks = []
    for start in range(0, length, size):
        stop = min(start + size, length)
        rows = torch.arange(start, stop).repeat(groups)
        block = query[:, :, start:stop].reshape(batch, heads // groups, groups * (stop - start), width)
        scores = (block @ key[:, :, :stop].transpose(-1, -2)).float() * scaling
        scores = torch.where(rows[:, None] >= torch.arange(stop), scores, -1e9)
        weights = scores.softmax(-1).to(value.dtype)
        blocks.append((weights @ value[:, :, :stop]).reshape(batch, heads, stop - start, width))
    return torch.cat(blocks, 2).transpose(1, 2), None


def windows(stream: np.ndarray, length: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Endless windows of length + 1 ids; an epoch visits the whole text once, shuffled, from a random offset."""
    while True:
        starts = np.arange(rng.integers(length), len(stream) - length - 1, length)
        rng.shuffle(starts)
        for start in starts:
            yield stream[start : start + length + 1]


def build_optimizers(model: LlamaForCausalLM, args: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for embedding and norms; `match_rms_adamw` lets one learning rate serve both."""
    embedding = model.get_input_embeddings().weight
    matrices = [p for p in model.parameters() if p.ndim == 2 and p is not embedding]
    others = [embedding, *(p for p in model.parameters() if p.ndim == 1)]
    return [
        torch.optim.Muon(matrices, lr=args.lr, weight_decay=args.weight_decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=args.lr, weight_decay=0.0, betas=(0.9, 0.95), fused=True),
    ]


def learning_rate(step: int, progress: float, args: argparse.Namespace) -> float:
    """Warm-up by steps, constant, then linearly to zero; `progress` is the share of the run that is done."""
    return args.lr * min(1.0, (step + 1) / args.warmup, (1.0 - progress) / args.decay_share)


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, stream: np.ndarray, context: int, limit: int | None = None) -> float:
    """Nats per byte: every id but the first predicted once, in windows of `context`, summed and divided by the bytes.

    `limit` takes that many windows, evenly spread: a fixed slice for the log.
    """
    starts = np.arange(0, len(stream) - 1, context)
    if limit is not None and limit < len(starts):
        starts = starts[np.linspace(0, len(starts) - 2, limit).astype(int)]
    total, count = 0.0, 0
    for start in starts:
        ids = torch.from_numpy(stream[start : start + context + 1])
        logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0]
        total += F.cross_entropy(logits.float(), ids[1:], reduction="sum").item()
        count += int((ids[1:] < 256).sum())
    return total / count


def save(model: LlamaForCausalLM, out: Path, card: str, held_out: corpus.Corpus) -> None:
    """Writes the checkpoint beside its place and moves it there file by file: a reader never sees half a file."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=out) as scratch:
        copy = LlamaForCausalLM(model.config).to(torch.bfloat16)
        copy.load_state_dict(model.state_dict())
        copy.generation_config = GenerationConfig(
            bos_token_id=corpus.BOS, eos_token_id=corpus.EOS, pad_token_id=corpus.PAD
        )
        copy.save_pretrained(scratch)
        corpus.build_tokenizer(model.config.max_position_embeddings).save_pretrained(scratch)
        Path(scratch, "README.md").write_text(card, encoding="utf-8")
        Path(scratch, "heldout.txt").write_text(corpus.excerpts(held_out), encoding="utf-8")
        Path(scratch, "LICENSE.txt").write_text(corpus.licence(), encoding="utf-8")
        for path in Path(scratch).iterdir():
            path.chmod(0o644)  # safetensors writes for the owner alone
            os.replace(path, out / path.name)


def train(
    model: LlamaForCausalLM, args: argparse.Namespace, train_stream: np.ndarray, held_out: corpus.Corpus
) -> History:
    """Trains `model` in place; saves it to --out now and then."""
    held_out_stream = corpus.token_stream(held_out)
    rng = np.random.default_rng(args.seed)
    optimizers = build_optimizers(model, args)
    history = History()

    evaluated = LlamaForCausalLM(model.config)  # stays eager: the compiled layers know only the training shapes
    if not args.no_compile:
        for layer in model.model.layers:
            layer.compile(dynamic=False)  # one compilation serves all layers
    begin = time.perf_counter()
    sources = {length: windows(train_stream, length, rng) for length in (args.context, args.max_context)}
    progress, running = 0.0, 0.0
    while progress < 1.0:
        context = args.max_context if history.steps % args.long_every == 0 else args.context
        rate = learning_rate(history.steps, progress, args)
        ids = torch.from_numpy(np.stack([next(sources[context]) for _ in range(max(1, args.batch // context))]))
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        history.steps += 1
        history.tokens += ids.shape[0] * context
        running = loss.item() if history.steps == 1 else 0.95 * running + 0.05 * loss.item()
        history.seconds = time.perf_counter() - begin
        progress = history.steps / args.steps
        if args.minutes:
            progress = max(progress, history.seconds / 60 / args.minutes)
        if history.steps % 20 == 0:
            speed = history.tokens / history.seconds
            print(f"step {history.steps} lr {rate:.2e} train {running:.4f} {speed:.0f} tokens/s", flush=True)
        if history.steps % 100 == 0 or progress >= 1.0:
            evaluated.load_state_dict(model.state_dict())
            slice_loss = held_out_loss(evaluated, held_out_stream, args.max_context, limit=32)
            history.losses.append((history.steps, slice_loss))
            print(f"step {history.steps} held-out slice {slice_loss:.4f} after {history.seconds:.0f} s", flush=True)
        if history.steps % args.save_every == 0 and progress < 1.0:
            card = f"Intermediate checkpoint, step {history.steps}; the run writes the model card at its end.\n"
            save(model, args.out, card, held_out)
    return history


def command_line() -> str:
    """The command that made a checkpoint, without the place to which it was written."""
    words = iter(sys.argv[1:])
    kept = []
    for word in words:
        if word == "--out":
            next(words)
        elif not word.startswith("--out="):
            kept.append(word)
    return " ".join(["python examples/train_tiny.py --out examples/tiny-llama", *kept])


def sample(checkpoint: Path) -> str:
    """A greedy continuation of the prompt, prompt included."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    output = model.generate(**tokenizer(SAMPLE_PROMPT, return_tensors="pt"), max_new_tokens=200, do_sample=False)
    return tokenizer.decode(output[0], skip_special_tokens=True)


def model_card(args: argparse.Namespace, config: LlamaConfig, history: History, loss: float, files: Files) -> str:
    """The README of a finished checkpoint in --out whose held-out loss is `loss` nats/byte."""
    stored = AutoModelForCausalLM.from_pretrained(args.out)
    train_bytes, held_out_bytes = (sum(len(text.encode()) for text in part.values()) for part in files)
    late = [value for step, value in history.losses if step >= 0.8 * history.steps]
    facts = {
        "parameters": stored.num_parameters(),
        "shape": f"{config.num_hidden_layers} layers, width {config.hidden_size}, {config.num_attention_heads} heads "
        f"of {config.head_dim}, {config.num_key_value_heads} key/value heads, MLP {config.intermediate_size}, tied "
        f"embeddings, {config.max_position_embeddings} positions, stored in bf16",
        "python": ".".join(map(str, sys.version_info[:3])),
        "rule": corpus.CORPUS_RULE,
        "train_files": len(files[0]),
        "train_bytes": train_bytes,
        "held_out_files": len(files[1]),
        "held_out_bytes": held_out_bytes,
        "epochs": history.tokens / train_bytes,
        "minutes": history.seconds / 60,
        "loss": loss,
        "bits": loss / math.log(2),
        "steps": history.steps,
        "tokens": history.tokens,
        "command": command_line(),
        "schedule": ""
        if history.steps >= args.steps
        else f"`--minutes` ended the run after {history.steps} of `--steps`, its schedule scaled to the time.",
        "curve": ", ".join(f"{step}: {value:.4f}" for step, value in history.losses),
        "late_fall": late[0] - late[-1],
        "ratio": history.tokens / stored.num_parameters(),
        "prompt": SAMPLE_PROMPT,
        "sample": sample(args.out),
        "copyright": sys.copyright,
    }
    return CARD.format(**vars(args) | facts)


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    logging.disable_progress_bar()
    files = corpus.split(corpus.standard_library())
    train_stream = corpus.token_stream(files[0])
    print(f"{len(files[0])} training files, {len(train_stream)} ids; {len(files[1])} held-out files", flush=True)

    AttentionInterface.register("blockwise", blockwise_attention)
    model = build_model(args.max_context)
    model.set_attn_implementation("blockwise")
    history = train(model, args, train_stream, files[1])

    save(model, args.out, "Trained; the held-out loss is being computed.\n", files[1])
    finish(args, model.config, history, files)


def finish(args: argparse.Namespace, config: LlamaConfig, history: History, files: Files) -> None:
    """Evaluates the checkpoint in --out as stored and writes its card."""
    stored = AutoModelForCausalLM.from_pretrained(args.out, dtype=torch.float32)
    loss = held_out_loss(stored, corpus.token_stream(files[1]), args.max_context)
    print(f"held-out {loss:.4f} nats/byte, {loss / math.log(2):.4f} bits/byte", flush=True)
    (args.out / "README.md").write_text(model_card(args, config, history, loss, files), encoding="utf-8")


if __name__ == "__main__":
    main()
