"""Frozen weights kept quantized: the function, gradients and bytes of layers whose weight is a payload, alone, with
peft's adapters and under FSDP2."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import refusal, run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rewriter.common.errors import RewriterError
from rewriter.kernels import dequantize, parse_format, quantize
from rewriter.training import quantize_frozen, zero_plus_plus

WIDTH, DEPTH, SMALL = 128, 3, 4096


class Adapter(nn.Module):
    """A frozen linear layer with a low-rank update, as in LoRA."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base_layer = nn.Linear(width, width)
        self.base_layer.requires_grad_(False)
        self.down, self.up = nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.up(self.down(x))


class Stack(nn.Module):
    """Residual blocks of adapters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Adapter(WIDTH) for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        y = self.head(x)
        return y if labels is None else Output(F.cross_entropy(y, labels))


class Output:
    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


def rounded(model: nn.Module, format: str, names: list[str]) -> nn.Module:
    """A copy whose weights `names` are as they are read from payloads, each row quantized by itself."""
    made = copy.deepcopy(model)
    with torch.no_grad():
        for name in names:
            weight = made.get_parameter(name)
            for row in weight:
                row.copy_(dequantize(quantize(row, format), format, row.shape, row.dtype))
    return made


BASES = [f"layers.{i}.base_layer.weight" for i in range(DEPTH)]


def batch(rows: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, WIDTH, generator=generator), torch.randint(8, (rows,), generator=generator)


def gradients(model: nn.Module, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
    model(x, labels).loss.backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in found.items()}


# --- alone ---


@pytest.mark.parametrize("format", ["int8", "fp8@32", "int4-hadamard@32", "int3-hadamard@16"])
def test_a_frozen_layer_computes_with_the_dequantized_weight(format):
    model = Stack()
    model.layers[1].base_layer.bias.requires_grad_(True)  # as LoRA with bias: all
    expected = rounded(model, format, BASES)
    done = quantize_frozen(model, format, min_elements=SMALL)
    assert list(done.weights) == BASES
    assert done.before == DEPTH * WIDTH * WIDTH * 4
    assert done.after == DEPTH * WIDTH * parse_format(format).payload_bytes(WIDTH)
    assert done.after == sum(p.nbytes for p in model.parameters() if p.dtype == torch.uint8)
    x, labels = batch()
    first, second = (x.clone().requires_grad_() for _ in range(2))
    found, wanted = gradients(model, first, labels), gradients(expected, second, labels)
    assert torch.equal(first.grad, second.grad)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    for layer, name in zip(model.layers, BASES, strict=True):
        assert torch.equal(layer.base_layer.dequantized(), expected.get_parameter(name))


def test_backward_keeps_the_payload_and_not_the_weight():
    model = Stack()
    quantize_frozen(model, "int8", min_elements=SMALL)
    saved = []
    x, labels = batch()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        model(x.requires_grad_(), labels)
    assert not [t for t in saved if t.shape == (WIDTH, WIDTH)]
    payloads = {p.data_ptr() for p in model.parameters() if p.dtype == torch.uint8}
    assert {t.data_ptr() for t in saved if t.dtype == torch.uint8} == payloads


def test_autocast_and_half_precision_compute_as_a_linear_layer_does():
    model = Stack()
    expected = rounded(model, "int8", BASES)
    quantize_frozen(model, "int8", min_elements=SMALL)
    x, _ = batch()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(x), expected(x))
    model, expected = Stack().bfloat16(), Stack().bfloat16()
    quantize_frozen(model, "int8", min_elements=SMALL)
    again = model.layers[0].base_layer
    assert again.payload.dtype == torch.uint8
    assert torch.equal(model.to(torch.bfloat16)(x.bfloat16()), rounded(expected, "int8", BASES)(x.bfloat16()))


@pytest.mark.slow
def test_it_compiles_to_one_graph():
    model = Stack()
    quantize_frozen(model, "int4-hadamard", min_elements=SMALL)
    x, labels = batch()
    exact, compiled = (x.clone().requires_grad_() for _ in range(2))
    model(exact, labels).loss.backward()
    torch.compile(lambda given: model(given, labels).loss, fullgraph=True, backend="aot_eager")(compiled).backward()
    assert torch.equal(exact.grad, compiled.grad)


class Other(nn.Linear):
    """One that computes in a way of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_what_cannot_be_replaced_is_kept_and_named():
    model = Stack().requires_grad_(False)
    model.tied, model.embedding = nn.Linear(WIDTH, 64, bias=False), nn.Embedding(64, WIDTH)
    model.tied.weight = model.embedding.weight
    model.other, model.hooked = Other(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    model.hooked.register_forward_hook(lambda *_: None)
    model.shared = nn.ModuleList([model.layers[0].base_layer, model.layers[0].base_layer])
    model.requires_grad_(False)
    done = quantize_frozen(model, "int8", min_elements=SMALL)
    assert list(done.weights) == BASES
    assert model.shared[0] is model.shared[1] is model.layers[0].base_layer
    assert done.kept["tied.weight"] == "other modules share it"
    assert done.kept["other.weight"] == "a Other computes in a way of its own"
    assert done.kept["hooked.weight"] == "hooks of its layer would be lost"
    assert done.kept["head.weight"] == "1,024 elements are fewer than 4,096"
    assert torch.equal(model.tied.weight, model.embedding.weight)


@pytest.mark.parametrize(
    ("prepare", "format", "message"),
    [
        (lambda m: m, "int5", r"quantize_frozen: format 'int5': expected one of int8"),
        (lambda m: m.requires_grad_(True), "int8", r"Stack has no frozen weight .*requires_grad_\(False\)"),
        (nn.Identity, "int8", r"Identity has no frozen weight"),
    ],
)
def test_what_cannot_be_quantized_is_refused(prepare, format, message):
    with pytest.raises(RewriterError, match=message):
        quantize_frozen(prepare(Stack()), format, min_elements=SMALL)


def test_adapters_cannot_be_merged_into_a_copy_and_lost():
    model = Stack()
    quantize_frozen(model, "int8", min_elements=SMALL)
    with pytest.raises(RewriterError, match=r"keeps it as int8\. Read it with dequantized\(\)"):
        model.layers[0].base_layer.weight.data += 1
    assert not hasattr(model.layers[0].base_layer, "weight")


def test_pefts_adapters_train_on_a_quantized_base():
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=50, max_position_embeddings=32,
    )  # fmt: skip
    torch.manual_seed(0)
    lora = LoraConfig(target_modules=["q_proj", "down_proj"], r=4, init_lora_weights=False)
    model = get_peft_model(LlamaForCausalLM(config), lora)
    frozen = [n for n, m in model.named_modules() if type(m) is nn.Linear and not m.weight.requires_grad]
    expected = rounded(model, "int8@32", [f"{name}.weight" for name in frozen])
    done = quantize_frozen(model, "int8@32", min_elements=1024)
    assert set(done.weights) == {f"{name}.weight" for name in frozen}
    assert len(done.weights) == 2 * 7 + 1
    assert model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj.base_layer").format.bits == 8
    ids = torch.arange(24).view(2, 12)
    losses = []
    for trained in (model, expected):
        optimizer = torch.optim.AdamW([p for p in trained.parameters() if p.requires_grad], lr=1e-2)
        losses.append([])
        for _ in range(4):
            loss = trained(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(float(loss.detach()))
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]


