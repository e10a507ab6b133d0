"""What the kernels of attention over a cache compile to, for GPUs that need not be here:
`python -m benchmarks.kernels.decode_attention_code` prints a table.

Per architecture, dtype, head size and query heads of a key/value head: registers of a thread, bytes of shared memory of
a block and of stack of a thread (spilled registers lie there), and a thread's copies of 16 bytes to shared memory: two
tiles of keys and values ahead of the loop, and one in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.kernels.merge_code import ARCHITECTURES, Code, build

# dtype, head size, query heads of a key/value head
KERNELS = [("bf16", 64, 8), ("bf16", 80, 1), ("bf16", 128, 8), ("bf16", 256, 2), ("fp32", 128, 8)]
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Kernel:
    """`shared` in bytes, of a block, as the launch asks for it."""

    code: Code
    shared: int

    def copies(self, size: int) -> int:
        """Copies of `size` bytes to shared memory in the program of a thread."""
        return sum("cp.async.c" in line and f", {size:#x}" in line for line in self.code.ptx.splitlines())


def _compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any], capability: int, **options: int) -> Kernel:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    # what a launch finds of PyTorch's tensors: addresses and strides are multiples of 16
    aligned = [name for name in names if types.get(name, "").startswith("*") or name.startswith(("q_", "k_", "v_"))]
    source = ASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in constants else types.get(name, "i32") for name in names},
        constexprs=constants,
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    launched = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return Kernel(build(source, capability, options), launched.metadata.shared)


def parts(capability: int, dtype: str, size: int, group: int, capped: bool = False) -> Kernel:
    """`parts_kernel` for rows with padding on an architecture, such as 90 for sm_90; needs no GPU."""
    from rewriter.kernels import decode_attention_triton as kernels

    sizes, stages = kernels.shape(size, size, _DTYPES[dtype])
    constants = {"D": size, "E": size, "GROUP": group, "PADDED": True, "CAPPED": capped, **sizes}
    types = dict.fromkeys(("q", "keys", "values"), f"*{dtype}") | dict.fromkeys(("position", "first_valid"), "*i64")
    types |= dict.fromkeys(("o_parts", "tops", "sums"), "*fp32") | {"scale": "fp32", "softcap": "fp32"}
    options = {"num_warps": kernels.WARPS, "num_stages": stages}
    return _compiled(kernels.parts_kernel, types, constants, capability, **options)


def merge(capability: int, dtype: str, size: int, splits: int) -> Kernel:
    """`merge_kernel` with sinks."""
    from rewriter.kernels import decode_attention_triton as kernels

    constants = {"E": size, "SPLITS": splits, "COLUMNS": kernels.COLUMNS, "SINKS": True}
    types = dict.fromkeys(("o_parts", "tops", "sums"), "*fp32") | dict.fromkeys(("sinks", "out"), f"*{dtype}")
    return _compiled(kernels.merge_kernel, types, constants, capability, num_warps=kernels.WARPS)


def main() -> None:
    from rewriter.kernels.decode_attention_triton import MOST_SPLITS

    print("| architecture | kernel | registers | shared | stack | copies |")
    print("| --- | --- | --- | --- | --- | --- |")
    for capability, devices in ARCHITECTURES.items():
        made = {
            f"{dtype}, head size {size}, groups of {group}": parts(capability, dtype, size, group)
            for dtype, size, group in KERNELS
        }
        made[f"merge of {MOST_SPLITS} parts, head size 128"] = merge(capability, "bf16", 128, MOST_SPLITS)
        for name, kernel in made.items():
            figures = kernel.code.registers, kernel.shared, kernel.code.stack + kernel.code.local, kernel.copies(16)
            print(f"| sm_{capability} ({devices}) | {name} | {' | '.join(map(str, figures))} |")


if __name__ == "__main__":
    main()
