"""Tiny checkpoints in the formats of quantization tools, packed here by their documented layouts.

Rounding is crude, since only the layout matters. Every maker returns the weights that the checkpoint stands for, made
from the codes before they were packed, so that no dequantization of rewriter's is needed to know them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import zoo
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

Tensors = dict[str, torch.Tensor]
Pack = Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]]
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def write(directory: Path, family: str, pack: Pack, said: Mapping[str, Any], **beside: Any) -> Tensors:
    """Write `family` with every linear weight of its layers packed; returns what it stands for: fp32, and as `quantize`
    stores it what is not quantized."""
    source = zoo.config(family)
    if family == "gpt_oss":
        source.intermediate_size = 64  # whole groups of 32
    if family == "deepseek_v3":  # blocks of 16 divide neither 24 rows of keys and values nor experts of 24 channels
        source.first_k_dense_replace, source.moe_intermediate_size, source.n_shared_experts = 1, 24, 1
        source.n_routed_experts, source.num_experts_per_tok, source.n_group, source.topk_group = 8, 2, 2, 1
    model = AutoModelForCausalLM.from_config(source, dtype=torch.float32)
    zoo.randomize(model, seed=0)
    draw_routing(model)
    model.save_pretrained(directory)
    return quantize(directory, pack, said, **beside)


@torch.no_grad()
def draw_routing(model: torch.nn.Module) -> None:
    """Biases of DeepSeek-V3's routing as trained ones are: far from zero, and as near each other as the scores."""
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(8 + 0.02 * torch.randn(buffer.shape, generator=torch.Generator().manual_seed(len(name))))
            model.get_parameter(name.replace("e_score_correction_bias", "weight")).mul_(0.02)