# --- sharded ---


def own_rows(group: Any) -> tuple[Tensor, Tensor]:
    x, labels = batch()
    rows = slice(group.rank() * 3, group.rank() * 3 + 3)
    return x[rows], labels[rows]


def shards(format: str | None, policy: MixedPrecisionPolicy) -> nn.Module:
    model = Stack()
    if format is not None:
        quantize_frozen(model, format, min_elements=SMALL)
    for module in (*model.layers, model):
        fully_shard(module, mp_policy=policy)
    return model


def sharded(group: Any, format: str | None, policy: MixedPrecisionPolicy) -> dict[str, Any]:
    """Gradients of adapters on all ranks' rows together, and the bytes that a step gathers and a rank holds."""
    model, gathered = shards(format, policy), []
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    gather = getattr(dist, name)

    def counted(*arguments: Any, **options: Any) -> Any:
        tensors = [t for t in (*arguments, *options.values()) if isinstance(t, Tensor)]
        gathered.append(max(t.nbytes for t in tensors))
        return gather(*arguments, **options)

    setattr(dist, name, counted)
    found = gradients(model, *own_rows(group))
    setattr(dist, name, gather)
    held = sum(p.to_local().nbytes for p in model.parameters())
    refused = refusal(lambda: quantize_frozen(model, "int8", min_elements=SMALL))
    return {"gradients": found, "gathered": sum(gathered), "held": held, "refusal": refused}


