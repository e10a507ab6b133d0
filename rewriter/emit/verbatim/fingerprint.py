"""By what a generated file knows the source's classes: their code as syntax trees, without what changes no result.

Trees are printed here and not by `ast.dump`, whose text differs between versions of Python.
"""

import ast
import hashlib


def fingerprint(module, name, forward_only):
    """64 bits of the code of class `name`, and of the functions and classes that it names, in `module`, a file's text.

    Comments, formatting, docstrings and annotations do not count. With `forward_only`, nor do classes but bases, and
    how `__init__` makes children that are only called: who calls them as the class does need not know.
    """
    nodes = ast.parse(module).body
    for node in nodes:  # grows: definitions may depend on what is installed
        nodes += ast.iter_child_nodes(node) if isinstance(node, (ast.If, ast.Try)) else ()
    defined = {node.name: node for node in nodes if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    if forward_only:
        leave_out_children(defined[name])
    texts, names = {name: printed(defined[name])}, [name]
    while names:
        node = defined[names.pop()]
        bases = {base.id for base in getattr(node, "bases", ()) if isinstance(base, ast.Name)}
        for other in {part.id for part in ast.walk(node) if isinstance(part, ast.Name)} & defined.keys() - texts.keys():
            if not forward_only or other in bases or isinstance(defined[other], ast.FunctionDef):
                texts[other] = printed(defined[other])
                names.append(other)
    return hashlib.sha256("\n".join(texts[other] for other in sorted(texts)).encode()).hexdigest()[:16]


def printed(node):
    """A syntax tree as text, the same in every version of Python; empty for a statement that does nothing."""
    if isinstance(node, list):
        return f"[{','.join(filter(None, map(printed, node)))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    if isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
        return ""
    if isinstance(node, ast.AnnAssign):
        return printed(ast.Assign([node.target], node.value)) if node.value else ""
    ignored = ("annotation", "returns", "type_comment", "type_params", "kind", "ctx")
    fields = [(field, value) for field, value in ast.iter_fields(node) if field not in ignored]
    return f"{type(node).__name__}({','.join(f'{f}={printed(v)}' for f, v in fields if v is not None and v != [])})"


def leave_out_children(cls):
    """Take what only makes children out of the `__init__` of a class: attributes that its other methods only call."""
    methods = {node.name: node for node in cls.body if isinstance(node, ast.FunctionDef)}
    init = methods.pop("__init__", None)
    nodes = [node for method in methods.values() for node in ast.walk(method)]
    uses = [node for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"]
    if init is None or len(uses) < sum(isinstance(node, ast.Name) and node.id == "self" for node in nodes):
        return  # `self` itself is used, by something that may read anything of it
    called = {node.func for node in nodes if isinstance(node, ast.Call)}
    children = {node.attr for node in uses} - {node.attr for node in uses if node not in called}
    leave_out(init, {f"self.{name}" for name in children})
    names = [node for node in ast.walk(init) if isinstance(node, ast.Name)]
    leave_out(init, {n.id for n in names} - {n.id for n in names if isinstance(n.ctx, ast.Load)})


def leave_out(init, targets):
    """Take statements that only assign to `targets` out of a function."""

    def kept(node):
        if isinstance(node, ast.If):
            return any(map(kept, node.body + node.orelse))
        return not isinstance(node, ast.Assign) or any(ast.unparse(target) not in targets for target in node.targets)

    init.body = [node for node in init.body if kept(node)]
