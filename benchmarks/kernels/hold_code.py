"""What the kernels of emulated collectives compile to, for GPUs that need not be here."""

from __future__ import annotations

from typing import Any

from benchmarks.kernels.merge_code import Code, build


def source(alone: bool, dtype: str = "bf16") -> Any:
    """`hold_kernel` as the engine launches it."""
    from triton.compiler import ASTSource

    from rewriter.kernels import hold_triton

    names = hold_triton.hold_kernel.arg_names
    constants = {"ALONE": alone, "LINKS": hold_triton.LINKS, "TILE": hold_triton.TILE}
    types: dict[str, Any] = dict.fromkeys(("row", "free", "lock", "state"), "*i64")
    types |= {"x": f"*{dtype}", "factor": "fp32", "elements": "i64", "scratch": "*i32", "words": "i64"}
    types |= dict.fromkeys(constants, "constexpr")
    aligned = ("row", "free", "lock", "state", "x", "scratch")
    return ASTSource(
        fn=hold_triton.hold_kernel,
        signature={name: types[name] for name in names},
        constexprs=constants,
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )


def hold(capability: int, alone: bool = True, dtype: str = "bf16") -> tuple[Code, int]:
    """The kernel's code on an architecture, such as 90 for sm_90, and the shared memory of a block in bytes."""
    import triton
    from triton.backends.compiler import GPUTarget

    from rewriter.kernels import hold_triton

    options = {"num_warps": hold_triton.WARPS, "num_stages": 1}
    made = source(alone, dtype)
    launched = triton.compile(made, target=GPUTarget("cuda", capability, 32), options=options)
    return build(made, capability, options), launched.metadata.shared


def arrive(capability: int) -> Code:
    """The kernel that only reserves links."""
    from triton.compiler import ASTSource

    from rewriter.kernels import hold_triton

    names = hold_triton.arrive_kernel.arg_names
    types = dict.fromkeys(names, "*i64") | {"LINKS": "constexpr"}
    made = ASTSource(fn=hold_triton.arrive_kernel, signature=types, constexprs={"LINKS": hold_triton.LINKS}, attrs={})
    return build(made, capability, {"num_warps": 1})