def beside_zero_plus_plus(group: Any) -> dict[str, Any]:
    """Gradients that travel quantized beside a quantized base, and why its weights do not."""
    models = [shards("int8", MixedPrecisionPolicy()) for _ in range(2)]
    refused = refusal(lambda: zero_plus_plus(models[0], weights="int8", node=2))
    zero_plus_plus(models[1], gradients="int8", node=2)
    return {"gradients": gradients(models[1], *own_rows(group)), "refusal": refused}


def on_ranks(group: Any) -> dict[str, Any]:
    exact, mixed = MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    return {
        "plain": sharded(group, None, exact),
        "int8": sharded(group, "int8", exact),
        "int4": sharded(group, "int4@32", exact),
        "mixed": sharded(group, "int8", mixed),
        "plain mixed": sharded(group, None, mixed),
        "plus plus": beside_zero_plus_plus(group),
    }


TAKES_BYTES = tuple(int(n) for n in torch.__version__.split(".")[:2]) >= (2, 13)  # FSDP2 as a parameter


@pytest.fixture(scope="module")
def by_rank() -> list[dict[str, Any]]:
    if not TAKES_BYTES:
        pytest.skip("FSDP2 refuses parameters of integers")
    return run_ranks(on_ranks, 4)


@pytest.mark.parametrize(
    ("name", "format", "least", "limit"),
    [
        ("int8", "int8", 0, 1e-5),
        ("int4", "int4@32", 0, 1e-5),
        ("mixed", "int8", 0, 0.03),  # a policy that casts parameters must not cast a payload
        ("plus plus", "int8", 1e-9, 0.02),  # gradients travel quantized
    ],
)
def test_sharded_gradients_are_those_of_one_device(by_rank, name, format, least, limit):
    wanted = gradients(rounded(Stack(), format, BASES), *batch())
    for found in by_rank:
        assert found[name]["gradients"].keys() == wanted.keys()
        for parameter, gradient in wanted.items():
            error = (found[name]["gradients"][parameter] - gradient).norm() / gradient.norm()
            assert least <= error < limit, parameter


def test_a_step_gathers_and_a_rank_holds_bytes_of_payloads(by_rank):
    """Forward and backward gather each layer: the root stays, and 3 · 128 rows of 144 bytes stand for 512."""
    rows = DEPTH * WIDTH
    for found in by_rank:
        for name, size in (("int8", 144), ("int4", 80)):
            assert found["plain"]["gathered"] - found[name]["gathered"] == 2 * rows * (WIDTH * 4 - size)
            assert found["plain"]["held"] - found[name]["held"] == rows * (WIDTH * 4 - size) // 4
        assert found["plain mixed"]["gathered"] - found["mixed"]["gathered"] == 2 * rows * (WIDTH * 2 - 144)
        assert "layers.0.base_layer" in found["int8"]["refusal"]
        assert "before fully_shard" in found["int8"]["refusal"]


def test_weights_that_travel_quantized_already_are_refused_by_zero_plus_plus(by_rank):
    assert all("gathered as ['torch.float32', 'torch.uint8']" in rank["plus plus"]["refusal"] for rank in by_rank)
