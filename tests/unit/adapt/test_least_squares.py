"""Weights that prompts begin with: no other projection of its inputs comes nearer to the original's keys and values."""

from __future__ import annotations

import copy
from typing import Any

import phased
import pytest
import torch
import zoo
from torch import Tensor, nn

from rewriter.adapt import least_squares
from rewriter.adapt.least_squares import fit_keys, key_projections
from rewriter.adapt.models import freeze_unchanged
from rewriter.adapt.prompt_weights import keys_and_values

# one matrix of queries, keys and values, Conv1D, latent keys, a read per rank, heads that ranks hold in common
CASES = {
    ("llama", "ladder"): "k_proj v_proj", ("gpt2", "own-partial"): "c_attn", ("gpt2", "2x-sum"): "c_attn",
    ("llama", "2x-sum"): "k_proj v_proj", ("gpt_neox_sequential", "parallel-own"): "query_key_value",
    ("gpt_neox_sequential", "2x-sum"): "query_key_value", ("llama", "2x-mean"): "k_proj v_proj",
    ("qwen3_moe", "2x-sum"): "k_proj v_proj", ("deepseek_v3", "ladder"): "kv_a_proj_with_mqa",
    ("deepseek_v3", "2x-sum"): "kv_a_proj_with_mqa",
}  # fmt: skip


def batch(family: str) -> dict[str, Tensor]:
    """Rows of 24 tokens; of the last ones, some are padding."""
    ids = phased.batch(family, rows=24, length=24)
    segments = torch.zeros_like(ids)
    segments[-4:, 17:] = 1
    rewired = (torch.arange(24) >= 2).expand(ids.shape)
    return {"input_ids": ids, "segment_ids": segments, "rewired": rewired}


def student(family: str, recipe: str) -> nn.Module:
    model = copy.deepcopy(phased.shared(family, recipe))
    freeze_unchanged(model)
    return model


@pytest.mark.parametrize(("family", "recipe"), CASES)
@pytest.mark.fast("llama-ladder", "gpt2-2x-sum", "llama-2x-mean")
def test_gradients_of_the_errors_vanish(family: str, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the module's own forward pass and autograd, of each projection on the inputs that it has in the end."""
    monkeypatch.setattr(least_squares, "RIDGE", 1e-9)
    model, rows = student(family, recipe), batch(family)
    before = copy.deepcopy(model)
    projections = key_projections(model, rows["input_ids"][:1, :6], rows["rewired"][:1, :6])
    kinds = {name.rsplit(".", 1)[-1] for name in projections}
    assert kinds - {"kv_b_proj"} == set(CASES[family, recipe].split())  # which follows where a cache holds whole keys
    errors = fit_keys(model, zoo.shared(family), rows)
    assert errors.keys() == projections.keys()
    assert all(after < 0.95 * old or old < 1e-9 for old, after in errors.values())
    projections = {name: part for name, part in projections.items() if errors[name][0] >= 1e-9}
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before.get_parameter(n))}
    assert changed == {f"{name}.weight" for name in projections}
    assert len(changed) >= 3

    seen: dict[str, Any] = {}
    hooks = [
        part.register_forward_hook(lambda _, given, made, key=(who, name): seen.__setitem__(key, (given[0], made)))
        for who, whole in (("student", model), ("original", zoo.shared(family)))
        for name, part in whole.named_modules()
        if name in projections
    ]
    with torch.no_grad():
        keys_and_values(model, rows["input_ids"], rows["rewired"])
        keys_and_values(zoo.shared(family), rows["input_ids"], None)
    for hook in hooks:
        hook.remove()
    valid, rewired = rows["segment_ids"] == 0, rows["rewired"]
    share = (rewired & valid).sum() / (~rewired & valid).sum()
    weights = (torch.where(rewired, 1.0, share) * valid)[..., None]
    for name in projections:
        inputs, wanted = seen["student", name][0].detach(), seen["original", name][1].detach()
        gradients = []
        for whole in (model, before):
            module: Any = whole.get_submodule(name)
            made = type(module).forward(module, inputs)
            if made.shape == wanted.shape:  # else ranks hold rows in common, one's after the other's
                error = ((made - wanted) ** 2 * weights).sum()
            else:
                per_rank = zip(made.split([b - a for a, b in module.rows], -1), module.rows, strict=True)
                error = torch.stack([((one - wanted[..., a:b]) ** 2 * weights).sum() for one, (a, b) in per_rank]).sum()
            gradients.append(torch.autograd.grad(error, module.weight)[0].norm())
        assert gradients[0] < 1e-3 * gradients[1], name