def quantize(
    directory: Path, pack: Pack, said: Mapping[str, Any], dtype: str = "float32", named: bool = True, plain: str = ""
) -> Tensors:
    """The same of a checkpoint of one file that is there, in its place. What is not quantized is stored in `dtype`,
    which config.json names or not (`named`); tensors whose names end in `plain` are not quantized either."""
    file = directory / "model.safetensors"
    stored: Tensors = {}
    meant: Tensors = {}
    for name, tensor in load_file(file).items():
        linear = tensor.dim() > 1 and "layers." in name and "proj" in name and "bias" not in name
        parts, meant[name] = {name: tensor}, tensor
        if linear and not (plain and name.endswith(plain)):
            parts, meant[name] = pack(name, tensor)
        if set(parts) == {name} and parts[name] is tensor and not name.endswith("e_score_correction_bias"):
            parts[name] = meant[name] = tensor.to(getattr(torch, dtype))
        stored |= {part: value.contiguous() for part, value in parts.items()}
    save_file(stored, file, {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config |= {"quantization_config": dict(said), "dtype": dtype}
    if not named:
        del config["dtype"]
    (directory / "config.json").write_text(json.dumps(config))
    return meant


def fp8_codes(
    weight: torch.Tensor, rows: int, columns: int, scaled: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes, scales of blocks of rows × columns, what they stand for)."""
    high, wide = -(-weight.shape[0] // rows), -(-weight.shape[1] // columns)
    scales = torch.empty(high, wide)
    exponents = scaled in (torch.uint8, torch.float8_e8m0fnu)
    codes, meant = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
    for i in range(high):
        for j in range(wide):
            block = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            scale = weight[block].abs().max() / 400  # so that a rounded scale saturates nothing
            scales[i, j] = scale.log2().ceil().exp2() if exponents else scale.to(scaled)
            codes[block] = (weight[block] / scales[i, j]).to(torch.float8_e4m3fn)
            meant[block] = codes[block].float() * scales[i, j]
    return codes, (scales.log2() + 127).to(scaled) if scaled == torch.uint8 else scales.to(scaled), meant


def fp8_blocks(rows: int, columns: int, scaled: torch.dtype = torch.float32) -> tuple[Pack, dict[str, Any]]:
    """transformers' finegrained fp8: weight and weight_scale_inv, in the dtype `scaled`; uint8 holds exponents."""

    def pack(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        codes, scales, meant = fp8_codes(weight, rows, columns, scaled)
        return {name: codes, f"{name}_scale_inv": scales}, meant

    return pack, {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [rows, columns]}


def autofp8() -> tuple[Pack, dict[str, Any]]:
    """AutoFP8: weight, weight_scale and input_scale, one number each."""

    def pack(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        codes, scales, meant = fp8_codes(weight, *weight.shape)
        return {
            name: codes,
            f"{name}_scale": scales[0, 0],
            name.replace("weight", "input_scale"): torch.ones(()),
        }, meant

    return pack, {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}


def compressed_fp8(strategy: str) -> tuple[Pack, dict[str, Any]]:
    """compressed-tensors, float-quantized: weight and weight_scale, [1] per tensor or [outputs, 1] per channel."""

    def pack(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        codes, scales, meant = fp8_codes(weight, 1 if strategy == "channel" else weight.shape[0], weight.shape[1])
        return {name: codes, f"{name}_scale": scales if strategy == "channel" else scales.flatten()}, meant

    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    said = {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"]}
    return pack, said | {"quantization_status": "compressed", "config_groups": {"group_0": group}}


def awq(group: int) -> tuple[Pack, dict[str, Any]]:
    """AutoAWQ, gemm: int32 words of eight outputs, in the order 0 2 4 6 1 3 5 7 from the lowest bits."""
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def words(codes: torch.Tensor) -> torch.Tensor:
        packed = torch.zeros(codes.shape[0], codes.shape[1] // 8, dtype=torch.int64)
        for place, column in enumerate(order):
            packed |= codes[:, column::8].long() << 4 * place
        return packed.to(torch.int32)

    def pack(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        codes, zeros, scales, meant = _asymmetric(weight, group)
        stem = name.removesuffix("weight")
        return {f"{stem}qweight": words(codes), f"{stem}qzeros": words(zeros), f"{stem}scales": scales}, meant

    said = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return pack, said


def gptq(group: int, form: str = "gptq", act_order: bool = False) -> tuple[Pack, dict[str, Any]]:
    """AutoGPTQ: int32 words of eight inputs (weights) or outputs (zeros, less one in format "gptq")."""

    def pack(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        codes, zeros, scales, meant = _asymmetric(weight, group)
        inputs = codes.shape[0]
        groups = torch.arange(inputs, dtype=torch.int32) // group
        if act_order:
            places = torch.randperm(inputs, generator=torch.Generator().manual_seed(0))
            codes, groups, meant = codes[places], groups[places], meant[:, places]
        qweight = torch.zeros(inputs // 8, codes.shape[1], dtype=torch.int64)
        qzeros = torch.zeros(zeros.shape[0], zeros.shape[1] // 8, dtype=torch.int64)
        for place in range(8):
            qweight |= codes[place::8].long() << 4 * place
            qzeros |= (zeros[:, place::8].long() - int(form == "gptq")) << 4 * place
        stem = name.removesuffix("weight")
        parts = {
            "qweight": qweight.to(torch.int32),
            "qzeros": qzeros.to(torch.int32),
            "scales": scales,
            "g_idx": groups,
        }
        return {f"{stem}{part}": value for part, value in parts.items()}, meant

    said = {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": act_order, "sym": False}
    return pack, said | {"checkpoint_format": form}


def _asymmetric(weight: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes [inputs, outputs], zeros and scales [groups, outputs], the weight [outputs, inputs] they stand for)."""
    matrix = weight.T
    low, high = (torch.stack([edge(g, 0) for g in matrix.split(group)]) for edge in (torch.amin, torch.amax))
    scales = ((high - low) / 14).to(torch.float16)
    zeros = (-low / scales.float()).round().clamp(1, 15)
    each = torch.arange(matrix.shape[0]) // group
    codes = (matrix / scales.float()[each] + zeros[each]).round().clamp(0, 15)
    return codes, zeros, scales, ((codes - zeros[each]) * scales.float()[each]).T.contiguous()


def bitsandbytes4() -> tuple[Pack, dict[str, Any]]:
    """Blocks of 64 elements; uint8 of two, the even one in the high half; numbers as JSON beside them."""
    table = torch.linspace(-1, 1, 16).sign() * torch.linspace(-1, 1, 16).abs() ** 1.3

    def pack(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        flat = torch.nn.functional.pad(weight.flatten(), (0, -weight.numel() % 64)).view(-1, 64)
        absmax = flat.abs().amax(-1)
        codes = ((flat / absmax[:, None])[..., None] - table).abs().argmin(-1).to(torch.uint8)
        meant = (table[codes.int()] * absmax[:, None]).flatten()[: weight.numel()].view(weight.shape)
        codes = codes.flatten()[: weight.numel()]
        state = json.dumps({"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(weight.shape)})
        said = torch.tensor([*state.encode()], dtype=torch.uint8)
        parts = {"absmax": absmax, "quant_map": table, "quant_state.bitsandbytes__nf4": said}
        beside = {f"{name}.{part}": value.clone() for part, value in parts.items()}
        return beside | {name: (codes[0::2] << 4 | codes[1::2])[:, None]}, meant

    return pack, {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def bitsandbytes8() -> tuple[Pack, dict[str, Any]]:
    """LLM.int8: int8 weights, the largest of every row, and a mark that rows lie one after another."""

    def pack(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        largest, stem = weight.abs().amax(-1), name.removesuffix("weight")
        codes = (weight / largest[:, None] * 127).round().to(torch.int8)
        parts = {name: codes, f"{stem}SCB": largest, f"{stem}weight_format": torch.zeros((), dtype=torch.uint8)}
        return parts, codes.float() * largest[:, None] / 127

    return pack, {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0}


def mxfp4() -> tuple[Pack, dict[str, Any]]:
    """gpt-oss: experts [E, inputs, outputs] as blocks [E, outputs, inputs / 32, 16], even elements in low halves."""

    def pack(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        if weight.dim() != 3:
            return {name: weight}, weight
        groups = weight.transpose(1, 2).unflatten(-1, (-1, 32))
        exponents = (groups.abs().amax(-1) / 6).log2().ceil()
        codes = ((groups / exponents.exp2()[..., None])[..., None] - E2M1).abs().argmin(-1).to(torch.uint8)
        meant = (E2M1[codes.int()] * exponents.exp2()[..., None]).flatten(-2).transpose(1, 2).contiguous()
        blocks = codes[..., 0::2] | codes[..., 1::2] << 4
        return {f"{name}_blocks": blocks, f"{name}_scales": (exponents + 127).to(torch.uint8)}, meant

    return pack, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


MAKERS: Mapping[str, tuple[str, tuple[Pack, dict[str, Any]]]] = {
    "fp8-blocks": ("llama", fp8_blocks(16, 16)),
    "fp8-experts": ("qwen3_moe", fp8_blocks(16, 16)),
    "fp8-deepseek": ("deepseek_v3", fp8_blocks(16, 16, torch.bfloat16)),
    "fp8-exponents": ("llama_tied", fp8_blocks(24, 32, torch.uint8)),
    "fp8-tensor": ("llama", compressed_fp8("tensor")),
    "autofp8": ("llama", autofp8()),
    "fp8-channel": ("qwen2", compressed_fp8("channel")),
    "mxfp4": ("gpt_oss", mxfp4()),
    "awq": ("llama", awq(16)),
    "gptq": ("llama", gptq(16)),
    "gptq-act-order": ("llama", gptq(16, act_order=True)),
    "gptq-v2": ("llama", gptq(16, "gptq_v2")),
    "bnb-nf4": ("llama", bitsandbytes4()),
    "bnb-int8": ("llama", bitsandbytes8()),
}


def make(kind: str, directory: Path, dtype: str = "float32", **beside: Any) -> Tensors:
    """A checkpoint of one of MAKERS; returns what its tensors stand for, by the names without quantization."""
    family, (pack, said) = MAKERS[kind]
    return write(directory, family, pack, said, dtype=dtype, **beside)
