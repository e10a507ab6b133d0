"""Further contents of a generated file of a model that is bound to its ranks: packing, modules that compute per rank.

B: batch, S: tokens, D: hidden size. A value that differs by rank is [B, S, RANKS, D], any other [B, S, D].
"""

import copy

import torch
from transformers.pytorch_utils import Conv1D

RANKS = 2
LAYER_CLASSES = {}


def unpack(states, widths):
    """The values that were packed: [B, S, sum(widths) * D] as one [B, S, D], or [B, S, RANKS, D], per width."""
    size = states.shape[-1] // sum(widths)
    values = states.split([width * size for width in widths], dim=-1)
    return [
        value if width == 1 else value.unflatten(-1, (width, size)) for value, width in zip(values, widths, strict=True)
    ]


def pack(*values):
    """Values [B, S, D] and [B, S, RANKS, D], one after the other along the last dimension."""
    values = [value.flatten(2) for value in values]
    return values[0] if len(values) == 1 else torch.cat(values, dim=-1)


def output_rows(projection):
    """The weight as [outputs, inputs]."""
    return projection.weight.t() if isinstance(projection, Conv1D) else projection.weight


class PerRankColumn:
    """A column-parallel projection of every rank's own input: [B, S, RANKS * inputs] becomes the outputs of all ranks.

    Rank r computes, from its own input, the outputs that it holds. They come in the order of the full projection,
    [B, S, outputs], which is made of `segments` (sizes), each split evenly over the ranks; or, where ranks hold some
    outputs in common (replicated key/value heads), one rank's after the other's: `rows` has a range for each rank.
    """

    segments = None
    rows = None

    def forward(self, states):
        states = states.unflatten(-1, (RANKS, -1))
        weight, bias = output_rows(self), self.bias
        if self.rows is not None:
            parts = [torch.stack([weight[a:b] for a, b in self.rows])]
            bias = None if bias is None else torch.cat([bias[a:b] for a, b in self.rows])
        else:
            parts = weight.split(self.segments or len(weight))
            parts = [part.unflatten(0, (RANKS, -1)) for part in parts]
        outputs = [torch.einsum("bsri,roi->bsro", states, part).flatten(-2) for part in parts]
        outputs = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        return outputs if bias is None else outputs + bias


class PerRankRow:
    """A row-parallel projection: [B, S, inputs] becomes the ranks' partial sums [B, S, RANKS, outputs].

    Their total is what the full projection returns. Every rank adds an equal part of the bias.
    """

    def forward(self, states):
        states, weight = states.unflatten(-1, (RANKS, -1)), output_rows(self).unflatten(1, (RANKS, -1))
        partial = torch.einsum("bsri,ori->bsro", states, weight)
        return partial if self.bias is None else partial + self.bias / RANKS


class PerRankTokenColumn:
    """A column-parallel projection of tokens of ranks: [..., S * RANKS, in] becomes [..., S * RANKS, out / RANKS].

    A token of rank r gets the outputs that rank r holds.
    """

    def forward(self, states):
        weight = output_rows(self).unflatten(0, (RANKS, -1))
        outputs = torch.einsum("...ri,roi->...ro", states.unflatten(-2, (-1, RANKS)), weight)
        outputs = outputs if self.bias is None else outputs + self.bias.unflatten(0, (RANKS, -1))
        return outputs.flatten(-3, -2)


class PerRankTokenRow:
    """A row-parallel projection of tokens of ranks: [..., S * RANKS, in / RANKS] becomes [..., S * RANKS, out].

    The sum over the ranks of a token is its total. Every rank adds an equal part of the bias.
    """

    def forward(self, states):
        weight = output_rows(self).unflatten(1, (RANKS, -1))
        partial = torch.einsum("...ri,ori->...ro", states.unflatten(-2, (-1, RANKS)), weight)
        return (partial if self.bias is None else partial + self.bias / RANKS).flatten(-3, -2)


class PerRankExperts:
    """Experts of tokens of ranks: a token of rank r passes the part of its experts that rank r holds.

    For the source's code every part is one expert, number expert * RANKS + rank. `parts` says along which dimension a
    weight is split, and in how many equal runs (gate and up); None: every part has an equal share of it.
    """

    def forward(self, states, index, weights):
        rank = torch.arange(len(states), device=states.device).remainder(RANKS).unsqueeze(-1)
        index = (index * RANKS + rank).clamp(max=self.unbound[0].num_experts)  # beyond the last expert: dropped
        experts = {name: self.split(name, parameter) for name, parameter in self.named_parameters()}
        return torch.func.functional_call(self.unbound[0], experts, (states, index, weights))

    def split(self, name, weight):
        """[experts, ...] as [experts * RANKS, ...]."""
        if self.parts[name] is None:
            return weight.repeat_interleave(RANKS, 0) / RANKS
        dim, runs = self.parts[name]
        parts = weight.unflatten(dim, (runs, RANKS, -1)).movedim(dim + 1, 1)
        return parts.flatten(dim + 1, dim + 2).flatten(0, 1)


class PerRankNorm:
    """A norm with weights per rank: parameters [RANKS * D], values [B, S, RANKS, D]."""

    def forward(self, states):
        def one_rank(parameters, states):
            return torch.func.functional_call(self.unbound[0], parameters, (states,))

        parameters = {name: p.unflatten(0, (RANKS, -1)) for name, p in self.named_parameters(recurse=False)}
        return torch.func.vmap(one_rank, in_dims=(0, -2), out_dims=-2)(parameters, states)


