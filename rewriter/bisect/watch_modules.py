"""`python -m rewriter.bisect.watch_modules KIND REQUEST RESULT`: an output runs, and what its modules are given and
give is kept.

KIND is "checkpoint" (transformers loads it, one process) or "ranks". The request names a directory and token ids
(JSON). Every rank writes RESULT.RANK (safetensors): `given|PATH` and `returned|PATH` for the modules that were called
once, the first floating-point tensor of each, fp32, and `logits`; the metadata names the order of the calls.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils._pytree import tree_leaves

from rewriter.common.processes import reported


class Watched:
    """The calls of a model's modules, in the order in which they return."""

    def __init__(self, model: nn.Module) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.order: list[str] = []
        self.repeated: set[str] = set()
        for name, module in model.named_modules():
            if name:
                module.register_forward_hook(self._hook(name), with_kwargs=True)

    def _hook(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if name in self.order:
                self.repeated.add(name)
            self.order.append(name)
            for side, tree in (("given", (args, kwargs)), ("returned", output)):
                found = next((x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)), None)
                if found is not None:
                    kept = found.detach()
                    self.tensors[f"{side}|{name}"] = (kept.float() if kept.is_floating_point() else kept).clone()

        return hook

    def save(self, path: str, logits: torch.Tensor) -> None:
        """Write what was seen."""
        kept = {k: t.contiguous() for k, t in self.tensors.items() if k.partition("|")[2] not in self.repeated}
        order = [name for name in dict.fromkeys(self.order) if name not in self.repeated]
        save_file(kept | {"logits": logits.float().contiguous()}, path, {"order": json.dumps(order)})


def main(kind: str, request_path: str, result_path: str) -> None:
    with open(request_path, encoding="utf-8") as file:
        request = json.load(file)
    ids = torch.tensor(request["ids"])
    with torch.no_grad():
        (_checkpoint if kind == "checkpoint" else _ranks)(request, ids, result_path)


def _checkpoint(request: dict[str, Any], ids: torch.Tensor, result: str) -> None:
    from rewriter.verify.plain_model import plain_model

    model, _ = plain_model(request["directory"], request["trust_remote_code"])
    watched = Watched(model)
    watched.save(f"{result}.0", model(input_ids=ids, use_cache=False).logits)


def _ranks(request: dict[str, Any], ids: torch.Tensor, result: str) -> None:
    import torch.distributed as dist

    from rewriter.runtime.context import Context
    from rewriter.runtime.loading.load import load

    model = load(request["directory"], device="cpu", dtype=torch.float32)
    watched = Watched(model)
    positions = torch.arange(ids.shape[1]).expand(ids.shape)
    logits = model(ids, positions, Context())
    rank = dist.get_rank() if dist.is_initialized() else 0
    watched.save(f"{result}.{rank}", logits)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    with reported():
        main(*sys.argv[1:])
