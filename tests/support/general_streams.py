"""Small models whose layers hand values on, or carry a stream of any form; and what `adapt` trains them by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from emitted_ranks import build
from programs import OVERLAP, applied, runtime_case, tensor_parallel
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from rewriter.check.coverage.configs import RANKS, oddities, small_config
from rewriter.check.per_rank_reference import LayerMode
from rewriter.check.random_model import build_model, random_ids, randomize, save_model
from rewriter.check.reference_modes import block_ends
from rewriter.check.withheld_reference import WithheldReference
from rewriter.ir import Program
from rewriter.runtime.replicas import IGNORED
from rewriter.tracing import trace
from rewriter.tracing.shrink import shrink

HEALED = ("gemma4_text", "zaya", "hy_v4", "deepseek_v4")
"""Types whose gradients are compared: keys and values that layers share, states of routers, chosen keys, blocks of
tokens; several streams in the last two."""

# layers of the default config that are enough: each kind of mixer, and what one hands another
_KEPT = {"gemma4_text": [0, 5, 6, 11], "deepseek_v4": [2, 3, 4], "zaya": [0, 1, 2]}
_SET: dict[str, dict[str, Any]] = {
    "gemma4_text": {"num_kv_shared_layers": 2},
    "deepseek_v4": {  # blocks that short texts fill
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 8}, "index_topk": 4,
    },
}  # fmt: skip
LENGTH = 24
GRADIENTS = 5e-5
"""Limit of what a gradient may differ by, relative to its largest element."""


def few_layers(name: str, **changes: Any) -> PreTrainedConfig:
    """The small config of a type with few layers; of those whose layers hand keys on, one that chooses, one that is
    given its choice, one that chooses anew."""
    if name == "gemma4_text" and "vocab_size" in changes:
        changes["vocab_size_per_layer_input"] = changes["vocab_size"]
    if name in _KEPT:
        settings = dict(oddities().get(name, {}).get("set", {})) | _SET.get(name, {}) | changes
        return shrink(CONFIG_MAPPING[name](), _KEPT[name], RANKS, settings)
    config = small_config(name, changes)
    if name in ("glm_moe_dsa", "hy_v4"):
        config.num_hidden_layers = 3
        config.indexer_types, config.mlp_layer_types = ["full", "shared", "full"], ["dense", "sparse", "sparse"]
        config.layer_types = config.layer_types[:3]
    return config


@dataclass
class Healed:
    """A small model whose blocks all read late. `expected`: by name, its gradients for `batch` by autograd through the
    unmodified `model`; `source` is its checkpoint."""

    model: PreTrainedModel
    source: Path
    program: Program
    batch: dict[str, Tensor]
    expected: dict[str, Tensor]
    loss: float

    @property
    def rewritten(self) -> Program:
        return applied(self.program, ("ladder", {}))

    def sharded(self, ranks: int) -> Program:
        """The ladder over ranks."""
        return tensor_parallel(self.program, ranks, ("ladder", {}), OVERLAP)

    def case(self, ranks: int) -> tuple[str, list[dict[str, Tensor]], Any]:
        """`runtime_case` of that."""
        weights = {n: t.detach() for n, t in (*self.model.named_buffers(), *self.model.named_parameters())}
        return runtime_case(self.sharded(ranks), weights)


def healed(name: str, directory: Path) -> Healed:
    """The small model of a type, written to `directory`; its batch has rows of two lengths, padded at the right."""
    config = few_layers(name)
    model = build_model(config)
    randomize(model)
    save_model(model, config, directory)
    program = trace(directory)
    ids = random_ids(config, LENGTH)
    labels = ids.clone()
    labels[1, LENGTH - 5 :] = IGNORED
    places = torch.arange(LENGTH).expand(ids.shape)
    batch = {"input_ids": ids, "labels": labels, "position_ids": places, "segment_ids": torch.zeros_like(ids)}
    mix = {layer: LayerMode("ladder") for layer in range(program.source.num_layers)}
    logits = WithheldReference(model, block_ends(program), mix, 1)(ids)
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    model.zero_grad()
    loss.backward()
    expected = gradients_of(model)
    model.zero_grad()
    return Healed(model, directory, program, batch, expected, float(loss.detach()))


def gradients(model: Any, batch: Mapping[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """The cross entropy of a batch by a model of `rewriter.adapt`, and by name every parameter's gradient."""
    from rewriter.adapt.objective import cross_entropy, own_targets

    model.module.zero_grad()
    computed = model(batch)
    loss = cross_entropy(computed, own_targets(batch["labels"], computed.indices))
    loss.backward()
    return float(loss.detach()), gradients_of(model.module)


def gradients_of(module: nn.Module) -> dict[str, Tensor]:
    """By name, copies of the gradients that the parameters of a module have; zeros where one has none."""
    named = module.named_parameters()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in named}


def gradients_on_rank(group: Any, case: Any, batch: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """`gradients` of a runtime module (`Healed.case`) on this rank."""
    from rewriter.adapt.models import ShardedModel

    source, tensors, ties = case
    return gradients(ShardedModel(build(source, tensors[group.rank()], ties, group)), batch)


def errors(found: Mapping[str, Tensor], of: Healed, sharded: Program | None = None, rank: int = 0) -> dict[str, float]:
    """By name, how far gradients are from the expected ones, relative to the largest element of these, or, where that
    is smaller, to a small part of the largest of all: what cancels is rounded like its terms."""
    largest = max(float(x.abs().max()) for x in of.expected.values())
    made = {}
    for name, gradient in found.items():
        expected = of.expected[name]
        least = 1e-3 if expected.numel() > 1 else 1e-2  # a number is a sum over all tokens
        scale = max(float(expected.abs().max()), least * largest)
        ranges = None if sharded is None else sharded.parameters[name].ranges
        if ranges is not None:
            dim = sharded.parameters[name].dim
            expected = torch.cat([expected.narrow(dim, a, b - a) for a, b in ranges[rank]], dim)
        made[name] = float((gradient - expected).abs().max()) / scale
    return made
