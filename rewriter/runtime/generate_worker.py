"""Generation on ranks of this machine: `launch` starts them, and this module is what each of them runs.

Requests and results are JSON, so nothing is unpickled between processes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rewriter.common.errors import RewriterError
from rewriter.common.processes import placed, rank_main, run_ranks

# The arguments of `generate` that a request may hold besides its prompts.
OPTIONS = frozenset(
    {"max_new_tokens", "eos_token_ids", "pad_token_id", "temperature", "top_k", "top_p", "seed", "use_cache"}
)


def launch(
    directory: str | os.PathLike[str], ranks: int, request: Mapping[str, Any], *, timeout: float | None = None
) -> dict[str, Any]:
    """What `ranks` processes generate with the output in `directory`: "tokens", a list for each prompt of `request`.

    `request`: "prompts", lists of token ids, and arguments of `rewriter.runtime.generate`. Raises RewriterError with
    the message of the rank that failed first, or its traceback, and after `timeout` seconds. No rank outlives this.
    """
    unknown = sorted(set(request) - OPTIONS - {"prompts"})
    if unknown:
        raise RewriterError(f"generate: unknown key {unknown[0]!r}, expected {', '.join(sorted(OPTIONS))}")
    where = str(Path(directory).resolve())
    spec = {"directory": where, "request": dict(request)}
    command = [sys.executable, "-m", "rewriter.runtime.generate_worker", where]
    found = run_ranks(command, spec, range(ranks), timeout=timeout, about=f"{directory}: ", variables=placed(ranks))
    answer: dict[str, Any] = found[0]
    return answer


def _generate(spec: dict[str, Any], rank: int) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from rewriter.runtime.generate import generate
    from rewriter.runtime.load import load

    tokens = generate(load(spec["directory"]), **spec["request"])
    if dist.is_initialized():
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        dist.barrier()
        dist.destroy_process_group()
    return {"tokens": tokens}


if __name__ == "__main__":
    rank_main(_generate)
