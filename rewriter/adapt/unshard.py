"""Trained shards put back into the tensors of a checkpoint.

Every element of a rank's parameter is an element of a checkpoint tensor (`rewriter.weights.expressions`). The
expression of a parameter, evaluated over the elements' places in place of the elements, says where each trained one
belongs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from rewriter.common.errors import RewriterError
from rewriter.ir import Parameter, Program
from rewriter.weights import Checkpoint
from rewriter.weights.checkpoint import torch_dtype
from rewriter.weights.expressions import evaluate


def write_trained(like: Checkpoint, read: Callable[[str], Tensor], out: Path, link: bool = False) -> None:
    """Write `read(name)` for every tensor of `like` into `out`: the same files, names and dtypes.

    With `link`, a file whose tensors are those of `like` is a hard link to that one. The index, where there is one, is
    written by whoever copies the other files.
    """
    out.mkdir(parents=True, exist_ok=True)
    for file in like.files:
        inside = {name: info for name, info in like.tensors.items() if info.file == file}
        tensors = {name: read(name).to(torch_dtype(info.dtype, name)).contiguous() for name, info in inside.items()}
        place = out / file.relative_to(like.directory)
        place.unlink(missing_ok=True)  # never through a link to the original
        if link and all(torch.equal(tensor, like.read(name)) for name, tensor in tensors.items()):
            os.link(os.path.realpath(file), place)
            continue
        save_file(tensors, place, metadata=dict(like.metadata[file]) or {"format": "pt"})


def write_model(
    module: nn.Module, state: Mapping[str, Tensor], like: Checkpoint, made: Path, out: Path, link: bool = False
) -> None:
    """Write the model of transformers with the weights of `state` into `out`, as `write_trained` does.

    `made` is where transformers' own writer may write, which knows how modules are named on disk. What it does not
    write is found as transformers finds it on loading: without the prefix of the model below the head, or as one of
    tied weights. Tensors that are no part of the model are as `like` has them. Raises RewriterError where a weight of
    the model has no place in `like`.
    """
    model = cast(Any, module)
    model.save_pretrained(made, state_dict=dict(state))
    written, prefix = Checkpoint.open(made), f"{model.base_model_prefix}."
    tied = {name for pair in model.all_tied_weights_keys.items() for name in pair}
    names = {name: n for name in like.tensors for n in (prefix + name, name) if n in written.tensors}
    lost = sorted(set(written.tensors) - set(names.values()) - tied - {name for name, _ in module.named_buffers()})
    if lost:
        raise RewriterError(f"{like.directory}: the trained {lost[0]} has no tensor there. Rewrite the model again")

    def read(name: str) -> Tensor:
        if name in names:
            return written.read(names[name])
        held = next((state[n] for n in (name, prefix + name) if n in tied and n in state), None)
        return like.read(name) if held is None else held

    write_trained(like, read, out, link)


def full_tensors(program: Program, like: Checkpoint, shards: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The checkpoint's tensors by name, in the dtype of the shards, from the parameters of each tensor-parallel rank.

    `shards[r]` maps runtime names to rank r's tensors. Elements that several ranks hold are equal on them. Tensors
    that no parameter reads are as `like` has them.
    """
    whole: dict[str, Tensor] = {}
    for name, parameter in program.parameters.items():
        if name in program.ties:
            continue
        for rank, shard in enumerate(shards):
            _scatter(parameter, rank, shard[name], like, whole)
    for name in like.tensors:
        if name not in whole:
            whole[name] = like.read(name)
    return whole


def _scatter(parameter: Parameter, rank: int, value: Tensor, like: Checkpoint, whole: dict[str, Tensor]) -> None:
    expression = parameter.on_rank(rank)
    names = list(dict.fromkeys(expression.tensors()))
    places: dict[str, Tensor] = {}
    bounds: list[int] = [0]
    for name in names:
        shape = like.info(name).shape
        count = torch.Size(shape).numel()
        places[name] = torch.arange(bounds[-1], bounds[-1] + count).reshape(shape)
        bounds.append(bounds[-1] + count)
        if name not in whole:
            # all of it is written, but for what no rank holds: padding of a vocabulary, say
            whole[name] = like.read(name).to(value.dtype, copy=True)
    index = evaluate(expression, places.__getitem__).reshape(-1)
    flat = value.detach().reshape(-1).to("cpu")
    for i, name in enumerate(names):
        own = (index >= bounds[i]) & (index < bounds[i + 1]) if len(names) > 1 else slice(None)
        whole[name].view(-1)[index[own] - bounds[i]] = flat[own]
