"""What a rank should add by itself where a norm follows the reduction: candidates, measured on a Gemma 3.

    .venv/bin/python -m benchmarks.drift.post_norm gemma3-270m [--tp 2 4] [--from-layer 0] [--windows 1]

The eager model runs P ranks as the rows of a batch: each row keeps its rank's inputs of the exit projections. A block
adds N(AR(f_r)) in the original. Until the next reduction a rank adds one of f_r, N(f_r), N(f_r)/√P, N(f_r)/P or
nothing, in layers that are desynced as by `desync-2x` and `desync-2x-sum` (attention's reduction dropped), or ladder
layers as of `ladder-own-partial`. Prints KL(original ‖ rewritten) in nats per token and the perplexity, on the packaged
calibration text. Heads and channels keep their order on disk.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from rewriter.check.drift import CALIBRATION, WINDOW, DriftSums
from rewriter.common.cache_names import cache_argument
from rewriter.common.text_windows import begins_texts, text_windows

Block = Callable[[Tensor], Tensor]
OWN: Mapping[str, Callable[[Tensor, Block, int], Tensor]] = {
    "f": lambda f, norm, ranks: f,
    "N(f)": lambda f, norm, ranks: norm(f),
    "N(f)/√P": lambda f, norm, ranks: norm(f) / math.sqrt(ranks),
    "N(f)/P": lambda f, norm, ranks: norm(f) / ranks,
    "0": lambda f, norm, ranks: torch.zeros_like(f),
}


def total(parts: Tensor) -> Tensor:
    return parts.sum(0, keepdim=True).expand_as(parts)


class Original:
    """x ← x + N(AR(f)). The rows of x [P, S, D] are what the ranks hold."""

    def begin(self, ranks: int) -> None:
        self.ranks, self.block, self.active = ranks, 0, False

    def __call__(self, x: Tensor, f: Block, norm: Block) -> Tensor:
        return x + norm(total(f(x)))


class Desync(Original):
    def __init__(self, own: str, resync: str) -> None:
        self.own, self.resync = OWN[own], resync

    def __call__(self, x: Tensor, f: Block, norm: Block) -> Tensor:
        if not self.active:
            return super().__call__(x, f, norm)
        self.block += 1
        part = f(x)
        complete = norm(total(part))
        if self.block % 2:
            self.carried = x + complete
            return x + self.own(part, norm, self.ranks)
        return complete + (self.carried if self.resync == "sum" else total(x) / self.ranks)


class OwnPartial(Original):
    def __init__(self, own: str) -> None:
        self.own = OWN[own]

    def begin(self, ranks: int) -> None:
        super().begin(ranks)
        self.read: Tensor | None = None

    def __call__(self, x: Tensor, f: Block, norm: Block) -> Tensor:
        part = f(self.read if self.active and self.read is not None else x)
        self.read = x + self.own(part, norm, self.ranks)
        return x + norm(total(part))


class Ranks:
    """A model whose layers add to the stream as `mode` says, and whose exit projections read a rank's inputs."""

    def __init__(self, path: str, first: int) -> None:
        self.first = first
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
        self.mode = Original()
        for number, layer in enumerate(self.model.model.layers):
            layer.forward = partial(self._layer, layer, number)
            for exit in (layer.self_attn.o_proj, layer.mlp.down_proj):
                exit.register_forward_pre_hook(self._own_inputs)
        self.model.model.norm.register_forward_pre_hook(lambda module, args: (args[0][:1],))

    def logits(self, tokens: Tensor, mode: Original, ranks: int) -> Tensor:
        self.mode = mode
        mode.begin(ranks)
        logits: Tensor = self.model(input_ids=tokens[None].repeat(ranks, 1), use_cache=False).logits[0]
        return logits

    def _own_inputs(self, module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        ranks = self.mode.ranks
        own = torch.eye(ranks).repeat_interleave(args[0].shape[-1] // ranks, 1)
        return (args[0] * own[:, None],)

    def _layer(self, layer: Any, number: int, x: Tensor, **given: Any) -> Tensor:
        self.mode.active = number >= self.first
        given[cache_argument(layer)] = None
        x = self.mode(
            x, lambda x: layer.self_attn(layer.input_layernorm(x), **given)[0], layer.post_attention_layernorm
        )
        return self.mode(x, lambda x: layer.mlp(layer.pre_feedforward_layernorm(x)), layer.post_feedforward_layernorm)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tp", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--from-layer", type=int, default=0, help="layers before it stay as they are")
    parser.add_argument("--windows", type=int, default=1, help=f"of {WINDOW} tokens")
    options = parser.parse_args()
    text = CALIBRATION.read_text(encoding="utf-8")
    tokens = torch.tensor(AutoTokenizer.from_pretrained(options.model)(text).input_ids)
    model = Ranks(options.model, options.from_layer)
    begins = begins_texts(tokens, model.model.config.to_dict())
    pieces = text_windows(tokens, WINDOW, begins=begins)[: options.windows]
    original = [model.logits(piece, Original(), 1) for piece in pieces]
    modes = {"desync, sum": lambda own: Desync(own, "sum"), "desync, mean": lambda own: Desync(own, "mean")}
    modes["own partial"] = OwnPartial
    for ranks in options.tp:
        for name, mode in modes.items():
            for own in OWN:
                sums = DriftSums()
                for piece, before in zip(pieces, original, strict=True):
                    sums.add(piece, before, model.logits(piece, mode(own), ranks))
                found = sums.result("")
                print(
                    f"P = {ranks}  {name:13} adds {own:8} KL {found.kl:7.3f}  perplexity {found.perplexity_before:.1f} "
                    f"→ {found.perplexity_after:.4g}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