def unbound(module):
    """The source's module for other weights, which are given with a call. In a tuple: it is no part of the model."""
    twin = copy.copy(module)
    twin._parameters = {name: torch.nn.Parameter(torch.empty(0, device="meta")) for name in module._parameters}
    return (twin,)


class PerRankColumnLinear(PerRankColumn, torch.nn.Linear):
    pass


class PerRankRowLinear(PerRankRow, torch.nn.Linear):
    pass


class PerRankTokenColumnLinear(PerRankTokenColumn, torch.nn.Linear):
    pass


class PerRankTokenRowLinear(PerRankTokenRow, torch.nn.Linear):
    pass


def use_per_rank_modules(layer):
    """Let those children of a layer compute per rank that have to; they stay the modules that the source built."""
    for path, per_rank_class, options in getattr(layer, "per_rank_modules", ()):
        module = layer.get_submodule(path)
        if issubclass(per_rank_class, PerRankNorm):  # room for the weights of every rank; all start alike
            module.unbound = unbound(module)
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, torch.nn.Parameter(parameter.detach().repeat(RANKS)))
        if per_rank_class is PerRankExperts:
            module.unbound = unbound(module)
            module.unbound[0].num_experts = module.num_experts * RANKS
            per_rank_class = type(f"PerRank{type(module).__name__}", (PerRankExperts, type(module)), {})
        module.__class__ = per_rank_class
        for name, value in options.items():
            setattr(module, name, value)
    for path, groups in getattr(layer, "key_value_groups", ()):
        layer.get_submodule(path).num_key_value_groups = groups
    if hasattr(layer, "per_rank_modules"):
        layer.register_forward_pre_hook(require_per_rank_modules)


def require_per_rank_modules(layer, args):
    """Refuse modules that were wrapped or exchanged later (adapters, quantisation) and do not compute per rank."""
    for path, per_rank_class, options in layer.per_rank_modules:
        module = layer.get_submodule(path)
        if not isinstance(module, per_rank_class) and not lora_computes_per_rank(module, per_rank_class, options):
            raise TypeError(
                f"{path} of a {type(layer).__name__} became a {type(module).__name__}, which cannot compute the "
                f"{RANKS} ranks of this model. Train its weights themselves, adapt it by peft's LoRA (plain, without "
                "biases), or adapt the other modules."
            )


class PerRankRead(torch.nn.Linear):
    """The full projection of every rank's own input: [B, S, RANKS * inputs] becomes [B, S, RANKS * outputs]."""

    def forward(self, states):
        return super().forward(states.unflatten(-1, (RANKS, -1))).flatten(-2)


# The classes of a LoRA's two factors, by what their product is added to: the first, from inputs to the rank of the
# adapter, and the second, from there to outputs.
LORA_FACTORS = {
    PerRankColumn: (PerRankRead, PerRankColumnLinear),
    PerRankRow: (PerRankRowLinear, torch.nn.Linear),
    PerRankTokenColumn: (torch.nn.Linear, PerRankTokenColumnLinear),
    PerRankTokenRow: (PerRankTokenRowLinear, torch.nn.Linear),
}


def lora_computes_per_rank(module, per_rank_class, options):
    """Let the two factors of peft's LoRA compute per rank as the weight does that their product is added to.

    Of a column-parallel projection, every rank's input passes all of the first factor and those outputs of the second
    that the rank holds; of a row-parallel one, it passes the rank's inputs of the first and all of the second. False
    for any other wrapper.
    """
    if type(module).__module__ != "peft.tuners.lora.layer" or not isinstance(module.get_base_layer(), per_rank_class):
        return False
    if module.lora_variant or any(factor.bias is not None for factor in module.lora_B.values()):
        return False
    for role, (first, second) in LORA_FACTORS.items():
        if issubclass(per_rank_class, role):
            for name in module.lora_A:
                module.lora_A[name].__class__ = first
                module.lora_B[name].__class__ = second
                for option, value in options.items():
                    setattr(module.lora_B[name], option, value)
            return True
    return False


def refuse_engines(config):
    """Refuse a serving engine's own attention: it shares the projections between ranks, which then compute one."""
    engine = str(config._attn_implementation)
    if engine.startswith(("vllm", "sglang")):
        raise ValueError(
            f"this checkpoint is bound to tp={RANKS}: on one device its projections compute all {RANKS} ranks, which "
            f"{engine} would share between its own. Serve it by `rewrite serve DIR --tp {RANKS}`, where "
            "vLLM has layers of its own for this model, or run it by `rewrite generate DIR`."
        )


def narrow_hidden_states(model, args, output):
    """Cut recorded hidden states back to the residual stream, which stands first; per rank, to the ranks' mean."""
    recorded = getattr(output, "hidden_states", None)
    if recorded is not None:
        size, kinds = output[0].shape[-1], model.config.rewriter_layers
        given = [getattr(LAYER_CLASSES[kind], "gives", (1,))[0] for kind in kinds]
        widths = [1, *given[: len(recorded) - 2], 1]  # the embedding, every layer, the final norm
        output.hidden_states = tuple(
            state if state is None else state[..., : width * size].unflatten(-1, (width, size)).mean(-2)
            for state, width in zip(recorded, widths, strict=True)
        )
    return output


def refuse_dropout(model, args):
    """The layers leave out the source's dropout between its modules and the residual stream."""
    if model.training:
        raise ValueError(
            "this model was rewritten with dropout between its modules, which its layers do not compute per rank: call "
            "eval(), or rewrite it from a config whose residual or hidden dropout is 0"
        )
