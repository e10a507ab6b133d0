"""What each rank of `rewrite generate` runs:
`torchrun … -m rewriter.runtime.generate_worker generate --dir DIR --request FILE
--result FILE`.

Requests and results are JSON, so nothing is unpickled between processes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rewriter.common.errors import RewriterError

# The arguments of `generate` that a request may hold besides its prompts.
OPTIONS = frozenset(
    {"max_new_tokens", "eos_token_ids", "pad_token_id", "temperature", "top_k", "top_p", "seed", "use_cache"}
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command on this rank; returns the exit status. A failure is written beside the result for `launch`."""
    parser = argparse.ArgumentParser(prog="rewriter.runtime.generate_worker")
    parser.add_argument("command", choices=["generate"])
    parser.add_argument("--dir", required=True, type=Path, help="output directory of `rewrite`")
    parser.add_argument(
        "--request", required=True, type=Path, help='JSON: {"prompts": [[ids], …], "max_new_tokens": N, …}'
    )
    parser.add_argument("--result", required=True, type=Path, help="JSON written by rank 0")
    parser.add_argument("--device", default=None)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args(arguments)
    _die_with_parent()
    try:
        _generate(options)
    except BaseException as error:
        rank = int(os.environ.get("RANK", "0"))
        report: dict[str, Any] = {
            "rank": rank,
            "time": time.time(),
            "message": str(error) if isinstance(error, RewriterError) else None,
            "traceback": traceback.format_exc(),
        }
        _write(options.result.with_name(f"{options.result.name}.error-{rank}"), report)
        sys.stderr.write(report["traceback"])
        sys.stderr.flush()
        # Without a goodbye: leaving the process group would wait for ranks that may never answer.
        os._exit(1)
    return 0


def _generate(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    from rewriter.runtime.generate import generate
    from rewriter.runtime.load import load

    request = json.loads(options.request.read_text(encoding="utf-8"))
    unknown = set(request) - OPTIONS - {"prompts"}
    if unknown:
        raise RewriterError(
            f"{options.request}: unknown key {sorted(unknown)[0]!r}, expected {', '.join(sorted(OPTIONS))}"
        )
    model = load(options.dir, device=options.device, compile=options.compile)
    tokens = generate(model, request.pop("prompts"), **request)
    if not dist.is_initialized() or dist.get_rank() == 0:
        _write(options.result, {"tokens": tokens})
    if dist.is_initialized():
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        dist.barrier()
        dist.destroy_process_group()


def _write(path: Path, content: Any) -> None:
    """At once, so that a reader never sees half of it."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content), encoding="utf-8")
    partial.replace(path)


def _die_with_parent() -> None:
    """End when torchrun is gone, even if it was killed without a chance to stop its ranks."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
