"""The normal form of a graph's nodes: one name and named arguments for all spellings of an op.

Dynamo's graphs hold functions (`torch.add`, `operator.add`) and methods (`x.add`), exported graphs
ATen's overloads (`aten.add.Tensor`). Readers of a graph ask for the form, which is `add` with
`input` and `other`. The graph is not rewritten for this: a site that is left stays as it was.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node

from fused_norm.activations import PLAIN
from fused_norm.models.values import are_same, is_number, is_tensor, value
from fused_norm.models.writes import written
from fused_norm.norms import NORMS
from fused_norm.ops.fp8 import scaled_linear

# Each op by its kind: the names of its arguments by position, and the functions that compute it.
_OPS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "linear": ("input weight bias", (F.linear, torch._C._nn.linear)),
    "scaled_linear": ("input weight bias recipe", (scaled_linear,)),
    "addmm": ("input mat1 mat2", (torch.addmm,)),
    "matmul": ("input other", (torch.matmul, operator.matmul, torch.mm)),
    **{name: (norm.arguments, norm.targets) for name, norm in NORMS.items()},
    **{name: (each.arguments, each.targets) for name, each in PLAIN.items() if each.targets},
    "add": ("input other", (operator.add, operator.iadd, torch.add)),
    "sub": ("input other", (operator.sub, torch.sub, torch.subtract)),
    "mul": ("input other", (operator.mul, operator.imul, torch.mul, torch.multiply)),
    "div": ("input other", (operator.truediv, torch.div, torch.divide, torch.true_divide)),
    "addcmul": ("input tensor1 tensor2", (torch.addcmul,)),
    "pow": ("input exponent", (operator.pow, torch.pow)),
    "rsqrt": ("input", (torch.rsqrt,)),
    "sqrt": ("input", (torch.sqrt,)),
    "square": ("input", (torch.square,)),
    "mean": ("input dim keepdim", (torch.mean,)),
    "var": ("input dim unbiased keepdim", (torch.var,)),
    "std": ("input dim unbiased keepdim", (torch.std,)),
    "var_mean": ("input dim unbiased keepdim", (torch.var_mean,)),
    "sum": ("input dim keepdim", (torch.sum,)),
    "vector_norm": (
        "input ord dim keepdim",
        (torch.norm, torch.linalg.norm, torch.linalg.vector_norm),
    ),
    "normalize": ("input p dim eps", (F.normalize,)),
    "group_norm": ("input num_groups weight bias eps", (F.group_norm, torch.group_norm)),
    "clamp": ("input min max", (torch.clamp, torch.clamp_min)),
    "sigmoid": ("input", (F.sigmoid, torch.sigmoid)),
    "tanh": ("input", (F.tanh, torch.tanh)),
    "erf": ("input", (torch.erf,)),
    "dropout": ("input p training", (F.dropout, torch.dropout)),
    "view": ("input", (torch.reshape, torch.flatten, torch.unsqueeze, torch.squeeze)),
    "permute": ("input dims", (torch.permute,)),
    "transpose": ("input dim0 dim1", (torch.transpose, torch.swapaxes)),
    "t": ("input", (torch.t, torch.ops.aten.numpy_T)),
    "roll": ("input shifts dims", (torch.roll,)),
    "getitem": ("input index", (operator.getitem,)),
    "select": ("input dim index", ()),
    "slice": ("input dim start end step", ()),
    "expand": ("input", ()),
    "cast": ("input", ()),
    "contiguous": ("input", ()),
    "clone": ("input", (torch.clone,)),
    "chunk": ("input chunks dim", (torch.chunk,)),
    "split": ("input split_size dim", (torch.split,)),
    "narrow": ("input dim start length", (torch.narrow,)),
    "unbind": ("input dim", (torch.unbind,)),
    "cat": ("tensors dim", (torch.cat, torch.concat)),
    "stack": ("tensors dim", (torch.stack,)),
    "neg": ("input", (operator.neg, torch.neg, torch.negative)),
    "pad": ("input pad", (F.pad, torch._C._nn.pad)),
    "attention": ("query key value", (F.multi_head_attention_forward,)),
    "cross_entropy": (
        "input target weight size_average ignore_index reduce reduction label_smoothing",
        (F.cross_entropy,),
    ),
    "from_local": ("input device_mesh placements", ()),
    "redistribute": ("input device_mesh placements", ()),
    "to_local": ("input", ()),
}
# Methods and ATen's ops whose names differ from their kind.
_NAMES: dict[str, str] = {
    **dict.fromkeys(["view", "reshape", "flatten", "unsqueeze", "squeeze", "view_as"], "view"),
    **dict.fromkeys(["unflatten", "_unsafe_view", "reshape_as"], "view"),
    **dict.fromkeys(["to", "float", "half", "bfloat16", "double", "type", "type_as"], "cast"),
    **dict.fromkeys(["_to_copy"], "cast"),
    **{"swapaxes": "transpose", "mm": "matmul", "add_": "add", "mul_": "mul"},
    **{"split_with_sizes": "split", "split_tensor": "split", "expand_as": "expand"},
    **{"norm": "vector_norm", "linalg_vector_norm": "vector_norm", "clamp_min": "clamp"},
}
# Arguments that have two names.
_RENAMED = {"self": "input", "train": "training"}
_KINDS = {function: kind for kind, (_, functions) in _OPS.items() for function in functions}


@dataclass(frozen=True)
class Form:
    """What a node computes.

    Attributes:
        kind: One name for all spellings of an op, `""` for a node without a form here.
        args: Arguments by name, without omitted ones.
    """

    kind: str
    args: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        """Return an argument, None if it is omitted."""
        return self.args.get(name)


_NOTHING = Form("", {})


def form(node: Any) -> Form:
    """Return the form of a node, without a kind if it has none or is not a node.

    Args:
        node: A node, or one of its arguments.
    """
    kind = _kind(node)
    if not kind:
        return _NOTHING
    args: dict[str, Any] = dict(zip(_OPS[kind][0].split(), node.args, strict=False))
    for name, given in node.kwargs.items():
        args[_RENAMED.get(name, name)] = given
    return Form(kind, args)


def _kind(node: Any) -> str:
    if not isinstance(node, Node):
        return ""
    if node.op == "call_method":
        name = str(node.target)
    elif node.op != "call_function":
        return ""
    elif isinstance(node.target, torch._ops.OpOverload):
        if node.target.namespace != "aten":
            return ""
        name = node.target.overloadpacket.__name__
    else:
        return _KINDS.get(node.target) or _kind_of_sharding(node.target)
    kind = _NAMES.get(name, name)
    return kind if kind in _OPS else ""


def _kind_of_sharding(target: Any) -> str:
    """Return the kind of a function on DTensors: itself, or a closure over placements."""
    name = str(getattr(target, "__qualname__", "")).rpartition(".")
    if name[2] == "from_local" and name[0].endswith("DTensor"):
        return "from_local"
    # PyTorch 2.11 names only the closure, without a qualifier: "prim from_local".
    own = name[2] if name[2].startswith("prim_") else str(getattr(target, "__name__", ""))
    kind = own[5:] if own.startswith(("prim_", "prim ")) else ""
    return kind if kind in ("from_local", "redistribute", "to_local") else ""


def pair(node: Any) -> tuple[Any, Any]:
    """Return both operands of a sum or a product, tensors before numbers."""
    f = form(node)
    a, b = f["input"], f["other"]
    return (b, a) if is_tensor(b) and not is_tensor(a) else (a, b)


def other(node: Node, one: Node) -> Any:
    """Return the other operand of a sum or a product."""
    f = form(node)
    return f["other"] if f["input"] is one else f["input"]


def is_plain_sum(node: Any) -> bool:
    """Return whether a node is a + b, not written in place."""
    f = form(node)
    return f.kind == "add" and f.args.get("alpha", 1) == 1 and not written(node)


def is_noop(node: Any) -> bool:
    """Return whether a node leaves values, dtype and shape unchanged."""
    f = form(node)
    kind, x = f.kind, f["input"]
    if kind == "dropout":
        return f["training"] is False or is_number(f["p"], 0.0)
    if kind == "pad":
        return all(isinstance(size, int) and size == 0 for size in f["pad"])
    if not kind or not is_tensor(node) or not is_tensor(x):
        return False
    if kind in ("contiguous", "clone"):
        return True
    a, b = value(node), value(x)
    if kind in ("mul", "div"):
        one = is_number(f["other"], 1.0) and not written(node)
        return bool(one and a.dtype is b.dtype)
    if kind == "cast":
        return bool(a.dtype is b.dtype and a.device == b.device)
    if kind == "redistribute":
        return bool(a.placements == b.placements and a.dtype is b.dtype)
    if kind == "getitem":
        index = f["index"] if isinstance(f["index"], tuple) else (f["index"],)
        whole = all(i is Ellipsis or (isinstance(i, slice) and i.step in (None, 1)) for i in index)
        return whole and are_same(a.shape, b.shape)
    if kind == "slice":
        return f.args.get("step", 1) == 1 and are_same(a.shape, b.shape)
    # A view as another dtype changes all values.
    return kind in ("view", "expand") and a.dtype is b.dtype and are_same(a.shape, b.shape)


def is_cast(node: Any) -> bool:
    """Return whether a node changes one floating dtype to another, on the same device.

    Rounding to 8 bits is what a model is designed for, so it is not a cast that may be dropped.
    """
    f = form(node)
    if f.kind != "cast" or not is_tensor(node) or not is_tensor(f["input"]):
        return False
    a, b = value(node), value(f["input"])
    are_floating = a.is_floating_point() and b.is_floating_point()
    return bool(are_floating and min(a.itemsize, b.itemsize) > 1 and a.device == b.device)


def is_narrowing(node: Any) -> bool:
    """Return whether a node is a cast that rounds, such as float32 or float16 to bfloat16."""
    if not is_cast(node):
        return False
    a, b = value(node).dtype, value(form(node)["input"]).dtype
    return torch.promote_types(a, b) is not a


def is_narrowed(node: Any) -> bool:
    """Return whether any of the casts that `above` goes through rounds."""
    while is_noop(node) or is_cast(node):
        if is_narrowing(node):
            return True
        node = form(node)["input"]
    return False


def above(node: Any, casts: bool = True) -> Any:
    """Return the source of a node's values, above all nodes that leave them unchanged.

    Args:
        node: A node, or another argument, which is returned unchanged.
        casts: Whether dtypes may change on the way.
    """
    while is_noop(node) or (casts and is_cast(node)):
        node = form(node)["input"]
    return node


def only_user(node: Node) -> Node | None:
    """Return the only reader of a node, None if there are more or none."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def below(node: Node) -> Node:
    """Return the end of a chain of single readers that leave a node's values unchanged."""
    while (user := only_user(node)) is not None and not written(user) and is_noop(user):
        node = user
    return node


def is_last(node: Node, x: Any) -> bool:
    """Return whether a mean or a variance is over the last dimension of x alone, and keeps it."""
    f = form(node)
    dim = f["dim"]
    if isinstance(dim, (tuple, list)):
        dim = dim[0] if len(dim) == 1 else None
    return dim in (-1, value(x).dim() - 1) and f["keepdim"] is True


def name(node: Node) -> str:
    """Return what messages call a node."""
    if node.op == "call_function":
        target: Any = node.target
        return form(node).kind or str(getattr(target, "__name__", target))
    return form(node).kind or (str(node.target) if node.op == "call_method" else node.op)
