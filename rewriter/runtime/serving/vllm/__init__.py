"""The plugin of vLLM: rewritten models on vLLM's own layers, whose all-reduces overlap with computation.

vLLM loads `register` through the entry point `vllm.general_plugins`. Nothing here imports vLLM before that.
"""

from __future__ import annotations


def register() -> None:
    """Let vLLM know the architectures and the model types of rewritten checkpoints. May be called again."""
    from rewriter.runtime.serving.vllm.registration import register_all

    register_all()
