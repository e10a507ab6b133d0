"""All ranks in one process: a Program is interpreted node by node with one tensor per rank, replicated values once.

The ranks of "tp" hold parts of heads and channels, those of "sp" parts of the tokens. A collective of "tp" works within
each coordinate of "sp"; tokens are sharded, attended and gathered across them. Attention over sharded tokens has its
meaning here, not its algorithm: queries, keys and values of all ranks are joined, attended exactly, and taken apart.
Where keys and values travel quantized, all ranks attend with the dequantized ones.

The result is one autograd graph, so its gradients are the oracle for the sharded module's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from rewriter.common.errors import RewriterError
from rewriter.ir import Body, Leaf, Module, Opaque, Parameter, Program, args_of, ops
from rewriter.ir.live_model import Host, load_host, opaque_modules
from rewriter.ir.marks import marks
from rewriter.ir.op_semantics import data_of, kind_of
from rewriter.ir.phases import REWIRED, has_both_phases, prompt_phase
from rewriter.ir.sequence_plan import join_tokens, take_tokens
from rewriter.kernels import dequantize_rows, parse_format, quantize_rows, slice_length


@dataclass(frozen=True)
class RankValues:
    """One value per rank of "tp", or one for all of them."""

    values: tuple[Any, ...]

    def __getitem__(self, rank: int) -> Any:
        return self.values[rank if len(self.values) > 1 else 0]

    @property
    def replicated(self) -> bool:
        return len(self.values) == 1


# One RankValues per coordinate of "sp", or one for all of them.
Shards = tuple[RankValues, ...]


def simulate(
    program: Program,
    input_ids: torch.Tensor,
    *,
    position_ids: torch.Tensor | None = None,
    weights: Mapping[str, torch.Tensor] | None = None,
    dtype: torch.dtype | None = None,
    host: nn.Module | None = None,
    rewired: torch.Tensor | None = None,
) -> torch.Tensor:
    """Logits [B, S, vocabulary] of `program` for `input_ids` [B, S] (int64), all ranks in this process, no cache.

    Where passes rewire the prompt alone, `program` is one of both wirings (`rewriter.both_wirings`) and `rewired`, bool
    [B, S], says which tokens are rewired; by default the rows are prompts without padding.

    `weights` are full (unsharded) tensors by runtime name; by default they are read from the program's checkpoint and
    cast to `dtype`. `host` is the live model whose own modules compute what the program holds as opaque; by default it
    is loaded from the checkpoint too. Raises RewriterError when the program has no weights, or no host where it needs
    one, or when ranks end with different logits.
    """
    if weights is None:
        weights = load_weights(program, dtype)
    if prompt_phase(program) is not None and not has_both_phases(program):
        raise RewriterError(
            f"{program!r}: its passes rewire {prompt_phase(program)}, and this is the wiring of rewired tokens alone. "
            "Simulate rewriter.both_wirings(program)"
        )
    given = {} if rewired is None else {REWIRED: rewired}
    out = Simulator(program, weights, host).run(input_ids, position_ids, given)
    if not out.replicated and not all(torch.equal(v, out[0]) for v in out.values):
        raise RewriterError("the ranks end with different logits: a reduction is missing")
    return out[0]


def _mask(program: Program, input_ids: torch.Tensor, rewired: torch.Tensor | None) -> torch.Tensor | None:
    """bool [B, S], the tokens that are rewired: those given, or those of prompts; None where all are computed alike."""
    phase = prompt_phase(program)
    if phase is None or not has_both_phases(program):
        if rewired is not None:
            raise RewriterError(f"{program!r} computes all tokens alike: leave out `rewired`")
        return None
    mask = phase.rewired(input_ids.shape[1]).to(input_ids.device) if rewired is None else rewired
    if mask.dtype != torch.bool or mask.shape not in (input_ids.shape, (1, input_ids.shape[1])):
        raise RewriterError(f"rewired: {mask.dtype} {list(mask.shape)}; expected bool {list(input_ids.shape)}")
    return mask.expand(input_ids.shape)


def load_weights(program: Program, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """Every parameter of `program` in full, by runtime name. Raises RewriterError when it was traced from a config, and
    for a parameter that is not finite."""
    from rewriter.weights import Checkpoint
    from rewriter.weights.finite import require_finite

    if program.source.path is None:
        raise RewriterError(
            "this program was traced from a config and has no weights: pass `weights=`, or trace a checkpoint"
        )
    checkpoint = Checkpoint.open(program.source.path)
    loaded = {}
    for name, parameter in program.parameters.items():
        if parameter.expression is None:
            raise RewriterError(f"{name} is not in the checkpoint")
        loaded[name] = checkpoint.evaluate(parameter.expression)
    require_finite(loaded.items(), program.source.path)
    return {name: t.to(dtype) if dtype and t.is_floating_point() else t for name, t in loaded.items()}


def _host(program: Program, weights: Mapping[str, torch.Tensor], model: nn.Module | None) -> Host | None:
    """The host of a program that has opaque modules: `model`, or the one in the program's checkpoint."""
    opaque = opaque_modules(program)
    if not opaque:
        return None
    if model is None and program.source.path is None:
        path, module = next(iter(opaque.items()))
        raise RewriterError(
            f"{path} is {module}. It has to be called in a live model: pass `host=`, or trace a checkpoint"
        )
    if model is None:
        dtype = next(t.dtype for t in weights.values() if t.is_floating_point())
        model = load_host(str(program.source.path), program.source.remote_code, dtype)
    return Host(program, model)


