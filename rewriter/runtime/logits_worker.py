"""The logits of a runtime module, on every rank: `python -m rewriter.runtime.logits_worker REQUEST RESULT`.

The request names a directory, batches of token ids and whether to `stream` weights (JSON); rank 0 writes logits
[B, S, V] in fp32 (safetensors). Raises RuntimeError where ranks end with different logits.
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from rewriter.common.processes import reported
from rewriter.runtime.context import Context
from rewriter.runtime.loading import load


def main(request_path: str, result_path: str) -> None:
    with open(request_path, encoding="utf-8") as file:
        request = json.load(file)
    model = load(request["directory"], device="cpu", dtype=torch.float32, stream=request.get("stream", False))
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
    with reported():
        main(*sys.argv[1:])
