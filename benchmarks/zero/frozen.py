"""What a LoRA step needs where the frozen base is kept quantized (`rewriter.training.quantize_frozen`).

    python -m benchmarks.zero.frozen [--ranks 4] [--hidden 512] [--layers 2] [--tokens 64] [--json]

Real ranks (gloo, loopback), a random Llama in bf16 with adapters of rank 8 on all projections, each layer and the rest
under `fully_shard`. For each format, of the rank that needs most:

    held        bytes of parameters that a rank keeps, adapters and embeddings included
    gathered    bytes that FSDP2 gathers in a step, whole parameters: what a node receives from other nodes divided by
                (1 − 1/nodes), wherever the ranks are
    peak        the most that is allocated at one time in a step, beside what was before (`attention_memory.peak`)
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.attention.memory import peak
from benchmarks.support.local_ranks import largest
from rewriter.training import quantize_frozen

FORMATS = (None, "int8", "int4-hadamard", "int2-hadamard")


@dataclass(frozen=True)
class Shape:
    """A Llama; its heads are of 64."""

    hidden: int
    layers: int
    tokens: int


@dataclass(frozen=True)
class Figures:
    """See above."""

    held: int
    gathered: int
    peak: int


def adapted(shape: Shape) -> nn.Module:
    """The model with adapters, alike on all ranks."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.hidden * 11 // 4,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.hidden // 64,
        num_key_value_heads=shape.hidden // 256,
        vocab_size=4096,
    )
    model = get_peft_model(LlamaForCausalLM(config), LoraConfig(target_modules="all-linear", r=8))
    return model.to(torch.bfloat16)


@contextmanager
def gathers() -> Iterator[list[int]]:
    """Bytes of every tensor that is gathered while the block runs."""
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    gather, found = getattr(dist, name), []

    def counted(*arguments: Any, **options: Any) -> Any:
        found.append(max(t.nbytes for t in (*arguments, *options.values()) if isinstance(t, Tensor)))
        return gather(*arguments, **options)

    setattr(dist, name, counted)
    try:
        yield found
    finally:
        setattr(dist, name, gather)


def measure(shape: Shape, format: str | None) -> Figures:
    """On every rank of a process group: what this one needs."""
    model = adapted(shape)
    if format is not None:
        quantize_frozen(model, format)
    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    ids = torch.randint(0, 4096, (1, shape.tokens), generator=torch.Generator().manual_seed(dist.get_rank()))
    model(input_ids=ids, labels=ids).loss.backward()  # what is allocated once
    with gathers() as gathered, peak() as most:
        model(input_ids=ids, labels=ids).loss.backward()
    held = sum(p.to_local().nbytes if isinstance(p, DTensor) else p.nbytes for p in model.parameters())
    return Figures(held, sum(gathered), most())


def figures(shape: Shape) -> list[dict[str, int]]:
    """Of every format, on this rank."""
    return [dataclasses.asdict(measure(shape, format)) for format in FORMATS]


def on_ranks(ranks: int, shape: Shape) -> dict[str, Figures]:
    """Every format on real ranks: for each figure that of the rank that needs most."""
    found = [Figures(**row) for row in largest(ranks, figures, shape)]
    return dict(zip([format or "bf16" for format in FORMATS], found, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    shape = Shape(given.hidden, given.layers, given.tokens)
    found = on_ranks(given.ranks, shape)
    if given.json:
        print(json.dumps({name: dataclasses.asdict(figures) for name, figures in found.items()}, indent=2))
        return
    print(f"{given.ranks} ranks, Llama of {given.layers} layers of {given.hidden}, {given.tokens} tokens each, bf16")
    print(f"{'base':16}{'held, MB':>12}{'gathered, MB':>14}{'peak, MB':>12}")
    for name, figures in found.items():
        print(f"{name:16}{figures.held / 1e6:12.2f}{figures.gathered / 1e6:14.2f}{figures.peak / 1e6:12.2f}")


if __name__ == "__main__":
    main()