def whole_parameter(name: str, spec: Parameter, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The full tensor of a parameter; of one that a pass fused, from the weights of its parts where they are given."""
    if name in weights or not spec.parts:
        return weights[name]
    return torch.cat([weights[part] for part in spec.parts], spec.dim or 0)


class Simulator:
    """Interprets one program over `ranks` ranks per coordinate of the sequence axis."""

    def __init__(self, program: Program, weights: Mapping[str, torch.Tensor], host: nn.Module | None = None) -> None:
        self.program, self.weights = program, weights
        self.host = _host(program, weights, host)
        self.ranks, self.coordinates = program.mesh.get("tp", 1), program.mesh.get("sp", 1)
        self.length = 0
        self.rewired: torch.Tensor | None = None
        self.cache: dict[str, RankValues] = {}

    def run(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        given: Mapping[str, torch.Tensor] | None = None,
    ) -> RankValues:
        """Every rank's logits. `given` holds the values of further inputs that the wiring has, equal on all ranks.

        Which tokens are rewired need not be among them: rows are prompts by default.
        """
        if self.host is not None:
            self.host.run(input_ids, position_ids)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand(input_ids.shape)
        inputs = {"input_ids": input_ids, "position_ids": position_ids, "ctx": None, **(given or {})}
        self.rewired = inputs[REWIRED] = _mask(self.program, input_ids, inputs.get(REWIRED))
        self.device, self.length = input_ids.device, input_ids.shape[1]
        placeholders = [str(n.target) for n in self.program.graph.nodes if n.op == "placeholder"]
        given_to_all: list[Shards] = [(RankValues((inputs[p],)),) for p in placeholders]
        out = self._graph(self.program.graph, given_to_all, "", None)
        return out[0] if len(out) == 1 else RankValues(tuple(value for ranks in out for value in ranks.values))

    def parameter(self, name: str) -> RankValues:
        """A parameter's values by rank; sharded ones are cut from the full tensor, differentiably."""
        name = self.program.ties.get(name, name)
        if name not in self.cache:
            spec = self.program.parameters[name]
            full = whole_parameter(name, spec, self.weights)
            if spec.ranges is None:
                self.cache[name] = RankValues((full,))
            else:
                dim = spec.dim or 0
                pieces = ([full.narrow(dim, a, b - a) for a, b in ranges] for ranges in spec.ranges)
                self.cache[name] = RankValues(tuple(p[0] if len(p) == 1 else torch.cat(p, dim) for p in pieces))
        return self.cache[name]

    def _graph(self, graph: fx.Graph, inputs: Sequence[Shards], prefix: str, body: Body | None) -> Shards:
        env: dict[fx.Node, Shards] = {}
        remaining = iter(inputs)
        for node in graph.nodes:
            if node.op == "placeholder":
                env[node] = next(remaining)
            elif node.op == "get_attr":
                env[node] = (self._attribute(str(node.target), prefix, body),)
            elif node.op == "call_module":
                module = body.modules[str(node.target)] if body else self.program.modules[str(node.target)]
                env[node] = self._module(module, prefix + str(node.target), [env[a] for a in node.args])
            elif node.op == "output":
                result = args_of(node)[0]
                if isinstance(result, fx.Node):
                    return env[result]
                return self._shards(
                    lambda *results: self._each(lambda *xs: tuple(xs), results), [env[n] for n in result]
                )
            elif node.target is ops.shard_tokens:
                value = env[args_of(node)[0]]
                if len(value) > 1:
                    raise RewriterError(f"{node.name}: the tokens are sharded already")
                env[node] = self._split(node, args_of(node)[2], value[0], 1)
            elif node.target is ops.gather_tokens:
                env[node] = (self._gather_tokens(node, env[args_of(node)[0]], 1, args_of(node)[2]),)
            elif node.target is ops.attention and node.kwargs.get("sequence") is not None:
                env[node] = self._attention(node, env)
            elif marks(node).alike and all(x.replicated for n in args_of(node)[0].all_input_nodes for x in env[n]):
                env[node] = tuple(RankValues((value[0][args_of(node)[1]],)) for value in env[args_of(node)[0]])
            else:
                sources = node.all_input_nodes
                env[node] = self._shards(
                    lambda *results, node=node, sources=sources: self._operation(
                        node, dict(zip(sources, results, strict=True))
                    ),
                    [env[n] for n in sources],
                )
            self.note(prefix, node, env[node])
        raise RewriterError("a graph without output")

    def note(self, prefix: str, node: fx.Node, value: Shards) -> None:
        """Called with every value as it is computed; `prefix` is the path of the body that it stands in, with a dot."""

    def _attribute(self, name: str, prefix: str, body: Body | None) -> RankValues:
        if body is not None and name in body.buffers:
            return RankValues((body.buffers[name].to(self.device),))
        return self.parameter(prefix + name)

    def _shards(self, function: Callable[..., RankValues], inputs: Sequence[Shards]) -> Shards:
        """Apply `function` once when every input is the same for all tokens' ranks, else once per coordinate."""
        if all(len(x) == 1 for x in inputs):
            return (function(*[x[0] for x in inputs]),)
        return tuple(function(*[x[i if len(x) > 1 else 0] for x in inputs]) for i in range(self.coordinates))

    def _split(self, node: fx.Node, plan: ops.SequencePlan, values: RankValues, dim: int) -> Shards:
        """Each coordinate's tokens of `values`."""
        if plan.ranks != self.coordinates:
            raise RewriterError(f"{node.name}: {plan} is for {plan.ranks} ranks, the mesh has {self.coordinates}")
        return tuple(
            RankValues(tuple(take_tokens(x, dim, plan.layout, i, plan.ranks) for x in values.values))
            for i in range(self.coordinates)
        )

    def _gather_tokens(self, node: fx.Node, value: Shards, dim: int, plan: ops.SequencePlan) -> RankValues:
        if len(value) == 1:
            raise RewriterError(f"{node.name}: every rank has all tokens, and gathering would repeat them")
        ranks = range(max(len(v.values) for v in value))
        return RankValues(tuple(join_tokens([v[r] for v in value], dim, plan.layout, self.length) for r in ranks))

    def _attention(self, node: fx.Node, env: Mapping[fx.Node, Shards]) -> Shards:
        plan: Any = node.kwargs["sequence"]
        tokens = args_of(node)[:3]
        whole = {n: self._gather_tokens(node, env[n], 2, plan) for n in tokens}
        _, k, v = tokens
        of_a_token = (whole[k][0].nbytes + whole[v][0].nbytes) // self.length
        if plan.quantized is not None and plan.local_tokens(self.length) * of_a_token >= plan.min_bytes:
            for n in (k, v):
                whole[n] = RankValues(tuple(arrived(x, plan.quantized) for x in whole[n].values))
        others = {n: env[n][0] for n in node.all_input_nodes if n not in whole}
        out = self._operation(node, {**whole, **others})
        return self._split(node, plan, out, 2)

    def _each(self, function: Callable[..., Any], inputs: Sequence[RankValues]) -> RankValues:
        """Apply `function` once when every input is replicated, else once per rank."""
        if all(x.replicated for x in inputs):
            return RankValues((function(*[x[0] for x in inputs]),))
        return RankValues(tuple(function(*[x[r] for x in inputs]) for r in range(self.ranks)))

    def _module(self, module: Module, path: str, inputs: list[Shards]) -> Shards:
        if isinstance(module, Body):
            return self._graph(module.graph, inputs, path + ".", module)
        return self._shards(lambda *values: self._leaf(module, path, list(values)), inputs)

    def _leaf(self, module: Leaf | Opaque, path: str, inputs: list[RankValues]) -> RankValues:
        parameters = {name: self.parameter(f"{path}.{name}") for name in module.parameters}
        if isinstance(module, Opaque):
            host, own = self.host, {name: tensor[0] for name, tensor in parameters.items()}
            assert host is not None
            return self._each(lambda *xs: host.call(path, module, list(xs), own), inputs)
        if module.kind == "VocabParallelEmbedding":
            return self._vocabulary(inputs[0], parameters["weight"], module.options.get("padding_idx", -1))
        names = list(parameters)
        result = self._each(
            lambda x, *tensors: run_leaf(module, x, dict(zip(names, tensors, strict=True))),
            [inputs[0], *parameters.values()],
        )
        if module.kind.startswith("RowParallel") and "bias" in parameters:
            bias = parameters["bias"][0]
            if module.options.get("bias_share"):
                result = RankValues(tuple(value + bias / self.ranks for value in result.values))
            else:  # added once, by one rank
                result = RankValues((result[0] + bias, *result.values[1:]))
        return result

    def _vocabulary(self, ids: RankValues, weight: RankValues, padding_idx: int = -1) -> RankValues:
        outs = []
        for rank in range(self.ranks):
            rows = weight[rank].shape[0]
            local = ids[rank] - rank * rows
            inside = (local >= 0) & (local < rows)
            rows_of_rank = F.embedding(local.clamp(0, rows - 1), weight[rank]) * inside[..., None]
            outs.append(torch.where((ids[rank] == padding_idx)[..., None], rows_of_rank.detach(), rows_of_rank))
        return RankValues(tuple(outs))

    def _operation(self, node: fx.Node, env: Mapping[fx.Node, RankValues]) -> RankValues:
        target, nodes = node.target, node.all_input_nodes
        if target in (ops.all_reduce, ops.all_reduce_start):
            value = env[args_of(node)[0]]
            if value.replicated:
                raise RewriterError(f"{node.name}: all-reduce of a value that every rank already has would multiply it")
            options: dict[str, Any] = dict(node.kwargs)
            parts = value.values
            return RankValues((quantized_sum(parts, **options) if options else sum(parts[1:], parts[0]),))
        if target is ops.copy_to_group and not env[args_of(node)[0]].replicated:
            raise RewriterError(f"{node.name}: ranks do not share the value that enters here: a reduction is missing")
        if target is ops.agreed and not env[args_of(node)[0]].replicated:
            return self._agreed(node, env[args_of(node)[0]])
        if target is ops.all_gather:
            return RankValues((torch.cat(env[args_of(node)[0]].values, dim=args_of(node)[2]),))
        if target is ops.own_shard:
            value, dim = env[args_of(node)[0]], args_of(node)[2]
            local = value[0].shape[dim] // self.ranks
            return RankValues(tuple(value[r].narrow(dim, r * local, local) for r in range(self.ranks)))
        if target is ops.own_ranges:
            value, dim, ranges = env[args_of(node)[0]], args_of(node)[2], args_of(node)[3]
            own = ([value[r].narrow(dim, a, b - a) for a, b in runs] for r, runs in enumerate(ranges))
            return RankValues(tuple(torch.cat(runs, dim) for runs in own))
        if target is ops.vocab_embedding:
            ids, weight, _, *padding = args_of(node)
            return self._vocabulary(env[ids], env[weight], *padding)

        def apply(*values: Any) -> Any:
            given = dict(zip(nodes, values, strict=True))
            args = fx.map_arg(node.args, given.__getitem__)
            kwargs = dict(fx.map_arg(node.kwargs, given.__getitem__))
            if kwargs.get("device") == "like":
                kwargs["device"] = self.device
            if node.op == "call_method":
                return getattr(args[0], str(target))(*args[1:], **kwargs)
            return target(*args, **kwargs)  # type: ignore[operator]

        # what lends a dtype alone may be a parameter of which ranks hold parts
        lent = kind_of(node) == "cast"
        return self._each(
            apply, [RankValues((env[n][0],)) if lent and n not in data_of(node) else env[n] for n in nodes]
        )

    def _agreed(self, node: fx.Node, value: RankValues) -> RankValues:
        """Rank 0's of values that differ at most at rewired tokens, whose values are not read."""
        exact = slice(0, 0) if self.rewired is None else ~self.rewired
        if self.rewired is None or not all(torch.equal(x[exact], value[0][exact]) for x in value.values):
            raise RewriterError(f"{node.name}: ranks hold different values where they have to agree")
        return RankValues((value[0],))


def run_leaf(leaf: Leaf, x: torch.Tensor, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Result of a leaf from its input and its own (local) parameters; row-parallel ones leave out the bias."""
    if leaf.kind == "Dropout":
        return x  # the trace is in eval mode
    weight, bias = parameters["weight"], parameters.get("bias")
    if leaf.kind.startswith("RowParallel"):
        bias = None
    if leaf.kind.endswith("Linear"):
        return F.linear(x, weight, bias)
    if leaf.kind.endswith("Conv1D"):
        out = x @ weight
        return out if bias is None else out + bias
    if leaf.kind in ("Embedding", "OffloadedEmbedding"):
        return F.embedding(x, weight, leaf.options.get("padding_idx"))
    if leaf.kind == "LayerNorm":
        return F.layer_norm(x, (leaf.options["normalized_shape"],), weight, bias, leaf.options["eps"])
    raise RewriterError(f"no meaning for a module of kind {leaf.kind}")


def quantized_sum(parts: Sequence[torch.Tensor], format: str, min_bytes: int = 0) -> torch.Tensor:
    """Result of the all-reduce of `parts`, one tensor a rank; see `rewriter.ir.ops.all_reduce`.

    The gradient of every part is the result's, as it is of an exact sum. Parts in fp64 travel as fp32.
    """
    if parts[0].nbytes < min_bytes:
        return sum(parts[1:], parts[0])
    result: torch.Tensor = _SameGradient.apply(_reduced(parts, format), *parts)
    return result


def arrived(x: torch.Tensor, format: str) -> torch.Tensor:
    """`x` [..., n] as all ranks have it where each vector of n elements travels by itself.

    The gradient of x is that of the result. x in fp64 travels as fp32.
    """
    rows_RN = _wire(x).reshape(-1, x.shape[-1])
    result: torch.Tensor = _SameGradient.apply(_sent(rows_RN, format, rows_RN.dtype).view(x.shape).to(x.dtype), x)
    return result


class _SameGradient(torch.autograd.Function):
    """`value`, whose gradient each of `parts` has."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, *parts: torch.Tensor) -> torch.Tensor:
        ctx.parts = len(parts)
        return value

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *(gradient,) * ctx.parts


@torch.no_grad()
def _reduced(parts: Sequence[torch.Tensor], name: str) -> torch.Tensor:
    format, ranks, like = parse_format(name), len(parts), parts[0]
    length = slice_length(like.numel(), ranks, format)
    padding = (0, ranks * length - like.numel())
    slices_PRN = [F.pad(_wire(part).reshape(-1), padding).view(ranks, length) for part in parts]
    arrived_PRN = [_sent(rows, name, torch.float32) for rows in slices_PRN]
    total_RN = torch.zeros(ranks, length, device=like.device)
    for owner in range(ranks):
        for sender in range(ranks):
            if sender != owner:
                total_RN[owner] += arrived_PRN[sender][owner]
        total_RN[owner] += slices_PRN[owner][owner].float()
    result = _sent(total_RN, name, slices_PRN[0].dtype)
    return result.reshape(-1)[: like.numel()].view(like.shape).to(like.dtype)


@torch.no_grad()
def _sent(rows_RN: torch.Tensor, format: str, dtype: torch.dtype) -> torch.Tensor:
    return dequantize_rows(quantize_rows(rows_RN, format), format, rows_RN.shape[1], dtype)


def _wire(x: torch.Tensor) -> torch.Tensor:
    return x.detach().float() if x.dtype == torch.float64 else x.detach()
