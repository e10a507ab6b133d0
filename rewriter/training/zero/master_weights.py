"""The base of optimizers of fp32 master weights, for ranks that step only their part of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler, OptState
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from rewriter.common.errors import RewriterError

Parameters = Iterable[nn.Parameter] | Iterable[dict[str, Any]]
MakeOptimizer = Callable[[list[dict[str, Any]]], Optimizer]
"""Called with groups of parameters, as torch.optim's classes take them."""


def groups_of_parameters(
    caller: str, model: nn.Module, params: Parameters | None, faults: Callable[[nn.Parameter], dict[str, bool]]
) -> list[dict[str, Any]]:
    """Groups as torch.optim's classes take them: of `params`, by default all of `model` that require a gradient.

    Raises RewriterError for none, for a parameter that comes twice, and for one of which one of the `faults` is true.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    wanted: list[Any] = trained if params is None else list(params)
    if not trained or not wanted:
        raise RewriterError(
            f"{caller}: no parameter of {type(model).__name__.removeprefix('FSDP')} requires a gradient. Set "
            "requires_grad_(True) on what is trained"
        )
    given = wanted if isinstance(wanted[0], dict) else [{"params": wanted}]
    groups = [{**group, "params": list(group["params"])} for group in given]
    names = {parameter: name for name, parameter in model.named_parameters()}
    seen: set[nn.Parameter] = set()
    for parameter in (parameter for group in groups for parameter in group["params"]):
        checks = {
            "is not the model's": parameter not in names,
            "does not require a gradient": not parameter.requires_grad,
            "comes twice": parameter in seen,
            **faults(parameter),
        }
        for fault in (fault for fault, there in checks.items() if there):
            name = names.get(parameter, f"of shape {list(parameter.shape)}")
            raise RewriterError(
                f"{caller}: parameter {name} {fault}. Pass parameters of the model that are trained, each once"
            )
        seen.add(parameter)
    return groups


def groups_of_masters(
    groups: Sequence[dict[str, Any]], masters: Callable[[nn.Parameter], Sequence[nn.Parameter]]
) -> list[dict[str, Any]]:
    """`groups` with this rank's master weights of each parameter in its place."""
    return [{**group, "params": [m for parameter in group["params"] for m in masters(parameter)]} for group in groups]


