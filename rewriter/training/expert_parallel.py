"""Expert parallelism: the experts of a layer are sharded over the ranks of an axis "ep", and tokens travel to them.

Every rank computes its own rows, and holds all parameters except those of experts, of which it has E / ep. A layer of
experts sends each token to the ranks that hold the experts its router chose (dispatch), which compute as the source
does, and add nothing up: results go back (combine), where the router's weights are. Gradients travel the same ways
backward. An expert is held by as many ranks as the axis "dp" has, its replicas.

Where ranks are on several nodes the order of the two axes decides what crosses between them (DeepSpeed's communication
post, section 2): "E+D" has the experts of a layer on neighbours and replicas far apart, so that tokens stay in the
node and gradients of experts leave it; "D+E" has replicas on neighbours, so that gradients stay and tokens leave.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from rewriter.common.errors import RewriterError
from rewriter.runtime.attention.mesh import flattened
from rewriter.runtime.collectives.exchange import all_to_all_uneven_start, gather_start
from rewriter.training.zero.buckets import BUCKET_BYTES, Bucket, bucketed
from rewriter.training.zero.master_weights import clip

AXIS = "ep"
ORDERS = ("E+D", "D+E")


def expert_mesh(dp: int, ep: int, order: str = "D+E", device_type: str = "cuda") -> DeviceMesh:
    """A mesh ("dp", "ep") of all dp · ep ranks: replicas of an expert, and the ranks that experts are sharded over.

    order: "E+D", ranks that follow each other hold different experts; "D+E", they are replicas of the same ones.
    Every rank calls it.
    """
    if order not in ORDERS:
        raise RewriterError(f"expert_mesh: order {order!r}, expected one of {', '.join(ORDERS)}")
    if dp * ep != dist.get_world_size():
        raise RewriterError(f"expert_mesh: dp {dp} × ep {ep} = {dp * ep} ranks, but there are {dist.get_world_size()}")
    ranks = torch.arange(dp * ep)
    grid = ranks.view(dp, ep) if order == "E+D" else ranks.view(ep, dp).T.contiguous()
    return DeviceMesh(device_type, grid, mesh_dim_names=("dp", AXIS))


# --- a layer ---


class _TokenExchange(torch.autograd.Function):
    """Rows to the ranks of a group, and gradients of what arrived back."""

    @staticmethod
    def forward(
        ctx: Any, rows_ND: Tensor, sends: list[int], receives: list[int], group: ProcessGroup, name: str
    ) -> Tensor:
        ctx.args = receives, sends, group, f"{name} gradient"
        arrived: Tensor = all_to_all_uneven_start(rows_ND, sends, receives, group, name, AXIS).wait()
        return arrived

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_ND: Tensor) -> tuple[Tensor, None, None, None, None]:
        sends, receives, group, name = ctx.args
        arrived = all_to_all_uneven_start(gradient_ND, sends, receives, group, name, AXIS).wait()
        return arrived, None, None, None, None


class ParallelExperts(nn.Module):
    """Put by `shard_experts` before an experts class of transformers: its forward, for some of the experts."""

    num_experts: int  # of this rank: what the source's code counts
    all_experts: int
    ranks: ProcessGroup

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """x [N, D], index int64 [N, K], weight [N, K] → [N, D]: as the source, of all ranks' experts.

        Indices outside 0 … E − 1 add nothing. Ranks may have different N; all of them call it.
        """
        x_ND, per_token = hidden_states, top_k_index.shape[-1]
        chosen = top_k_index.reshape(-1)
        chosen = chosen.masked_fill((chosen < 0) | (chosen >= self.all_experts), self.all_experts)
        counts_E = torch.bincount(chosen, minlength=self.all_experts + 1)[: self.all_experts]
        arriving_PE = self._exchange_counts(counts_E)  # rows by the rank that sends them and by this rank's expert
        sends = counts_E.view(self.ranks.size(), -1).sum(1).tolist()
        receives = arriving_PE.sum(1).tolist()
        order = chosen.argsort(stable=True)[: sum(sends)]  # by expert, so by rank
        token = order // per_token

        rows = _TokenExchange.apply(x_ND[token], sends, receives, self.ranks, "experts dispatch")
        if len(rows):
            experts = torch.arange(self.num_experts, device=rows.device).repeat(len(receives))
            index = experts.repeat_interleave(arriving_PE.flatten(), output_size=len(rows))
            out = super().forward(rows, index[:, None], torch.ones_like(rows[:, :1], dtype=top_k_weights.dtype))
        else:  # backward has to pass here nevertheless, for other ranks wait, and give these experts zeros
            out = rows
            for parameter in self.parameters(recurse=False):
                out = out + parameter.reshape(-1)[:0].sum().to(rows.dtype)
        back = _TokenExchange.apply(out, receives, sends, self.ranks, "experts combine")

        weighted = back * top_k_weights.reshape(-1)[order][:, None]
        return torch.zeros_like(x_ND).index_add(0, token, weighted.to(x_ND.dtype))

    def _exchange_counts(self, counts_E: Tensor) -> Tensor:
        """int64 [E] of rows for each expert → int64 [ranks, E / ranks] of rows that come from each rank for each."""
        own_PE, each = counts_E.view(self.ranks.size(), -1), [1] * self.ranks.size()
        arriving_PE: Tensor = all_to_all_uneven_start(own_PE, each, each, self.ranks, "experts counts", AXIS).wait()
        return arriving_PE


@cache
def _parallel_class(source: type[nn.Module]) -> type[nn.Module]:
    return type(f"Parallel{source.__name__}", (ParallelExperts, source), {})


# --- a model ---


def shard_experts(model: nn.Module, mesh: DeviceMesh) -> ExpertParallel:
    """Shard the experts of every layer of `model`, a Hugging Face model, over the axis "ep" of `mesh`, in place.

        mesh = expert_mesh(dp=2, ep=4)
        parallel = shard_experts(model, mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        for ids in batches:  # other rows on every rank
            model(input_ids=ids, labels=ids).loss.backward()
            parallel.reduce_gradients()
            parallel.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()

    Any model whose experts transformers lets an experts function compute (its ExpertsInterface), emitted ones included,
    with any `experts_implementation`. Rank r of "ep" keeps experts r · E / ep to (r + 1) · E / ep. Call it with the
    same weights on all ranks, before the optimizer takes the parameters. From then on all ranks call the model and
    backward equally often. A router's auxiliary loss is that of each rank's own tokens.

    Raises RewriterError where the model has no such experts, or where their number is not divisible.
    """
    names = mesh.mesh_dim_names or ()
    if set(names) != {"dp", AXIS}:
        raise RewriterError(f"shard_experts: a mesh with dimensions {names}, expected ('dp', '{AXIS}'): expert_mesh")
    layers = {name: module for name, module in model.named_modules() if _is_experts(module)}
    if not layers:
        others = sorted({type(m).__name__ for m in model.modules() if "expert" in type(m).__name__.lower()})
        raise RewriterError(
            f"shard_experts: {type(model).__name__} has no experts of transformers' ExpertsInterface"
            + (f"; {', '.join(others)} compute on their own" if others else "")
            + ". Train it with data parallelism"
        )
    ranks, place = mesh[AXIS].size(), mesh.get_local_rank(AXIS)
    count: dict[str, int] = {}
    for name, module in layers.items():
        if isinstance(module, ParallelExperts):
            raise RewriterError(f"shard_experts: the experts of {name} are sharded already. Load the model again first")
        total = int(module.num_experts)
        if total % ranks:
            near = [n for n in range(1, total + 1) if total % n == 0]
            raise RewriterError(
                f"shard_experts: {name} has {total} experts, which do not divide by ep {ranks}. Possible: "
                f"{', '.join(map(str, near))}"
            )
        count |= {f"{name}.{key}": total // ranks for key in _stacked(name, module, total)}
    for name, module in layers.items():
        module.all_experts = int(module.num_experts)
        module.num_experts = module.all_experts // ranks
        module.ranks = mesh.get_group(AXIS)
        for key, parameter in list(module.named_parameters(recurse=False)):
            if (n := count.get(f"{name}.{key}")) is not None:
                own = parameter.detach()[place * n : (place + 1) * n].clone()
                setattr(module, key, nn.Parameter(own, requires_grad=parameter.requires_grad))
        source: Any = type(module)
        module.__class__ = _parallel_class(source)
    return ExpertParallel(model, mesh, count)


def _is_experts(module: nn.Module) -> bool:
    """True for a class whose forward looks an experts function up (transformers' `use_experts_implementation`)."""
    return hasattr(module, "is_transposed") and hasattr(module, "has_gate") and hasattr(module, "down_proj")


def _stacked(name: str, module: nn.Module, total: int) -> list[str]:
    """The parameters that hold one matrix or vector for each expert, by the interface's names."""
    keys = [f"{key}{end}" for key in ("gate_up_proj", "up_proj", "down_proj") for end in ("", "_bias")]
    stacked = {key: p for key, p in module.named_parameters(recurse=False) if key in keys}
    for key, parameter in stacked.items():
        if parameter.shape[0] != total:
            raise RewriterError(
                f"shard_experts: {name}.{key} has shape {list(parameter.shape)}, expected {total} experts first"
            )
    others = [key for key, _ in module.named_parameters(recurse=False) if key not in stacked]
    if others:
        raise RewriterError(
            f"shard_experts: {type(module).__name__} ({name}) also has {', '.join(others)}, of which it is not known "
            "whether experts share them"
        )
    return list(stacked)


@dataclass(eq=False)
class ExpertParallel:
    """A model whose experts are sharded over ranks: gradients, their norm, and full weights.

    experts: by name of a parameter, how many of its experts this rank holds.
    """

    model: nn.Module
    mesh: DeviceMesh
    experts: dict[str, int]

    def __post_init__(self) -> None:
        everyone = flattened(self.mesh, ["dp", AXIS], "dp_ep")
        self.everyone = None if everyone is None else everyone.get_group()
        self.replicas = self.mesh.get_group("dp")

    def _parameters(self, experts: bool) -> list[nn.Parameter]:
        named = self.model.named_parameters()
        return [p for name, p in named if p.requires_grad and (name in self.experts) == experts]

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Make `.grad` the gradient of the mean of all ranks' losses; once per step, after the last backward pass.

        Summed in fp32: those of experts over their replicas, as tokens of the other ranks have brought theirs already,
        all others over all ranks; both divided by the number of all ranks. A parameter that has no gradient on any
        rank gets none.
        """
        ranks = float(self.mesh.size())
        buckets = []
        for experts, group, name in (
            (True, self.replicas, "gradients of experts"),
            (False, self.everyone, "gradients"),
        ):
            parameters = self._parameters(experts)
            for indices in bucketed(parameters, BUCKET_BYTES):
                buckets.append(Bucket([parameters[i] for i in indices], group, name))
                for i, parameter in enumerate(buckets[-1].parameters):
                    if parameter.grad is not None:
                        buckets[-1].add(i, parameter.grad)
                buckets[-1].start()
        for bucket in buckets:
            for parameter, total in zip(bucket.parameters, bucket.finish(), strict=True):
                if total is not None:
                    if parameter.grad is None:
                        parameter.grad = torch.empty_like(parameter)
                    parameter.grad.copy_(total.div_(ranks).view_as(parameter))

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """After `reduce_gradients`: scale gradients so that the 2-norm of all of them, all ranks' experts' too, is at
        most `max_norm`; returns the norm."""
        own, shared = ([p.grad for p in self._parameters(which) if p.grad is not None] for which in (True, False))
        device = next(self.model.parameters()).device
        squares = sum((g.double().square().sum() for g in own), torch.zeros((), dtype=torch.float64, device=device))
        dist.all_reduce(squares, group=self.mesh.get_group(AXIS))
        squares += sum(g.double().square().sum() for g in shared)
        return clip([*own, *shared], squares, [], max_norm)

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Tensor]:
        """The model's state_dict with all experts, on the CPU of the mesh's first rank; empty on the others.

        As the source's: `model.save_pretrained(directory, state_dict=…)` writes it. All ranks call it. Gathered tensor
        by tensor, over one set of replicas.
        """
        first = self.mesh.get_local_rank("dp") == 0
        keep = first and self.mesh.get_local_rank(AXIS) == 0
        whole: dict[str, Tensor] = {}
        for name, value in self.model.state_dict().items():
            if name in self.experts and first:
                parts = gather_start([value.detach()], self.mesh.get_group(AXIS), "experts", AXIS).wait()
                value = torch.cat([part for (part,) in parts])
            if keep:
                whole[name] = value.detach().cpu()
        return whole
