"""The intermediate representation: a Program as two levels of torch.fx graphs."""

from rewriter.ir.program import Program
from rewriter.ir.structure import (
    SPLAT,
    Body,
    ChildInput,
    ChildItem,
    LayerArgument,
    LayerSource,
    Leaf,
    Module,
    Opaque,
    Parameter,
    PassRecord,
    PythonCall,
    Shape,
    Source,
    args_of,
    bypass,
    called_module,
    copy_graph,
    drop_dead_nodes,
    edit_bodies,
    nodes_inside,
    parameters_of,
    placeholders,
    put_after,
    reachable,
    walk_modules,
    wiring_tensors,
)

__all__ = [
    "SPLAT", "Body", "ChildInput", "ChildItem", "LayerArgument", "LayerSource", "Leaf", "Module", "Opaque", "Parameter",
    "PassRecord", "Program", "PythonCall", "Shape", "Source", "args_of", "bypass", "called_module", "copy_graph",
    "drop_dead_nodes", "edit_bodies", "nodes_inside", "parameters_of", "placeholders", "put_after", "reachable",
    "walk_modules", "wiring_tensors",
]  # fmt: skip
