"""The model of a checkpoint as transformers defines it, in fp32, from weights read by their documented layout.

What reads, shards and writes weights is compared with it. So it imports nothing of this package, reads files by
safetensors' own reader, and where weights are quantized looks every element's scale up by its place, plainly and
slowly. Quantizers of transformers are not used: what they make of a checkpoint differs with version and processor, and
they take blocks that do not divide a weight for smaller ones.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto import modeling_auto

# E2M1, by its four bits (OCP Microscaling Formats 1.0, section 5.3.3): sign, exponent, mantissa
_E2M1 = [
    (-1) ** (n >> 3) * (2.0 ** ((n >> 1 & 3) - 1) * (1 + (n & 1) / 2) if n >> 1 & 3 else (n & 1) / 2) for n in range(16)
]
_SAID = ("quantization_config", "compression_config")
_FP8_SCALES = ("weight_scale_inv", "weight_scale", "scale", "qscale_weight")
_ACTIVATIONS = ("activation_scale", "input_scale", "output_scale", "qscale_act")


class PlainTensors:
    """The tensors of a checkpoint by the names that it would use without quantization."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        root = Path(directory)
        config = json.loads((root / "config.json").read_text(encoding="utf-8"))
        places = [(part, key) for part in (config, config.get("text_config") or {}) for key in _SAID]
        self.said: dict[str, Any] = next((part[key] for part, key in places if part.get(key)), {})
        self.method = str(self.said.get("quant_method", "")).replace("_", "-")
        index = root / "model.safetensors.index.json"
        single = not index.is_file() or (root / "model.safetensors").is_file()
        listed = {} if single else json.loads(index.read_text(encoding="utf-8"))
        self.loadable = single or isinstance(listed.get("metadata"), dict)  # by transformers, from its file
        names = ["model.safetensors"] if single else sorted({*listed["weight_map"].values()})
        self._places: dict[str, Any] = {}
        for name in names:
            file = safe_open(root / name, framework="pt")
            self._places |= dict.fromkeys(file.keys(), file)
        self._sources = dict(self._named())
        used = {part for parts in self._sources.values() for part in parts.values()}
        self._sources |= {n: {"": n} for n in self._places if n not in used and not self._aside(n)}

    def names(self) -> Iterator[str]:
        """Every name, in the order of the files."""
        return iter(self._sources)

    def quantized(self, name: str) -> bool:
        """True where a tensor is computed from several that are stored."""
        return "" not in self._sources[name]

    def read(self, name: str) -> torch.Tensor:
        """A tensor as it is stored, or in fp32 what quantized parts stand for."""
        parts = {part: self._places[stored].get_tensor(stored) for part, stored in self._sources[name].items()}
        if "" in parts:
            return parts[""]
        read = {"mxfp4": self._mxfp4, "awq": self._awq, "gptq": self._gptq, "bitsandbytes": self._bitsandbytes}
        return read.get(self.method, self._fp8)(parts)

    def _aside(self, name: str) -> bool:
        fp8 = self.method in ("fp8", "compressed-tensors")
        return (fp8 and name.endswith(_ACTIVATIONS)) or name.endswith(".weight_format")

    def _named(self) -> Iterator[tuple[str, dict[str, str]]]:
        """(plain name, part → stored name) of what is quantized."""
        for name in self._places:
            stem, _, leaf = name.rpartition(".")
            if self.method in ("fp8", "compressed-tensors"):
                scales = [
                    f"{name}_scale_inv",
                    f"{name}_scale",
                    *(f"{stem}.{s}" for s in _FP8_SCALES if leaf == "weight"),
                ]
                scale = next((s for s in scales if s in self._places), None)
                if scale is not None and "F8" in str(self._places[name].get_slice(name).get_dtype()):
                    yield name, {"codes": name, "scales": scale}
            elif self.method == "mxfp4" and name.endswith("_blocks"):
                plain = name.removesuffix("_blocks")
                yield plain, {"codes": name, "scales": f"{plain}_scales"}
            elif self.method in ("awq", "gptq") and leaf == "qweight":
                parts = ("qweight", "qzeros", "scales", *(["g_idx"] if self.method == "gptq" else []))
                yield f"{stem}.weight", {part: f"{stem}.{part}" for part in parts}
            elif self.method == "bitsandbytes" and leaf == "weight":
                inside = {n.removeprefix(f"{name}."): n for n in self._places if n.startswith(f"{name}.")}
                state = [part for part in inside if part.startswith("quant_state.")]
                if state:
                    yield name, {"codes": name, "state": inside.pop(state[0]), **inside}
                elif f"{stem}.SCB" in self._places:
                    yield name, {"codes": name, "rows": f"{stem}.SCB"}

    def _fp8(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """weight[.., i, j] · scale[.., i // rows of a block, j // columns of a block]; one scale, or one per row."""
        codes, scales = parts["codes"].float(), parts["scales"]
        factors = 2.0 ** (scales.int() - 127) if scales.dtype == torch.uint8 else scales.float()
        if factors.numel() == 1:
            return codes * factors.reshape(())
        groups = [g.get("weights") or {} for g in (self.said.get("config_groups") or {}).values()]
        blocks = [self.said.get("weight_block_size"), *(group.get("block_structure") for group in groups)]
        block = next((list(map(int, given)) for given in blocks if given), [])
        for dim, (size, count) in enumerate(zip(codes.shape, factors.shape, strict=True)):
            if count in (1, size):
                continue
            said = ([1] * codes.dim() + block)[-codes.dim() :][dim] if block else 0
            per = said if said and (size + said - 1) // said == count else size // count
            factors = factors.index_select(dim, torch.arange(size) // per)
        return codes * factors

    @staticmethod
    def _mxfp4(parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """[E, outputs, G, 16] bytes and [E, outputs, G] exponents → [E, 32 · G, outputs]; low halves come first."""
        codes, table = parts["codes"].long(), torch.tensor(_E2M1)
        values = torch.empty(*codes.shape[:-1], 32)
        values[..., 0::2], values[..., 1::2] = table[codes % 16], table[codes // 16]
        values = torch.ldexp(values, (parts["scales"].int() - 127)[..., None])
        return values.reshape(*codes.shape[:-2], -1).mT.contiguous()

    def _awq(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """(code − zero) · scale, [outputs, inputs]. Column 8w + c is at place (0, 4, 1, 5, 2, 6, 3, 7)[c] of word w."""
        codes, zeros = (_columns(parts[name], 4, (0, 4, 1, 5, 2, 6, 3, 7)) for name in ("qweight", "qzeros"))
        groups = parts["scales"].shape[0]
        size = int(self.said.get("group_size", self.said.get("q_group_size", 128)))
        each = torch.arange(len(codes)) // (
            size if size > 0 and size * groups >= len(codes) else -(-len(codes) // groups)
        )
        return ((codes - zeros[each]).float() * parts["scales"].float()[each]).T.contiguous()

    def _gptq(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """(code − zero) · scale of the input's group, [outputs, inputs]; "gptq" stores every zero less one."""
        bits = int(self.said["bits"])
        places = tuple(range(32 // bits))
        less = int(str(self.said.get("checkpoint_format", self.said.get("format", "gptq"))).lower() == "gptq")
        codes, zeros = _columns(parts["qweight"].T, bits, places).T, _columns(parts["qzeros"], bits, places)
        scales, each = parts["scales"].float(), parts["g_idx"].long()
        zeros = zeros[:, : scales.shape[1]] + less
        return ((codes - zeros[each]).float() * scales[each]).T.contiguous()

    @staticmethod
    def _bitsandbytes(parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """4 bits: quant_map[code] · absmax of the block of elements, and the high half of a byte comes first. 8 bits:
        code · largest of the row / 127."""
        if "rows" in parts:
            return torch.einsum("oi,o->oi", parts["codes"].float(), parts["rows"].float()) / 127
        said = json.loads(bytes(parts["state"].tolist()))
        absmax = parts["absmax"]
        if "nested_absmax" in parts:
            outer = parts["nested_absmax"][torch.arange(absmax.numel()) // int(said["nested_blocksize"])]
            absmax = parts["nested_quant_map"][absmax.long()] * outer + said["nested_offset"]
        element = torch.arange(torch.Size(said["shape"]).numel())
        codes = parts["codes"].flatten().long()[element // 2] >> 4 * (1 - element % 2) & 15
        return (parts["quant_map"][codes] * absmax[element // int(said["blocksize"])]).reshape(said["shape"])


def _columns(words: torch.Tensor, bits: int, places: tuple[int, ...]) -> torch.Tensor:
    """int32 [rows, words] → int64 [rows, words · len(places)]: in every word, column c is at place places[c]."""
    wide = words.long() % (1 << 32)
    return torch.stack([wide >> bits * place & (1 << bits) - 1 for place in places], -1).flatten(1)


def plain_model(
    directory: str | os.PathLike[str],
    remote_code: bool = False,
    dtype: torch.dtype = torch.float32,
    dequantized: torch.dtype | None = None,
) -> tuple[PreTrainedModel, Mapping[str, Any]]:
    """(The eager model in `directory`, in eval mode and in fp32; what transformers says of its loading.)

    With `dtype` its weights have the precision that transformers loads them with in that dtype, with `dequantized`
    those that are stored quantized have that one's. Raises what transformers raises.
    """
    model, told = _loaded(directory, remote_code, torch.float32, dequantized)
    if dtype != torch.float32:
        rounded = _loaded(directory, remote_code, dtype, dequantized)[0].state_dict()
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                tensor.copy_(rounded[name])
    return model.eval(), told


def _loaded(
    directory: str | os.PathLike[str], remote_code: bool, dtype: torch.dtype, dequantized: torch.dtype | None
) -> tuple[PreTrainedModel, Mapping[str, Any]]:
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": "eager", "output_loading_info": True}
    config = AutoConfig.from_pretrained(directory, trust_remote_code=remote_code)
    for name, value in (getattr(config, "rewriter_on_load", None) or {}).items():
        setattr(config, name, value)
    config._attn_implementation = "eager"  # some configs name another one, which goes before the option
    quantized = False
    for part, name in itertools.product((config, config.get_text_config(decoder=True)), _SAID):
        quantized |= bool(part.__dict__.pop(name, None))  # transformers refuses one with nothing in it
    plain = PlainTensors(directory)
    auto = _auto_class(config)
    if not quantized and plain.loadable:
        return auto.from_pretrained(directory, config=config, trust_remote_code=remote_code, **options)
    with torch.device("meta"):
        known = issubclass(auto, PreTrainedModel)
        cls = auto if known else type(auto.from_config(copy.deepcopy(config), trust_remote_code=remote_code))
    state = {name: plain.read(name) for name in plain.names()}
    if dequantized is not None:
        state |= {name: tensor.to(dequantized) for name, tensor in state.items() if plain.quantized(name)}
    return cls.from_pretrained(None, config=config, state_dict=state, **options)


def _auto_class(config: PreTrainedConfig) -> Any:
    """Which of two classes of a type a checkpoint is of, its `architectures` says: with images, or without.

    The config of a language model that was inside another one has a type that no auto class knows: then the class that
    it names.
    """
    kind, name = config.model_type, (config.architectures or [""])[0]
    images = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(kind)
    text = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    named = getattr(transformers, name, None)
    if not images and not text and getattr(named, "config_class", None) is type(config):
        return named
    return AutoModelForImageTextToText if images and (name == images or not text) else AutoModelForCausalLM


def loaded_dtypes(model: PreTrainedModel, dtype: torch.dtype) -> Mapping[str, torch.dtype]:
    """By name in its state, the dtype in which transformers has each tensor of `model` after loading it in `dtype`.

    No weights are made or read. It needs the package accelerate, unless `dtype` is fp32.
    """
    if dtype == torch.float32:
        return dict.fromkeys(model.state_dict(), dtype)
    state = {name: torch.empty_like(tensor, device="meta") for name, tensor in model.state_dict().items()}
    config = copy.deepcopy(model.config)
    loaded = type(model).from_pretrained(None, config=config, state_dict=state, dtype=dtype, device_map="meta")
    return {name: tensor.dtype for name, tensor in loaded.state_dict().items()}