class MasterWeightOptimizer(Optimizer):
    """Shows `param_groups` and `state` of an optimizer of master weights (`inner`).

    A subclass makes the master weights, and gives the tensors that hold them (`master_weights`), the groups of ranks
    that together step the model (`rank_groups`), this rank's place among them (`place`), and what is done around a
    step.
    """

    name: str  # of the function that errors name
    place_words: str  # names of the numbers of `place`

    def __init__(self, inner: Optimizer) -> None:
        self.inner, self._complete = inner, False
        super().__init__(inner.param_groups, inner.defaults)
        self._adopt()
        self._complete = True

    def _adopt(self) -> None:
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    # --- for a subclass to give ---

    def rank_groups(self) -> list[ProcessGroup]:
        """Groups whose ranks together step all parameters."""
        raise NotImplementedError

    def owned(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Parameters with the master weights that this rank steps of them."""
        raise NotImplementedError

    def master_weights(self) -> list[Tensor]:
        """The fp32 tensors that a checkpoint of this rank holds."""
        raise NotImplementedError

    def place(self) -> Sequence[int]:
        """The shape of the ranks, and this rank's position among them: equal when state is saved and loaded."""
        raise NotImplementedError

    def complete(self) -> None:
        """Complete the gradients of the master weights."""

    def before_step(self) -> None:
        """Complete the gradients, and refuse what cannot be stepped."""
        self.complete()

    def after_step(self) -> None:
        """Give all ranks the stepped parameters."""
        raise NotImplementedError

    # --- an Optimizer ---

    _step_supports_amp_scaling = True  # GradScaler calls `step` on all ranks, overflow or not

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, grad_scaler: GradScaler | None = None) -> Any:
        """Step this rank's master weights, then update the parameters of all ranks. All ranks call it.

        `GradScaler.step` passes itself, with a warning that it may cease to; no rank steps where one has an overflow.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if hasattr(self, "found_inf"):
            raise RewriterError(
                f"{self.name}: this version of torch tells optimizers of this rank's overflow only. Train in "
                "bfloat16, without GradScaler"
            )
        self.before_step()
        if grad_scaler is not None and overflowed(grad_scaler, self, self.rank_groups()):
            return None
        self.inner.step()
        self.after_step()
        return loss

    @torch.no_grad()
    def clip_grad_norm_(
        self,
        max_norm: float,
        *,
        within: ProcessGroup | None = None,
        share: Callable[[nn.Parameter], float] = lambda parameter: 1.0,
    ) -> Tensor:
        """Scale gradients so that the 2-norm of all of them, over all ranks, is at most `max_norm`; returns the norm.

        torch.nn.utils.clip_grad_norm_ would see this rank's part only. `within`: ranks that hold other parameters of
        the same model, tensor-parallel ones; `share` then says which part of a parameter's squares is to be counted
        here, 1 / ranks for one that they all hold. All ranks call it. max_norm infinite: the norm alone.
        """
        self.complete()
        like = self.followed[0]
        squares = torch.zeros((), dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
        gradients = [(p, master.grad) for p, master in self.owned() if master.grad is not None]
        for parameter, gradient in gradients:
            squares += torch.linalg.vector_norm(gradient).square() * share(parameter)
        groups = self.rank_groups() if within is None else [*self.rank_groups(), within]
        return clip([gradient for _, gradient in gradients], squares, groups, max_norm)

    def state_dict(self) -> dict[str, Any]:
        """This rank's state of the optimizer, and "master_weights". Each rank saves and loads its own, on as many
        ranks in the same layout; the model's own state_dict holds the parameters, and is loaded first."""
        return {
            **self.inner.state_dict(),
            "master_weights": [master.clone() for master in self.master_weights()],
            "place": self.place(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises RewriterError for the state of another rank, or of ranks in another layout."""
        if state_dict.get("place") != self.place():
            raise RewriterError(
                f"{self.name}: state of {state_dict.get('place')}, expected {self.place()} ({self.place_words}). Load "
                "what this rank has saved, on as many ranks"
            )
        self.inner.load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        self._adopt()
        with torch.no_grad():
            for master, saved in zip(self.master_weights(), state_dict["master_weights"], strict=True):
                master.copy_(saved)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._complete:
            raise RewriterError(f"{self.name}: parameter groups are given once. Pass them all as params=")
        super().add_param_group(param_group)

    def follow(self, model: nn.Module, parameters: Sequence[nn.Parameter], loaded: Callable[[int], None]) -> None:
        """`model.zero_grad` clears master weights too; `loaded` gets the index of each parameter that was loaded, even
        if into a part of the model."""
        self.followed = parameters
        places = {id(p): i for i, p in enumerate(parameters)}
        for module in model.modules():
            own = [places[id(p)] for p in module._parameters.values() if id(p) in places]
            if own:
                module.register_load_state_dict_post_hook(partial(_each, loaded, own))
        zero_grad = model.zero_grad

        def zero_both(set_to_none: bool = True) -> None:
            zero_grad(set_to_none)
            self.zero_grad(set_to_none)

        model.zero_grad = zero_both  # type: ignore[method-assign]


def _each(loaded: Callable[[int], None], own: list[int], module: nn.Module, keys: Any) -> None:
    for index in own:
        loaded(index)


def clip(gradients: Sequence[Tensor], squares: Tensor, groups: Sequence[ProcessGroup], max_norm: float) -> Tensor:
    """Scale `gradients` so that the root of the sum of `squares` over all `groups` is at most `max_norm`: that root."""
    for group in groups:
        dist.all_reduce(squares, group=group)
    norm = squares.sqrt()
    if gradients:
        torch._foreach_mul_(list(gradients), (max_norm / (norm + 1e-6)).clamp(max=1.0).to(gradients[0].dtype))
    return norm


def refuse_differing(values: Tensor, names: Sequence[str], groups: Sequence[ProcessGroup], error: str) -> None:
    """Raises RewriterError on all ranks of `groups` where those of the first hold different `values`, int64 [names].

    error: its text, in which {names} and {count} stand for what differs.
    """
    bounds = torch.stack([values, -values])
    dist.all_reduce(bounds, dist.ReduceOp.MAX, group=groups[0])
    differ = (bounds[0] != -bounds[1]).long()
    for group in groups[1:]:
        dist.all_reduce(differ, dist.ReduceOp.MAX, group=group)
    wrong = [name for name, flag in zip(names, differ.tolist(), strict=True) if flag]
    if wrong:
        raise RewriterError(error.format(names=", ".join(wrong[:3]), count=f"{len(wrong)} of {len(names)}"))


def overflowed(scaler: GradScaler, optimizer: Optimizer, groups: Sequence[ProcessGroup]) -> bool:
    """Unscale the gradients unless that is done, and say whether any rank of `groups` has found inf or NaN in its own.

    Each rank has gradients of its own elements, and a plain GradScaler looks at no others': the rank of an element that
    overflowed would skip a step that the others wait for. `update` reads the flags of the scaler, which are private to
    torch. All ranks call it.
    """
    state = scaler._per_optimizer_states[id(optimizer)]
    if state["stage"] is OptState.READY:
        scaler.unscale_(optimizer)
    scale = scaler._scale
    assert scale is not None
    flags: dict[torch.device, Tensor] = state["found_inf_per_device"]
    if not flags:  # this rank has no gradients
        flags[scale.device] = torch.zeros((), device=scale.device)
    most = torch.stack([flag.reshape(()).to(scale.device) for flag in flags.values()]).amax()
    for group in groups:
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    for flag in flags.values():
        flag.fill_(most)
    return bool(most)
