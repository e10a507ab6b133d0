"""The model of the tests of ZeRO++ and of node-local weights, sharded by FSDP2: four ranks as two nodes of two."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from rewriter.training import node_local_optimizer, node_mesh, zero_plus_plus

NODES, LOCAL, RANKS = 2, 2, 4
VOCAB, LENGTH = 67, 19


class Model(nn.Module):
    """A small Llama with tied embeddings and biases, and parameters of odd and of tiny shapes."""

    def __init__(self):
        super().__init__()
        config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=36,
            intermediate_size=101,
            num_hidden_layers=2,
            num_attention_heads=3,
            num_key_value_heads=1,
            attention_bias=True,
            tie_word_embeddings=True,
        )
        self.llama = LlamaForCausalLM(config)
        self.gain = nn.Parameter(torch.tensor([1.5]))
        self.cube = nn.Parameter(torch.randn(2, 3, 5) / 5)
        self.bend = nn.Linear(VOCAB, 7, bias=True)
        self.partly = False  # whether `bend` and `cube` take no part

    def forward(self, ids):
        logits = self.llama(ids).logits * self.gain
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids.roll(-1, 1).flatten())
        if self.partly:
            return loss
        return loss + (self.bend(logits).tanh().mean() * (self.cube.sum() + 1)).float()


@functools.cache
def original():
    torch.manual_seed(5)
    made = Model()
    with torch.no_grad():
        for name, p in made.named_parameters():
            if name.endswith("bias"):
                p.normal_(0, 0.3)
    return made


def model():
    return copy.deepcopy(original())


def batches(group, count=2):
    generator = torch.Generator().manual_seed(100 + group.rank())
    return [torch.randint(0, VOCAB, (2, LENGTH), generator=generator) for _ in range(count)]


def flat_mesh():
    return init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))


def sharded(made, mesh=None, reshard=True, **policy):
    """`made` by FSDP2: its layers, and the rest. mesh: default all ranks."""
    for module in [*getattr(made, "llama", made).model.layers, made]:
        fully_shard(
            module, mesh=mesh or flat_mesh(), mp_policy=MixedPrecisionPolicy(**policy), reshard_after_forward=reshard
        )
    return made


def sgd(groups):
    return torch.optim.SGD(groups, lr=2e-5)


def node_local(made, optimizer=sgd, node=LOCAL, gradients="int8", **options):
    """The optimizer of `made`, sharded inside each node, with reductions in fp32."""
    mesh = node_mesh("cpu", node)
    sharded(made, mesh["local"], reduce_dtype=torch.float32)
    return node_local_optimizer(made, mesh, optimizer, gradients=gradients, **options)


def distributed(made, hooks, build, formats=None, reshard=None, **policy):
    """An optimizer of `made`, a Llama sharded over all ranks with comm hooks, or with `hooks` None inside each node."""
    if hooks is None:
        nodes = node_mesh("cpu", LOCAL)
        return node_local_optimizer(sharded(made, nodes["local"], reshard, **policy), nodes, build, **formats or {})
    sharded(made, reshard=reshard, **policy)
    if hooks:
        zero_plus_plus(made, **hooks)
    return build(made.parameters())


def backward(made, ids, accumulate):
    """The losses' gradients, of all batches but with "once". Losses are large, so that fp16 can hold gradients."""
    if accumulate == "partly":  # some take no part, and some are frozen after the comm hooks were set
        made.partly = True
        made.llama.model.layers[0].mlp.up_proj.requires_grad_(False)
    ids = ids[:1] if accumulate in ("once", "partly") else ids
    for x in ids:
        made.set_requires_gradient_sync(accumulate != "unsynced" or x is ids[-1])
        (made(x) * 500).backward()


def marked(cases, slow):
    """`cases` as parameters, those in `slow` marked so."""
    return [pytest.param(case, marks=[pytest.mark.slow] * (case in slow)) for case in cases]
