"""`torchrun -m rewriter.verify.load_ranks REQUEST RESULT`, started by `outside.rank_logits`.

It runs in processes of its own, so it may import the runtime, which the rest of this room does not.
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from rewriter.runtime import Context, load


def main(request_path: str, result_path: str) -> None:
    with open(request_path, encoding="utf-8") as file:
        request = json.load(file)
    model = load(request["directory"], device="cpu", dtype=torch.float32)
    logits = {}
    with torch.no_grad():
        for index, batch in enumerate(request["batches"]):
            ids = torch.tensor(batch)
            positions = torch.arange(ids.shape[1]).expand(ids.shape)
            mine = model(ids, positions, Context()).float().contiguous()
            first = mine.clone()
            dist.broadcast(first, src=0)
            if not torch.allclose(mine, first, rtol=1e-4, atol=1e-4 * float(first.abs().max())):
                raise RuntimeError(f"rank {dist.get_rank()} ends with other logits than rank 0: a reduction is missing")
            logits[str(index)] = mine
    if dist.get_rank() == 0:
        save_file(logits, result_path)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
