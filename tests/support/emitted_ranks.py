"""Emitted runtime modules on ranks: imported, built with their shards, run, and compared with one device."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

import torch
from subprocesses import load_module

TOLERANCE = 1e-4  # logits, relative to the largest


PAD = 0


def import_source(source: str):
    """The emitted file as a module, from a real file so that tracebacks show it."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "module.py"
        path.write_text(source)
        # torch.compile looks modules up by name
        return load_module(f"emitted_{hashlib.sha256(source.encode()).hexdigest()[:12]}", path)


def build(source, tensors, ties, group):
    from torch.distributed.device_mesh import init_device_mesh

    mesh = None
    if group is not None and group.size() > 1:
        mesh = init_device_mesh("cpu", (group.size(),), mesh_dim_names=("tp",))
    return load(import_source(source).Model(mesh), tensors, ties)


def load(model, tensors, ties):
    """`model` with a rank's own tensors."""
    buffers = dict(model.named_buffers())
    parameters = {n: t.clone() if n in buffers else torch.nn.Parameter(t.clone()) for n, t in tensors.items()}
    tied = {alias: parameters[canonical] for alias, canonical in ties.items()}
    model.load_state_dict(parameters | tied, strict=True, assign=True)
    return model.eval()


def on_rank(group, cases, ids, prompts, new_tokens):
    """Per case: logits, gradients by name, greedy tokens with cache."""
    from rewriter.runtime import Context, generate

    results = []
    positions = torch.arange(ids.shape[1]).expand(ids.shape)
    for source, tensors, ties in cases:
        model = build(source, tensors[0 if group is None else group.rank()], ties, group)
        logits = model(ids, positions, Context())
        logits.square().mean().backward()
        grads = {n: p.grad for n, p in model.named_parameters()}
        tokens = generate(model, prompts, new_tokens, pad_token_id=PAD) if new_tokens else None
        results.append((logits.detach(), grads, tokens))
    return results


@torch.no_grad()
def prefill_and_step(model, ids):
    """The events of a prefill of `ids`, and those of a decode step."""
    from rewriter.runtime import Context, StaticCache, record_events

    positions = torch.arange(ids.shape[1]).expand(ids.shape)
    cache = StaticCache(model.slots, ids.shape[0], ids.shape[1] + 1, torch.float32)
    with record_events() as prefill:
        model(ids, positions, Context(cache))
    with record_events() as decode:
        model(ids[:, :1], positions[:, -1:] + 1, Context(cache, torch.tensor(ids.shape[1])))
    return prefill, decode


def compare_gradients(sharded, by_rank, model) -> None:
    """Every parameter's gradient: shards are the parts of the single-device gradient, replicas equal it."""
    for name, parameter in sharded.parameters.items():
        expected = model.get_parameter(name).grad
        if expected is None:  # a norm that no layer reads any more
            assert all(grads[name] is None or not grads[name].any() for grads in by_rank), name
            continue
        for rank, grads in enumerate(by_rank):
            part = expected
            if parameter.ranges is not None:
                part = torch.cat(
                    [expected.narrow(parameter.dim, a, b - a) for a, b in parameter.ranges[rank]], parameter.dim
                )
            scale = expected.abs().max()
            error = (grads[name] - part).abs().max() / scale
            assert error <= 1e-4, f"{name} on rank {rank}: {error:.1e}"
