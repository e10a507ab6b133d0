"""The environment of vLLM's engines on a CPU, which they read when they are imported."""

from __future__ import annotations

import os


def set_up(**further: str) -> None:
    """Give each variable that is not set its value: one thread, 1 GB of cache, and quiet."""
    settings = {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    for name, value in (settings | further).items():
        os.environ.setdefault(name, value)
