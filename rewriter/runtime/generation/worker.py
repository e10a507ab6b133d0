"""Generation on ranks of this machine: `launch` starts them, and this module is what each of them runs.

Requests and results are JSON, so nothing is unpickled between processes. While they run, the first rank appends every
token to a file, and a file per prompt says that no more of it is wanted.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rewriter.common.errors import RewriterError
from rewriter.common.processes import placed, rank_main, run_ranks

# The arguments of `generate` that a request may hold besides its prompts; and "compile": None, the default, takes a
# compiled decode step from the cache, or has one compiled meanwhile; True compiles it first, False never.
OPTIONS = frozenset(
    {
        *("max_new_tokens", "eos_token_ids", "pad_token_id", "temperature", "top_k", "top_p", "seed", "use_cache"),
        *("prefill_chunk", "compile"),
    }
)
# Gets the index of a prompt, its next token, the seconds since its prefill began (of the first prompt: since ranks
# began to load the model), without those in which a compilation was waited for, and these. True: no more of it.
Listener = Callable[[int, int, float, float], bool]


def launch(
    directory: str | os.PathLike[str],
    ranks: int,
    request: Mapping[str, Any],
    *,
    timeout: float | None = None,
    on_token: Listener | None = None,
) -> dict[str, Any]:
    """Generate with the output in `directory` on `ranks` processes, one prompt after another.

    `request`: "prompts", lists of token ids, and arguments of `rewriter.runtime.generate`. Returns for each prompt its
    new "tokens", and for each of them "seconds" and "compiling", as `on_token` gets them while it is made; ranks may be
    some tokens ahead when it ends a prompt, and those are left out of what is returned. "notes" are sentences for the
    user.

    Raises RewriterError with the message of the rank that failed first, or its traceback, and after `timeout` seconds.
    No rank outlives this.
    """
    unknown = sorted(set(request) - OPTIONS - {"prompts"})
    if unknown:
        raise RewriterError(f"generate: unknown key {unknown[0]!r}, expected {', '.join(sorted(OPTIONS))}")
    where = str(Path(directory).resolve())
    spec = {"directory": where, "request": dict(request)}
    command = [sys.executable, "-m", "rewriter.runtime.generation.worker", where]
    stream = _Stream(len(request["prompts"]), on_token or (lambda *_: False))
    answers = run_ranks(
        command, spec, range(ranks), timeout=timeout, about=f"{directory}: ", variables=placed(ranks), tick=stream.read
    )
    notes = answers[0].pop("notes")
    return {**stream.rest(answers[0]), "notes": notes}


class _Stream:
    """Passes tokens on to the listener, which has had `_counts` of each prompt and wants no more of `_ended` ones."""

    def __init__(self, prompts: int, listener: Listener) -> None:
        self._counts, self._ended, self._listener = [0] * prompts, [False] * prompts, listener
        self._position = 0

    def read(self, scratch: Path) -> None:
        """Pass on what the first rank has added to its file since the last call."""
        if not (scratch / "tokens").exists():
            return
        with (scratch / "tokens").open("rb") as file:
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._position += len(line)
                prompt, *row = json.loads(line)
                self._pass_on(prompt, *row)
                if self._ended[prompt]:
                    _enough(scratch, prompt).touch()

    def rest(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Passes on what is left; returns the answer without what the listener did not want."""
        for prompt, rows in enumerate(zip(answer["tokens"], answer["seconds"], answer["compiling"], strict=True)):
            for row in list(zip(*rows, strict=True))[self._counts[prompt] :]:
                self._pass_on(prompt, *row)
        return {name: [row[:n] for row, n in zip(rows, self._counts, strict=True)] for name, rows in answer.items()}

    def _pass_on(self, prompt: int, token: int, seconds: float, compiling: float) -> None:
        if not self._ended[prompt]:
            self._counts[prompt] += 1
            self._ended[prompt] = self._listener(prompt, token, seconds, compiling)


def _enough(scratch: Path, prompt: int) -> Path:
    return scratch / f"enough-{prompt}"


def _generate(spec: dict[str, Any], rank: int) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from rewriter.runtime.generation.cached_step import compile_steps
    from rewriter.runtime.generation.decode_step import compilation
    from rewriter.runtime.generation.generate import generate
    from rewriter.runtime.loading import load

    begin = time.perf_counter()
    scratch, options = Path(spec["scratch"]), dict(spec["request"])
    prompts, compile = options.pop("prompts"), options.pop("compile", None)
    # On a GPU the segments of a step are compiled, on a CPU the parts of it that the cache holds.
    whole = compile if torch.cuda.is_available() or compile is False else None
    model = load(spec["directory"], compile=whole, keep_quantized=not compile)
    compile_steps(model, "first" if compile else "background")
    seconds: list[list[float]] = [[] for _ in prompts]
    compiling: list[list[float]] = [[] for _ in prompts]
    tokens = []
    for index, prompt in enumerate(prompts):
        start, enough = time.perf_counter() if index else begin, _enough(scratch, index)
        before = compilation(model)[0]

        def on_token(
            _: int, token: int, index: int = index, start: float = start, before: float = before, enough: Path = enough
        ) -> bool:
            waited = compilation(model)[0] - before
            seconds[index].append(time.perf_counter() - start - waited)
            compiling[index].append(waited)
            with (scratch / "tokens").open("a", encoding="utf-8") as file:
                file.write(f"{json.dumps([index, token, seconds[index][-1], waited])}\n")
            return enough.exists()

        tokens += generate(model, [prompt], on_token=on_token, **options)
    notes = compilation(model)[1]
    if dist.is_initialized():
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        dist.barrier()
        dist.destroy_process_group()
    return {"tokens": tokens, "seconds": seconds, "compiling": compiling, "notes": notes}


if __name__ == "__main__":
    rank_main(_generate)
