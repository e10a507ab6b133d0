"""Greedy tokens of a runtime module, on every rank: `python -m rewriter.runtime.generation.tokens_worker REQUEST
RESULT`.

The request (JSON) names a directory, prompts and a number of new tokens. Rank 0 writes (JSON) those of each prompt
"alone" and of all prompts at once, "padded" at the left. Weights are fp32.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from rewriter.common.processes import reported, write_json
from rewriter.runtime.generation.generate import generate
from rewriter.runtime.loading import load


def main(request_path: str, result_path: str) -> None:
    request = json.loads(Path(request_path).read_text(encoding="utf-8"))
    prompts, count = request["prompts"], request["max_new_tokens"]
    model = load(request["directory"], device="cpu", dtype=torch.float32)
    alone = [generate(model, [prompt], count)[0] for prompt in prompts]
    padded = generate(model, prompts, count, pad_token_id=prompts[0][0])
    if dist.get_rank() == 0:
        write_json(Path(result_path), {"alone": alone, "padded": padded})
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with reported():
        main(*sys.argv[1:])
