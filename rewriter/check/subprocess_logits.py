"""Logits of what was emitted, computed where its users compute them: in other processes.

`load_huggingface.py` loads the adapted checkpoint where `rewriter` cannot be
imported, `rewriter.runtime.logits_worker` runs the module on real ranks. Requests are JSON, results
safetensors.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from rewriter.common.errors import VerificationError
from rewriter.common.processes import Processes, environment, placed, write_json

HERE = Path(__file__).resolve().parent
TIMEOUT = 900.0


def emitted_logits(
    directory: Path, ranks: int | None, batches: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Both at once, since most of the time goes to imports: (huggingface_logits, rank_logits or nothing)."""
    with ThreadPoolExecutor(2) as pool:
        single = pool.submit(huggingface_logits, directory, batches)
        parallel = None if ranks is None else pool.submit(rank_logits, directory, ranks, batches)
        return single.result(), [] if parallel is None else parallel.result()


def huggingface_logits(directory: Path, batches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Logits [B, S, vocabulary] (fp32) of the adapted checkpoint in `directory` for each batch of ids [B, S].

    Loaded by transformers with trust_remote_code, in fp32, without `rewriter`; where weights are quantized, from what
    they stand for. Raises VerificationError when it does not load, or when names are missing or surplus.
    """
    words = ["-P", str(HERE / "load_huggingface.py")]
    return _run(words, directory, batches, "the adapted checkpoint", 1, lambda rank: environment())


def rank_logits(
    directory: Path, ranks: int, batches: Sequence[torch.Tensor], stream: bool = False
) -> list[torch.Tensor]:
    """Logits [B, S, vocabulary] (fp32) of the sharded module in `directory` on `ranks` gloo processes.

    With `stream`, ranks read each weight when it is used, so that memory is bounded for models of any size.

    Raises VerificationError when they fail, or when ranks end with different logits.
    """
    words = ["-m", "rewriter.runtime.logits_worker"]
    return _run(words, directory, batches, f"the module on {ranks} ranks", ranks, placed(ranks), stream=stream)


def _run(
    words: Sequence[str],
    directory: Path,
    batches: Sequence[torch.Tensor],
    what: str,
    ranks: int,
    variables: Callable[[int], Mapping[str, str]],
    **more: bool,
) -> list[torch.Tensor]:
    from safetensors.torch import load_file

    with Processes() as job:
        request, result = job.scratch / "request.json", job.scratch / "logits.safetensors"
        asked = {"directory": str(directory.resolve()), "batches": [b.tolist() for b in batches], **more}
        write_json(request, asked)
        # Generated files are imported from a separate cache, so that nothing of a failed run stays behind.
        own = {"HF_MODULES_CACHE": str(job.scratch / "modules"), "HF_HUB_OFFLINE": "1"}
        for rank in range(ranks):
            job.fork(f"rank {rank}", [*words, str(request), str(result)], {**variables(rank), **own})
        failure = job.wait(TIMEOUT)
        if failure is not None:
            if os.environ.get("REWRITER_DEBUG", "0") not in ("", "0"):
                sys.stderr.write(failure.details)
            if failure.code is not None and failure.code < 0:
                raise VerificationError(f"{what}: {failure.name} {failure.how}. Run again.")
            ended = f"failed (status {failure.code})" if failure.code else f"gave no result in {TIMEOUT:.0f} s"
            raise VerificationError(f"{what} {ended}: {failure.line}")
        logits = load_file(result)
        return [logits[str(index)] for index in range(len(batches))]
