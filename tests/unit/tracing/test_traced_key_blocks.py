"""Which modules are recorded as keys of blocks of tokens: those that compute what is recorded, and no other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rewriter.check.coverage.configs import small_config
from rewriter.common.model_class import auto_class
from rewriter.passes.sequence.sequence_plans import attentions
from rewriter.tracing import trace
from rewriter.tracing.key_blocks import modules_of_blocks

TYPES = {
    "deepseek_v4": "DeepseekV4CSACompressor",
    "qwen4_exp_text": "Qwen4ExpTextQSAIndexer",
    "glm5_next": "Glm5NextTextIndexer",
}


def module_of(model_type: str) -> nn.Module:
    """A model on meta that has the module alone."""
    config = small_config(model_type)
    with torch.device("meta"):
        model = auto_class(config).from_config(config, attn_implementation="eager")
    return next(m for m in model.modules() if type(m).__name__ == TYPES[model_type])


def of_another_size(module: Any) -> None:
    original = module.forward
    names = [n for n in ("compress_rate", "compress_ratio", "index_kpool") if hasattr(module, n)]

    def forward(*args: Any, **kwargs: Any) -> Any:
        size = getattr(module, names[0])
        setattr(module, names[0], size + 1)
        try:
            return original(*args, **kwargs)
        finally:
            setattr(module, names[0], size)

    module.forward = forward


@pytest.mark.parametrize("model_type", TYPES)
def test_a_module_is_recorded(model_type: str) -> None:
    module = module_of(model_type)
    assert [*modules_of_blocks(module)] == [module]


@pytest.mark.parametrize("model_type", TYPES)
def test_a_module_that_pools_another_number_of_tokens_is_not(model_type: str) -> None:
    module = module_of(model_type)
    of_another_size(module)
    assert not modules_of_blocks(module)


@pytest.mark.parametrize("model_type", TYPES)
def test_a_module_that_chooses_the_lowest_scores_is_not(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = module_of(model_type)
    inner = getattr(module, "indexer", module)
    topk = torch.Tensor.topk

    def smallest(self: torch.Tensor, k: int, dim: int = -1, **_: Any) -> Any:
        return topk(self, k, dim=dim, largest=False)

    kind = type(inner)
    original = kind.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "topk", smallest)
            return original(self, *args, **kwargs)

    monkeypatch.setattr(kind, "forward", forward)
    assert not modules_of_blocks(module)


def test_attention_sees_the_tokens_of_chosen_blocks() -> None:
    """GLM 5 Next's layers make a mask of the blocks that an indexer chose, of their own layer or of one before."""
    program = trace(small_config("glm5_next"))
    reading = [node for _, node in attentions(program) if "block" in node.kwargs]
    assert reading
    assert all(node.kwargs["keys"] is not None for node in reading)
