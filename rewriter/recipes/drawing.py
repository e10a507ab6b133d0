"""A recipe in a notebook: its passes, and the drawing of what it makes of a small Llama."""

from __future__ import annotations

import functools
from html import escape
from typing import Any

from rewriter.common.errors import RewriterError
from rewriter.ir import Program
from rewriter.ir.layer_drawing import program_drawing
from rewriter.passes.tensor_parallel import TensorParallel
from rewriter.tracing import trace

DEPTHS, RANKS = (4, 24), 2


def recipe_html(recipe: Any) -> str:
    """The summary, the passes with their options, and a drawing of a Llama rewritten on 2 ranks; where the recipe
    cannot be applied to these, the reason."""
    rows = "".join(
        f"<tr><td><b>{escape(spec.pass_name)}</b></td>"
        f"<td>{escape(', '.join(f'{k}: {v}' for k, v in spec.to_dict().items() if k != 'pass'))}</td></tr>"
        for spec in recipe.passes
    )
    return f"<div><b>{escape(recipe.name)}</b>: {escape(recipe.summary)}</div><table>{rows}</table>{_drawing(recipe)}"


def _drawing(recipe: Any) -> str:
    why = ""
    for depth in DEPTHS:  # one with as few layers as the recipe can be applied to
        try:
            program = _applied(recipe, depth)
        except RewriterError as error:
            why = why or str(error)
            continue
        return f"<div>On a Llama of {depth} layers and {RANKS} ranks:</div>{program_drawing(program)}"
    return f"<div>It cannot be applied to a small Llama: {escape(why)}</div>"


def _applied(recipe: Any, depth: int) -> Program:
    traced = _llama(depth)
    for index, rewrite in enumerate(recipe.build()):
        if rewrite.request is not None:  # a measurement: what stands for it is enough to draw
            parallel = TensorParallel().apply(traced.with_(mesh={"tp": RANKS}, origin=traced))
            recipe = recipe.with_options(index, rewrite.supposed(parallel)[0])
    passes = recipe.build()
    shared = any(rewrite.shards_tokens for rewrite in passes)
    program = traced.with_(mesh={"sp": RANKS, "tp": RANKS} if shared else {"tp": RANKS}, origin=traced)
    for spec, rewrite in zip(recipe.passes, passes, strict=True):
        try:
            program = rewrite.apply(program)
        except RewriterError:
            if not spec.optional:
                raise
    return program


@functools.cache
def _llama(depth: int) -> Program:
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=depth, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=256,
    )  # fmt: skip
    return trace(config)
