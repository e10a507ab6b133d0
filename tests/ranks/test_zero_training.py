"""Training with ZeRO++ and with node-local weights: losses, and the gradients of a module that rewrite has emitted."""

from __future__ import annotations

import functools

import pytest
import torch
from ranks import run_ranks
from transformers import LlamaConfig, LlamaForCausalLM
from zero_model import LOCAL, RANKS, distributed

from rewriter.training import shard_parameters, zero_plus_plus


def text(generator, rows, length=32, tokens=64):
    """Of a Markov chain with four followers of each token: 0.91 nats each, once the chain is known."""
    table = torch.randint(0, tokens, (tokens, 4), generator=torch.Generator().manual_seed(1))
    likely = torch.tensor([0.7, 0.15, 0.1, 0.05])
    found = [torch.randint(0, tokens, (rows,), generator=generator)]
    for _ in range(length - 1):
        choice = torch.multinomial(likely, rows, True, generator=generator)
        found.append(table[found[-1], choice])
    return torch.stack(found, 1)


def learned(group, steps):
    """By system: the loss on text that was not seen, after so many steps of AdamW in mixed precision."""
    systems = {
        "plain": {},
        "all": {"weights": "int8", "gradients": "int8/int4-hadamard", "secondary": LOCAL},
        "node-local": None,
    }
    losses = {}
    for name, hooks in systems.items():
        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2}
        made = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
        made = made.bfloat16() if hooks is None else made
        build = functools.partial(torch.optim.AdamW, lr=3e-3)
        optimizer = distributed(made, hooks, build, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        generator = torch.Generator().manual_seed(10 + group.rank())
        for _ in range(steps):
            ids = text(generator, 4)
            optimizer.zero_grad()
            made(ids, labels=ids).loss.backward()
            optimizer.step()
        with torch.no_grad():
            ids = text(torch.Generator().manual_seed(99), 64)
            losses[name] = float(made(ids, labels=ids).loss)
    return losses


@pytest.mark.slow
def test_training_at_8_and_4_bits_loses_less_than_one_percent():
    by_rank = run_ranks(learned, RANKS, 300, timeout=600)
    plain = by_rank[0]["plain"]
    assert plain < 1.5, "the text was not learned"
    for losses in by_rank:
        assert losses == pytest.approx(dict.fromkeys(losses, plain), rel=0.01)


# --- a module that rewrite has emitted, whose gradients are summed over the ranks of a sequence ---


def runtime_gradients(group):
    """Of two replicas with two sequence ranks each: with quantized gradients, and without."""
    import sequence_training_ranks as training

    found = []
    for hooks in ({"gradients": "int8", "secondary": LOCAL}, None):
        made, ids, labels = training.build(training.COLUMN, 2)
        shard_parameters(made)
        if hooks:
            zero_plus_plus(made, **hooks)
        made(ids, labels=labels).loss.backward()
        found.append({name: p.grad.full_tensor() for name, p in made.named_parameters()})
    return found


@pytest.mark.slow
def test_gradients_of_a_runtime_model_stay_sums_over_its_sequence():
    for found, expected in run_ranks(runtime_gradients, RANKS):
        for name, gradient in expected.items():
            assert float((found[name] - gradient).norm()) <= 0.02 * float(gradient.norm()), name
