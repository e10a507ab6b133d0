"""Calls of mixers with random inputs, and what they are in fp64: the state of each row and head alone, token by token,
from its first valid token on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from rewriter.runtime import StateSpec

BATCH, HEADS, GROUPS, KEY, VALUE, CHANNELS, STATE, TAPS = 3, 4, 2, 6, 5, 7, 3, 4
PADDING = torch.tensor([0, 5, 3])
# The dimension of tokens by argument; others have none.
TOKENS = {
    "causal_conv": (2, None, None),
    "delta_rule": (1, 1, 1, 1, 1),
    "state_space": (1, 1, None, 1, 1, None, None),
    "selective_scan": (2, 2, None, 2, 2, None, 2, None),
    "linear_scan": (1, 1),
}
SPECS = {
    "causal_conv": StateSpec((CHANNELS, TAPS - 1), False),
    "delta_rule": StateSpec((HEADS, KEY, VALUE), True),
    "state_space": StateSpec((HEADS, VALUE, STATE), True),
    "selective_scan": StateSpec((CHANNELS, STATE), True),
    "linear_scan": StateSpec((CHANNELS,), True),
}


@dataclass(frozen=True)
class Case:
    """A call of the mixer `name`; `absent` are places of tensors that are None, `decay` scales their decays."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    absent: tuple[int, ...] = ()
    key_channels: bool = False
    decay: float = 1.0

    def __str__(self) -> str:
        words = [self.name, *(f"{key}={value}" for key, value in self.options.items())]
        words += [f"without{i}" for i in self.absent] + ["channels"] * self.key_channels
        return "-".join(words)

    def inputs(self, length: int, batch: int = BATCH) -> list[torch.Tensor | None]:
        """In fp64."""
        generator = torch.Generator().manual_seed(length)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        def uniform(*shape: int) -> torch.Tensor:
            return torch.rand(shape, generator=generator, dtype=torch.float64)

        if self.name == "causal_conv":
            made = [normal(batch, CHANNELS, length), normal(CHANNELS, TAPS), normal(CHANNELS)]
        elif self.name == "delta_rule":
            g = uniform(batch, length, HEADS, *[KEY] * self.key_channels) * uniform(HEADS, *[1] * self.key_channels)
            made = [normal(batch, length, GROUPS, KEY) for _ in range(2)]
            if not self.options["l2norm"]:
                made = [0.4 * x for x in made]
            made += [normal(batch, length, HEADS, VALUE), -self.decay * g, uniform(batch, length, HEADS)]
        elif self.name == "state_space":
            made = [normal(batch, length, HEADS, VALUE), normal(batch, length, HEADS), -self.decay * uniform(HEADS)]
            made += [normal(batch, length, GROUPS, STATE) for _ in range(2)] + [normal(HEADS) for _ in range(2)]
            if not self.options["softplus"]:
                made[1] = made[1].abs()
        elif self.name == "selective_scan":
            made = [normal(batch, CHANNELS, length) for _ in range(2)] + [-self.decay * uniform(CHANNELS, STATE)]
            made += [normal(batch, STATE, length) for _ in range(2)]
            made += [normal(CHANNELS), normal(batch, CHANNELS, length), normal(CHANNELS)]
            if not self.options["softplus"]:
                made[1] = made[1].abs()
        else:
            made = [normal(batch, length, CHANNELS), -self.decay * uniform(batch, length, CHANNELS)]
        return [None if i in self.absent else x for i, x in enumerate(made)]

    def part(self, inputs: list[torch.Tensor | None], start: int, end: int) -> list[torch.Tensor | None]:
        """The inputs of some tokens."""
        return [
            x if x is None or at is None else x.narrow(at, start, end - start)
            for x, at in zip(inputs, TOKENS[self.name], strict=True)
        ]

    @property
    def at(self) -> int:
        """The dimension of tokens in what it returns."""
        return TOKENS[self.name][0]

    def expected(self, inputs: list[torch.Tensor | None], padding: torch.Tensor | None = None) -> torch.Tensor:
        """Its outputs in fp64, NaN at padding."""
        inputs = [None if x is None else x.double() for x in inputs]
        rows = []
        for row in range(inputs[0].shape[0]):
            first = 0 if padding is None else int(padding[row])
            own = [
                x if x is None or at is None else x[row].movedim(at - 1, 0)[first:]
                for x, at in zip(inputs, TOKENS[self.name], strict=True)
            ]
            out = torch.stack(_ROWS[self.name](*own, **self.options))
            rows.append(torch.cat([out.new_full((first, *out.shape[1:]), torch.nan), out]).movedim(0, self.at - 1))
        return torch.stack(rows)


