"""The code of the merge kernel, for GPUs that need not be here: `python -m benchmarks.kernels.merge_code` prints it.

Per architecture, number of parts and head size: registers of a thread, bytes of shared memory of a block and of stack
of a thread (spilled registers lie there), 16-byte loads and stores of a thread, and how many blocks registers allow on
a multiprocessor. bf16 in and out, addresses and strides as PyTorch's tensors have them.
"""

from __future__ import annotations

import collections
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ARCHITECTURES = {80: "A100", 90: "H100, H200", 100: "B200"}
KERNELS = [(2, 64), (2, 128), (4, 128), (8, 128)]  # parts, head size
_REGISTERS = 65536  # of a multiprocessor
_MOST_BLOCKS = 16  # of 128 threads on a multiprocessor


@dataclass(frozen=True)
class Code:
    """`loads` and `stores`: instructions of 16 bytes in the program of one thread."""

    ptx: str
    sass: str
    registers: int
    shared: int
    stack: int
    local: int

    @property
    def loads(self) -> int:
        return self.ptx.count("ld.global.v4.b32")

    @property
    def stores(self) -> int:
        return self.ptx.count("st.global.v4.b32")

    def fast_path(self) -> list[str]:
        """The instructions of a thread from its begin to where it leaves after a store: a tile that needs no masks."""
        found: list[str] = []
        stored = False
        for line in self.sass.splitlines():
            instruction = re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]+)", line)
            if instruction:
                found.append(instruction[2])
                stored |= instruction[2].startswith("STG")
                if instruction[2] == "EXIT" or (stored and instruction[2] == "BRA" and not instruction[1]):
                    break
        return found

    def widths(self, access: str) -> dict[int, int]:
        """How many accesses of how many bytes are on it; `access` is LDG or STG."""
        bits = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128}
        suffixes = (name.split(".") for name in self.fast_path() if name.startswith(f"{access}."))
        return dict(collections.Counter(next((bits[s] for s in some if s in bits), 32) // 8 for some in suffixes))


def compiled(parts: int, size: int, capability: int) -> Code:
    """The kernel for `parts` parts with heads of `size` on an architecture, such as 90 for sm_90; needs no GPU."""
    from triton.compiler import ASTSource

    from rewriter.kernels import merge_triton

    names = merge_triton.merge_kernel.arg_names
    constants = {"E": size, "PARTS": parts, "ROWS": merge_triton.BLOCK // size, "WIDTH": size}
    types: dict[str, Any] = dict.fromkeys(names, "i32") | dict.fromkeys(constants, "constexpr")
    types |= {"o_parts": ("*bf16",) * parts, "lse_parts": ("*fp32",) * parts, "out": "*bf16", "lse_out": "*fp32"}
    types |= {"o_strides": ("i32",) * 3 * parts, "lse_strides": ("i32",) * 3 * parts}
    # what a launch finds of PyTorch's tensors: addresses and strides are multiples of 16
    aligned: list[tuple[int, ...]] = [(names.index("o_parts"), p) for p in range(parts)]
    aligned += [(names.index("o_strides"), p) for p in range(3 * parts)]
    aligned += [(names.index("out"),)]
    source = ASTSource(
        fn=merge_triton.merge_kernel,
        signature=types,
        constexprs=constants,
        attrs={at: [["tt.divisibility", 16]] for at in aligned},
    )
    return build(source, capability, {"num_warps": merge_triton.WARPS})


def build(source: Any, capability: int, options: dict[str, Any]) -> Code:
    """What ptxas and the disassembler say of a kernel."""
    import triton
    from triton.backends import nvidia
    from triton.backends.compiler import GPUTarget

    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    tools = Path(nvidia.__file__).parent / "bin"
    with tempfile.TemporaryDirectory() as scratch:
        binary = Path(scratch, "kernel.cubin")
        binary.write_bytes(kernel.asm["cubin"])
        usage, sass = (
            subprocess.run([*command, binary], capture_output=True, text=True, check=True).stdout
            for command in ([tools / "cuobjdump", "-res-usage"], [tools / "nvdisasm", "-c"])
        )
    figures = {name: int(re.findall(rf"\b{name}:(\d+)", usage)[-1]) for name in ("REG", "SHARED", "STACK", "LOCAL")}
    return Code(kernel.asm["ptx"], sass, figures["REG"], figures["SHARED"], figures["STACK"], figures["LOCAL"])


def main() -> None:
    from rewriter.kernels.merge_triton import WARPS

    print("| architecture | parts × head size | registers | shared | stack | loads | stores | blocks by registers |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for capability, devices in ARCHITECTURES.items():
        for parts, size in KERNELS:
            code = compiled(parts, size, capability)
            blocks = min(_MOST_BLOCKS, _REGISTERS // (code.registers * 32 * WARPS))
            figures = code.registers, code.shared, code.stack + code.local, code.loads, code.stores, blocks
            print(f"| sm_{capability} ({devices}) | {parts} × {size} | {' | '.join(map(str, figures))} |")


if __name__ == "__main__":
    main()
