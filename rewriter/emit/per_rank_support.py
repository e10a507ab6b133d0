"""The part of a generated file that all layers with lanes share: packing, and projections and norms that know lanes."""

from __future__ import annotations

from collections.abc import Collection

from rewriter.emit.per_rank_modules import LaneModule
from rewriter.emit.python import bracketed

_PACKING = '''
def unpack(states, widths):
    """What the layer before packed: [B, S, sum(widths) * D] as one [B, S, D], or [B, S, LANES, D], per width."""
    size = states.shape[-1] // sum(widths)
    values = states.split([width * size for width in widths], dim=-1)
    return [
        value if width == 1 else value.unflatten(-1, (width, size)) for value, width in zip(values, widths, strict=True)
    ]


def pack(*values):
    """Values [B, S, D] and [B, S, LANES, D], one after the other along the last dimension."""
    values = [value.flatten(2) for value in values]
    return values[0] if len(values) == 1 else torch.cat(values, dim=-1)
'''

_ENTRY = '''
class LaneEntry:
    """A projection that reads every lane's own input: [B, S, LANES * inputs] becomes the outputs of all lanes.

    Lane r computes, from its own input, the outputs that rank r holds. They come in the order of the whole projection,
    [B, S, outputs], which is made of `segments` (sizes), each split evenly over the lanes; or, where ranks hold some
    outputs in common (replicated key/value heads), one lane's after the other's: `rows` has a range for each lane.
    """

    segments = None
    rows = None

    def forward(self, states):
        states = states.unflatten(-1, (LANES, -1))
        weight, bias = output_rows(self), self.bias
        if self.rows is not None:
            parts = [torch.stack([weight[a:b] for a, b in self.rows])]
            bias = None if bias is None else torch.cat([bias[a:b] for a, b in self.rows])
        else:
            parts = weight.split(self.segments or len(weight))
            parts = [part.unflatten(0, (LANES, -1)) for part in parts]
        outputs = [torch.einsum("bsli,loi->bslo", states, part).flatten(-2) for part in parts]
        outputs = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        return outputs if bias is None else outputs + bias
'''

_EXIT = '''
class LaneExit:
    """A projection whose inputs are split over the lanes: [B, S, inputs] becomes partial sums [B, S, LANES, outputs].

    Their total is what the whole projection returns. Every lane adds an equal part of the bias.
    """

    def forward(self, states):
        states, weight = states.unflatten(-1, (LANES, -1)), output_rows(self).unflatten(1, (LANES, -1))
        partial = torch.einsum("bsli,oli->bslo", states, weight)
        return partial if self.bias is None else partial + self.bias / LANES
'''

_TOKEN_ENTRY = '''
class LaneTokenEntry:
    """A projection of lanes that are tokens: [..., S * LANES, inputs] becomes [..., S * LANES, outputs / LANES].

    A token of lane r gets the outputs that rank r holds.
    """

    def forward(self, states):
        weight = output_rows(self).unflatten(0, (LANES, -1))
        outputs = torch.einsum("...li,loi->...lo", states.unflatten(-2, (-1, LANES)), weight)
        outputs = outputs if self.bias is None else outputs + self.bias.unflatten(0, (LANES, -1))
        return outputs.flatten(-3, -2)
'''

_TOKEN_EXIT = '''
class LaneTokenExit:
    """A projection of lanes that are tokens: [..., S * LANES, inputs / LANES] becomes [..., S * LANES, outputs].

    The lanes of a token have its total as their sum. Every lane adds an equal part of the bias.
    """

    def forward(self, states):
        weight = output_rows(self).unflatten(1, (LANES, -1))
        partial = torch.einsum("...li,oli->...lo", states.unflatten(-2, (-1, LANES)), weight)
        return (partial if self.bias is None else partial + self.bias / LANES).flatten(-3, -2)
'''