ACTIVATIONS = {None: lambda x: x, "silu": lambda x: x / (1 + (-x).exp()), "tanh": torch.tanh}


def _conv_row(x, weight, bias, activation=None):
    out = []
    for t in range(len(x)):
        y = torch.zeros(CHANNELS, dtype=torch.float64) if bias is None else bias.clone()
        for back in range(min(TAPS, t + 1)):
            y += weight[:, TAPS - 1 - back] * x[t - back]
        out.append(ACTIVATIONS[activation](y))
    return out


def _delta_row(q, k, v, g, beta, l2norm, scale, delta=True):
    heads = []
    for head in range(HEADS):
        state, own, group = torch.zeros(KEY, VALUE, dtype=torch.float64), [], head // (HEADS // GROUPS)
        for t in range(len(q)):
            query, key = q[t, group], k[t, group]
            if l2norm:
                query, key = query / (query @ query + 1e-6) ** 0.5, key / (key @ key + 1e-6) ** 0.5
            state = torch.diag(g[t, head].exp().expand(KEY)) @ state
            read = state.T @ key if delta else 0
            state = state + torch.outer(key, beta[t, head] * (v[t, head] - read))
            own.append(state.T @ query * scale)
        heads.append(torch.stack(own))
    return list(torch.stack(heads, 1))


def _softplus(x):
    return (1 + x.exp()).log()


def _space_row(x, dt, A, B, C, D, bias, softplus, limit):
    heads = []
    for head in range(HEADS):
        state, own, group = torch.zeros(VALUE, STATE, dtype=torch.float64), [], head // (HEADS // GROUPS)
        for t in range(len(x)):
            step = dt[t, head] + (0 if bias is None else bias[head])
            step = (_softplus(step) if softplus else step).clamp(*limit)
            state = (step * A[head]).exp() * state + step * torch.outer(x[t, head], B[t, group])
            own.append(state @ C[t, group] + (0 if D is None else D[head] * x[t, head]))
        heads.append(torch.stack(own))
    return list(torch.stack(heads, 1))


def _selective_row(x, dt, A, B, C, D, z, bias, softplus):
    state, out = torch.zeros(CHANNELS, STATE, dtype=torch.float64), []
    for t in range(len(x)):
        step = dt[t] + (0 if bias is None else bias)
        step = _softplus(step) if softplus else step
        state = torch.stack([(step[c] * A[c]).exp() * state[c] + step[c] * x[t, c] * B[t] for c in range(CHANNELS)])
        y = state @ C[t] + (0 if D is None else D * x[t])
        out.append(y if z is None else y * ACTIVATIONS["silu"](z[t]))
    return out


def _linear_row(x, log_decay):
    state, out = torch.zeros(CHANNELS, dtype=torch.float64), []
    for t in range(len(x)):
        state = log_decay[t].exp() * state + x[t]
        out.append(state)
    return out


_ROWS = {
    "causal_conv": _conv_row,
    "delta_rule": _delta_row,
    "state_space": _space_row,
    "selective_scan": _selective_row,
    "linear_scan": _linear_row,
}

_ANY, _INFINITE = {"l2norm": True, "scale": 0.4}, (0.0, float("inf"))
CASES = [
    Case("causal_conv"),
    Case("causal_conv", {"activation": "silu"}),
    Case("causal_conv", {"activation": "tanh"}, absent=(2,)),
    Case("delta_rule", _ANY),
    Case("delta_rule", {**_ANY, "l2norm": False}),
    Case("delta_rule", {**_ANY, "delta": False}),
    Case("delta_rule", _ANY, key_channels=True),
    Case("delta_rule", {**_ANY, "l2norm": False, "delta": False}, key_channels=True),
    Case("state_space", {"softplus": True, "limit": _INFINITE}),
    Case("state_space", {"softplus": True, "limit": (0.3, 0.9)}, absent=(5,)),
    Case("state_space", {"softplus": False, "limit": _INFINITE}, absent=(5, 6)),
    Case("selective_scan", {"softplus": True}),
    Case("selective_scan", {"softplus": True}, absent=(5, 6)),
    Case("selective_scan", {"softplus": False}, absent=(6, 7)),
    Case("linear_scan"),
]
