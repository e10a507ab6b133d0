"""By what a generated file knows the source's classes: their code as syntax trees, without what changes no result.

Trees are printed here and not by `ast.dump`, whose text differs between versions of Python.
"""

import ast
import hashlib
import re


def fingerprint(module, name, forward_only):
    """64 bits of what class `name` in `module`, a file's text, computes, with the functions and classes that it names.

    With `forward_only`, classes but bases do not count, nor does how `__init__` makes children that are only called.
    """
    tree = [node for node in ast.walk(ast.parse(module)) if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
    defined = {node.name: node for node in reversed(tree)}  # of two of one name the outermost
    if forward_only:
        leave_out_children(defined[name])
    texts, names = {}, [name]
    while names:
        node = defined[other := names.pop()]
        texts[other] = printed(node)
        bases = {base.id for base in getattr(node, "bases", ()) if isinstance(base, ast.Name)}
        found = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)} & defined.keys() - texts.keys()
        names += [n for n in found if not forward_only or n in bases or isinstance(defined[n], ast.FunctionDef)]
    return hashlib.sha256("\n".join(texts[other] for other in sorted(texts)).encode()).hexdigest()[:16]


def printed(node):
    """A syntax tree as text, alike in every version of Python, and where versions of transformers compute alike.

    They differ in the name of the cache, in what it is told of a call, and in decorators. Empty for what does nothing.
    """
    if isinstance(node, list):
        return f"[{','.join(filter(None, map(printed, node)))}]"
    if isinstance(node, ast.AnnAssign):
        node = ast.Assign([node.target], node.value) if node.value else ast.Pass()
    if isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
        return ""
    if not isinstance(node, ast.AST):
        return re.sub("past_key_values?|cache_params|layer_past", "cache", repr(node))
    ignored = ("annotation", "returns", "type_comment", "type_params", "kind", "ctx")
    fields = {field: value for field, value in ast.iter_fields(node) if field not in ignored}
    if "decorator_list" in fields:
        plain = ("deprecate_kwarg", "torch.no_grad", "use_kernel", "force_accelerate_hooks", "auto_docstring")
        fields["decorator_list"] = [d for d in node.decorator_list if not ast.unparse(d).startswith(plain)]
    if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "update":
        fields["keywords"] = [keyword for keyword in node.keywords if keyword.arg != "kwargs"]
    texts = [f"{field}={printed(value)}" for field, value in fields.items() if value is not None and value != []]
    return f"{type(node).__name__}({','.join(texts)})"


def leave_out_children(cls):
    """Take what only makes children out of the `__init__` of a class: attributes that its other methods only call."""
    methods = {node.name: node for node in cls.body if isinstance(node, ast.FunctionDef)}
    init = methods.pop("__init__", None)
    nodes = [node for method in methods.values() for node in ast.walk(method)]
    uses = [node for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"]
    if init is None or len(uses) < sum(isinstance(node, ast.Name) and node.id == "self" for node in nodes):
        return  # `self` itself is used, by something that may read anything of it
    called = {node.func for node in nodes if isinstance(node, ast.Call)}

    def assigns(node, left_out):  # nothing else than these
        if isinstance(node, ast.If):
            return all(assigns(part, left_out) for part in node.body + node.orelse)
        return isinstance(node, ast.Assign) and all(ast.unparse(target) in left_out for target in node.targets)

    children = {node.attr for node in uses} - {node.attr for node in uses if node not in called}
    init.body = [node for node in init.body if not assigns(node, {f"self.{name}" for name in children})]
    names = [node for node in ast.walk(init) if isinstance(node, ast.Name)]
    unread = {n.id for n in names} - {n.id for n in names if isinstance(n.ctx, ast.Load)}
    init.body = [node for node in init.body if not assigns(node, unread)]
