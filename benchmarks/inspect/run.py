"""`rewrite inspect` on configs of large models: time and memory of a fresh process with warm files, against limits.

    python -m benchmarks.inspect.run

Fails (exit 1) above 8 s or 1.5 GB for 80 layers of Llama 70B, or above 9 s for 126 layers of 405B. Two runs each, the
better one counts; CPU time is printed beside the wall clock, since only an idle machine makes them equal.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "dtype": "bfloat16",
}
LLAMA_405B = LLAMA_70B | {
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
}
CASES = {"Llama 70B, 80 layers": (LLAMA_70B, 8.0), "Llama 405B, 126 layers": (LLAMA_405B, 9.0)}
MAX_BYTES = 1.5e9


def measure(directory: Path) -> tuple[float, float, int]:
    """(wall seconds, CPU seconds, peak resident bytes) of one `rewrite inspect`."""
    words = ["inspect", str(directory), "--recipe", "ladder-upper-half", "--tp", "8"]
    begin = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "rewriter.cli", *words], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    wall = time.perf_counter() - begin
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"rewrite inspect failed with exit code {process.returncode}")
    return wall, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024


def main() -> int:
    failed = False
    with tempfile.TemporaryDirectory() as scratch:
        for name, (config, limit) in CASES.items():
            (Path(scratch) / "config.json").write_text(json.dumps(config))
            measure(Path(scratch))  # warms the files
            wall, cpu, memory = min(measure(Path(scratch)) for _ in range(2))
            passed = wall < limit and memory < MAX_BYTES
            failed |= not passed
            print(
                f"{name}: {wall:.1f} s (limit {limit:.0f}), CPU {cpu:.1f} s, {memory / 1e9:.2f} GB (limit 1.50): "
                + ("pass" if passed else "FAIL")
            )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
