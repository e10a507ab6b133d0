"""What one rank holds while it generates: weights, its part of the cache, and the prefill's temporaries."""

from __future__ import annotations

from rewriter.ir import Program, args_of
from rewriter.ir.communication import model_dtype_bytes
from rewriter.ir.marks import marks
from rewriter.passes.placement.rank_memory import cache_elements, memory
from rewriter.passes.sequence.sequence_plans import attentions


def bytes_per_rank(
    program: Program, batch: int, prompt: int, generate: int, *, plain: bool = False, all_logits: bool = False
) -> int:
    """Bytes of weights, of keys and values of all tokens, and of the largest temporaries of the prefill.

    An estimate, as `analysis.memory` is: temporaries are the widest block's projections and four values as wide as the
    residual stream, of all tokens of a rank, the scores of one attention that no fused kernel computes, and the logits
    of the last token of each sequence, or with `all_logits` of each token. `plain`: no kernel is fused. Windows keep no
    more tokens than their size; ranks that share tokens keep their own.
    """
    held = memory(program)
    shared = program.mesh.get("sp", 1)
    cache = cache_elements(program, prompt + generate) * model_dtype_bytes(program)
    temporary = -(-prompt // shared) * (held.block_per_token + 4 * held.stream_per_token)
    temporary += held.logits_per_token * (prompt if all_logits else 1)
    if shared == 1:
        temporary += prompt * prompt * _bytes_per_pair(program, plain)
    return held.parameters_per_rank + batch * (cache + temporary)


def _bytes_per_pair(program: Program, plain: bool) -> int:
    """Of a query and a key, in the layer that holds most: with a softcap or sinks, or where all are `plain`, scores are
    written in the model's dtype, and their softmax in fp32 and again in the model's (`runtime.attention.cached`)."""
    heads = [
        int(marks(node).local_q_heads or args_of(node)[0].meta["val"].shape[1])
        for _, node in attentions(program)
        if plain or node.kwargs.get("softcap") is not None or node.kwargs.get("sinks") is not None
    ]
    return max(heads, default=0) * (2 * model_dtype_bytes(program) + 4)