_EXPERTS = '''
class LaneExperts:
    """Experts of lanes that are tokens: a token of lane r passes the part of its experts that rank r holds.

    Every part is an expert of its own, number expert * LANES + lane, for the source's code. `parts` says along which
    dimension a weight is split, and in how many equal runs (gate and up); None: every part has an equal share of it.
    """

    def forward(self, states, index, weights):
        lane = torch.arange(len(states), device=states.device).remainder(LANES).unsqueeze(-1)
        index = (index * LANES + lane).clamp(max=self.unbound[0].num_experts)  # beyond the last expert: dropped
        experts = {name: self.split(name, parameter) for name, parameter in self.named_parameters()}
        return torch.func.functional_call(self.unbound[0], experts, (states, index, weights))

    def split(self, name, weight):
        """[experts, ...] as [experts * LANES, ...]."""
        if self.parts[name] is None:
            return weight.repeat_interleave(LANES, 0) / LANES
        dim, runs = self.parts[name]
        parts = weight.unflatten(dim, (runs, LANES, -1)).movedim(dim + 1, 1)
        return parts.flatten(dim + 1, dim + 2).flatten(0, 1)
'''

_ROWS = '''
def output_rows(projection):
    """The weight as [outputs, inputs]."""
    return {}
'''

_NORM = '''
class LaneNorm:
    """A norm whose weights are each lane's own: parameters [LANES * D], values [B, S, LANES, D]."""

    def forward(self, states):
        def one_lane(parameters, states):
            return torch.func.functional_call(self.unbound[0], parameters, (states,))

        parameters = {name: p.unflatten(0, (LANES, -1)) for name, p in self.named_parameters(recurse=False)}
        return torch.func.vmap(one_lane, in_dims=(0, -2), out_dims=-2)(parameters, states)
'''

_UNBOUND = '''
def unbound(module):
    """The source's module for other weights, which are given with a call. In a tuple: it is no part of the model."""
    twin = copy.copy(module)
    twin._parameters = {name: torch.nn.Parameter(torch.empty(0, device="meta")) for name in module._parameters}
    return (twin,)
'''

_USE = '''
def use_lanes(layer):
    """Let the children of a layer that know lanes do so; they stay the modules that the source built."""
    for path, lane_class, options in getattr(layer, "lane_modules", ()):
        module = layer.get_submodule(path)
@norm@experts        module.__class__ = lane_class
        for name, value in options.items():
            setattr(module, name, value)
    for path, groups in getattr(layer, "key_value_groups", ()):
        layer.get_submodule(path).num_key_value_groups = groups
    if hasattr(layer, "lane_modules"):
        layer.register_forward_pre_hook(require_lanes)


def require_lanes(layer, args):
    """Refuse modules that were wrapped or exchanged later (adapters, quantisation) and do not know lanes."""
    for path, lane_class, options in layer.lane_modules:
        module = layer.get_submodule(path)
        if not isinstance(module, lane_class) and not lora_knows_lanes(module, lane_class, options):
            raise TypeError(
                f"{path} of a {type(layer).__name__} became a {type(module).__name__}, which cannot compute the "
                f"{LANES} lanes of this model. Train its weights themselves, adapt it by peft's LoRA (plain, without "
                "biases), or adapt the other modules."
            )
'''

_LORA = '''
def lora_knows_lanes(module, lane_class, options):
    """Let the two factors of peft's LoRA compute lanes as the weight does that their product adds to.

    Where lanes enter, every lane's input passes the whole first factor and those outputs of the second that the lane
    holds; where they leave, it passes the lane's inputs of the first and the whole second. False for any other wrapper.
    """
    if type(module).__module__ != "peft.tuners.lora.layer" or not isinstance(module.get_base_layer(), lane_class):
        return False
    if module.lora_variant or any(factor.bias is not None for factor in module.lora_B.values()):
        return False
    for role, (first, second) in LORA_FACTORS.items():
        if issubclass(lane_class, role):
            for name in module.lora_A:
                module.lora_A[name].__class__ = first
                module.lora_B[name].__class__ = second
                for option, value in options.items():
                    setattr(module.lora_B[name], option, value)
            return True
    return False
'''

