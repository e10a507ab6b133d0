"""Comparisons made by hand, shaped as a decoder's passes are: what reports and their tests need, without a model."""

from __future__ import annotations

from collections.abc import Sequence

from rewriter.predict.results import Phase, PredictedPoint, Prediction, RecipeComparison, Span

PARTS = {  # share of a layer's compute by module, and after which of them its block's all-reduce starts
    "input_layernorm": 0.03, "self_attn.qkv_proj": 0.15, "self_attn.attention": 0.1, "self_attn.o_proj": 0.12,
    "post_attention_layernorm": 0.03, "mlp.gate_up_proj": 0.32, "mlp.act_fn": 0.03, "mlp.down_proj": 0.22,
}  # fmt: skip


def phase(layers: int, compute: float, reduction: float, hidden: bool) -> Phase:
    """One pass: `compute` seconds of each layer, an all-reduce of `reduction` seconds after either block, which the
    next block waits for, or with `hidden` the one after the next."""
    spans: list[Span] = []
    now, link, exposed, by_layer = 0.0, 0.0, 0.0, dict.fromkeys(range(layers), 0.0)
    ready: list[float] = []
    for layer in range(layers):
        for name, share in PARTS.items():
            if name.endswith("layernorm"):
                awaited = ready[-2:-1] if hidden else ready[-1:]
                if awaited and awaited[0] > now:
                    spans.append(Span("compute", now, awaited[0], "waits", layer, exposed=True))
                    by_layer[layer] += awaited[0] - now
                    exposed += awaited[0] - now
                    now = awaited[0]
            spans.append(Span("compute", now, now + share * compute, f"model.layers.{layer}.{name}", layer))
            now += share * compute
            if name in ("self_attn.o_proj", "mlp.down_proj"):
                start = max(now, link)
                link = start + reduction
                block = name.partition(".")[0]
                named = f"all-reduce model.layers.{layer}.{block}"
                spans.append(Span("communication", start, link, named, layer, not hidden, nbytes=16384))
                ready.append(link)
    spans.append(Span("compute", now, now + compute / 4, "lm_head", None))
    now += compute / 4
    spans.sort(key=lambda s: s.start)
    computing = sum(s.seconds for s in spans if s.lane == "compute" and not s.exposed)
    return Phase(
        now, computing, 2 * layers * reduction, exposed, by_layer, tuple(spans),
        kernels=10 * layers + 1, collectives=2 * layers,
    )  # fmt: skip


def comparison(
    recipes: Sequence[str] = ("tensor-parallel", "ladder", "ladder-upper-half"),
    layers: int = 8,
    *,
    modelled: bool = False,
    fits: bool = True,
    notes: tuple[str, ...] = (),
    points: int = 4,
) -> RecipeComparison:
    """Recipes of which those that are called ladder hide their reductions."""
    found: list[Prediction] = []
    for index, recipe in enumerate(recipes):
        hidden = recipe.startswith("ladder")
        prefill = phase(layers, 3e-3, 320e-6 + 1e-6 * index, hidden)
        decode = phase(layers, 30e-6, 19e-6 + 1e-7 * index, hidden)
        seconds = prefill.seconds + 511 * decode.seconds
        first = found[0].tokens_per_second if found else 512 / seconds
        found.append(
            Prediction(
                recipe, "h100-nvlink", modelled, 8, 1, 1, 1024, 512, True, prefill, decode,
                512 / seconds, found[0].decode.seconds / decode.seconds if found else 1.0,
                found[0].prefill.seconds / prefill.seconds if found else 1.0, 512 / seconds / first,
                12e-6 if hidden else None,
                None if hidden else "the same program", 18_400_000_000, fits, notes,
                kind="timing only" if recipe == "upper-bound" else "exact",
            )
        )  # fmt: skip
    pareto = {
        p.recipe: tuple(
            PredictedPoint(tp, batch, p.seconds_per_token * (1 + batch / 64) * 8 / tp,
                  batch / (p.seconds_per_token * (1 + batch / 64) * 8), batch < 64, front=tp == 8 and batch < 64)
            for tp in (2, 4, 8) for batch in [2**k for k in range(points * 2)]
        )
        for p in found
    } if points else {}  # fmt: skip
    summary = "8 H100 SXM of one node over NVLink, NCCL 2.29."
    return RecipeComparison("llama-70b", "h100-nvlink", summary, "H100 SXM", modelled, tuple(found), pareto)
