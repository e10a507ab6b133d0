"""Cases of experts that are sharded over ranks, as each rank runs them, and as one device does."""

from __future__ import annotations

import torch
import zoo

from benchmarks.experts.traffic import expert_traffic
from rewriter.training import expert_mesh, shard_experts

STEPS, LOCAL = 3, 2

# name: family, dp, ep, order, experts implementation
FAST = {
    "mixtral, ep 2": ("mixtral", 1, 2, "E+D", "eager"),
    "qwen3_moe, ep 2": ("qwen3_moe", 1, 2, "D+E", "batched_mm"),
    "gpt_oss, ep 2": ("gpt_oss", 1, 2, "D+E", "eager"),
    "starved": ("starved", 1, 2, "D+E", "eager"),
    "short, E+D": ("short", 2, 2, "E+D", "eager"),
    "short, D+E": ("short", 2, 2, "D+E", "eager"),
    "ladder, D+E": ("ladder", 2, 2, "D+E", "eager"),
}
SLOW = {
    "mixtral, E+D": ("mixtral", 2, 2, "E+D", "eager"),
    "mixtral, D+E": ("mixtral", 2, 2, "D+E", "eager"),
    "mixtral, dp 2": ("mixtral", 2, 1, "D+E", "eager"),
    "mixtral, ep 4": ("mixtral", 1, 4, "E+D", "eager"),
    "qwen3_moe, D+E": ("qwen3_moe", 2, 2, "D+E", "eager"),
    "gpt_oss, batched": ("gpt_oss", 2, 2, "E+D", "batched_mm"),
}
CASES = FAST | SLOW


def build(family, ladder, experts="eager"):
    if family == "ladder":
        from transformers import AutoModelForCausalLM

        made = AutoModelForCausalLM.from_pretrained(ladder, trust_remote_code=True, attn_implementation="eager").eval()
    else:
        made = zoo.build("mixtral" if family in ("starved", "short") else family)
    if family in ("starved", "short"):
        made.model.layers = made.model.layers[:1]
    if family == "starved":  # all tokens choose the same experts, which are on one rank
        with torch.no_grad():
            made.model.layers[0].mlp.gate.weight.zero_()
    made.set_experts_implementation(experts)
    return made.double()


def rows(step, rank):
    return zoo.batch(rows=2, length=13, seed=100 * step + rank)


def forward(made, ids):
    """transformers' own loss is computed in fp32."""
    logits = made(input_ids=ids).logits
    return logits, torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def adam(made):
    return torch.optim.AdamW(made.parameters(), lr=1e-3, eps=1e-4)


def whole(parallel, values):
    """Gradients of experts put together over "ep", with the others."""
    import torch.distributed as dist

    group, found = parallel.mesh.get_group("ep"), {}
    for name, value in values.items():
        if name in parallel.experts:
            parts = [torch.empty_like(value) for _ in range(group.size())]
            dist.all_gather(parts, value.contiguous(), group=group)
            value = torch.cat(parts)
        found[name] = value
    return found


def one(group, case, ladder, steps=STEPS):
    from rewriter.runtime import record_events

    family, dp, ep, order, experts = CASES[case]
    rank = group.rank()
    made = build(family, ladder, experts)
    parallel = shard_experts(made, expert_mesh(dp, ep, order, "cpu"))
    optimizer, found = adam(made), {}
    for step in range(steps):
        ids = rows(step, rank)
        with record_events() as events:
            logits, loss = forward(made, ids)
            loss.backward()
            parallel.reduce_gradients()
        if step == 0:
            found["logits"], found["loss"] = logits.detach(), loss.detach()
            found["gradients"] = whole(parallel, {n: p.grad.clone() for n, p in made.named_parameters()})
            found["norm"] = parallel.clip_grad_norm_(float("inf"))
            found["traffic"] = expert_traffic(events, LOCAL, rank)
            found["events"] = events
            found["held"] = sum(p.numel() for n, p in made.named_parameters() if n in parallel.experts)
        optimizer.step()
        optimizer.zero_grad()
    found["weights"] = parallel.full_state_dict()
    return found | {"parallel": parallel}