_LORA_READ = '''
class LaneRead(torch.nn.Linear):
    """The whole of a projection for every lane's own input: [B, S, LANES * inputs] becomes [B, S, LANES * outputs]."""

    def forward(self, states):
        return super().forward(states.unflatten(-1, (LANES, -1))).flatten(-2)
'''

_WIDEN = """\
        if issubclass(lane_class, LaneNorm):  # room for the weights of every lane; all start alike
            module.unbound = unbound(module)
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, torch.nn.Parameter(parameter.detach().repeat(LANES)))
"""

_MULTIPLY = """\
        if lane_class is LaneExperts:
            module.unbound = unbound(module)
            module.unbound[0].num_experts = module.num_experts * LANES
            lane_class = type(f"Lane{type(module).__name__}", (LaneExperts, type(module)), {})
"""


def support(modules: Collection[LaneModule]) -> list[str]:
    """Top-level code for layers with these modules: functions, what a role does, the classes by role and kind."""
    roles = {role_name(m) for m in modules}
    # Of each projection's role also the Linear, for the factors of an adapter.
    pairs = {(role_name(m), m.kind) for m in modules if m.kind} | {(role, "Linear") for role in roles & _FACTORS.keys()}
    kinds = sorted({kind for _, kind in pairs if kind in _WEIGHTS})
    parts = [_PACKING]
    if len(kinds) == 2:
        parts.append(_ROWS.format("projection.weight.t() if isinstance(projection, Conv1D) else projection.weight"))
    elif kinds:
        parts.append(_ROWS.format(_WEIGHTS[kinds[0]]))
    parts += [text for role, text in _ROLES.items() if role in roles]
    if roles & {"LaneNorm", "LaneExperts"}:
        parts.append(_UNBOUND)
    for role, kind in sorted(pairs):
        parent = f"torch.nn.{kind}" if kind in ("Linear", "LayerNorm") else kind
        parts.append(f"class {_class_name(role, kind)}({role}, {parent}):\n    pass")
    use = _USE.replace("@norm", _WIDEN if "LaneNorm" in roles else "")
    parts.append(use.replace("@experts", _MULTIPLY if "LaneExperts" in roles else ""))
    return parts + _adapters(roles)


def _adapters(roles: Collection[str]) -> list[str]:
    """Code by which adapters of modules with these roles know lanes."""
    classes = [f"{role}: ({', '.join(factors)})" for role, factors in _FACTORS.items() if role in roles]
    table = "# The classes of a LoRA's two factors, by what their product is added to.\n"
    table += bracketed("LORA_FACTORS = {", classes, "}", 0)
    return [*([_LORA_READ] if "LaneEntry" in roles else []), table, _LORA]


# The first factor, from inputs to the rank of the adapter, and the second, from there to outputs.
_FACTORS = {
    "LaneEntry": ("LaneRead", "LaneEntryLinear"),
    "LaneExit": ("LaneExitLinear", "torch.nn.Linear"),
    "LaneTokenEntry": ("torch.nn.Linear", "LaneTokenEntryLinear"),
    "LaneTokenExit": ("LaneTokenExitLinear", "torch.nn.Linear"),
}
_WEIGHTS = {"Linear": "projection.weight", "Conv1D": "projection.weight.t()"}
_ROLES = {
    "LaneEntry": _ENTRY,
    "LaneExit": _EXIT,
    "LaneTokenEntry": _TOKEN_ENTRY,
    "LaneTokenExit": _TOKEN_EXIT,
    "LaneExperts": _EXPERTS,
    "LaneNorm": _NORM,
}


def role_name(module: LaneModule) -> str:
    """The generated class that says what modules of a role do."""
    return f"Lane{module.role}"


def lane_class(module: LaneModule) -> str:
    """The name of the generated class of a module: LaneEntryLinear."""
    return _class_name(role_name(module), module.kind)


def _class_name(role: str, kind: str) -> str:
    return f"{'Lane' if role == 'LaneNorm' else role}{kind}"
