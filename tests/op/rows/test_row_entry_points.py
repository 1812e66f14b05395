"""A row op has one name in Mojo, in Python and for MAX, and its record the same fields."""

from __future__ import annotations

import ctypes
import re

import torch
from kernel_harness import ROOT

import fused_norm  # noqa: F401  registers the ops
from fused_norm.call.record import RowCall

OPS = (ROOT / "op/rows/op.mojo").read_text()
NAMES = re.findall(r'^    Entry\[\s*"(\w+)"', OPS, re.MULTILINE)


def registered(path: str) -> dict[str, str]:
    """Return the structs that a file registers for MAX, by the names of their ops."""
    pattern = re.compile(r'^@register\("(\w+)"\)\nstruct (\w+):', re.MULTILINE)
    return dict(pattern.findall((ROOT / path).read_text()))


def test_every_op_has_every_entry_point() -> None:
    assert len(NAMES) == 7
    assert sorted(registered("op/max/rows.mojo")) == sorted(NAMES)
    assert all(hasattr(torch.ops.fused_norm, name) for name in NAMES)


def test_register_lists_all_that_max_finds() -> None:
    listed = (ROOT / "op/register.mojo").read_text()
    files = [str(path.relative_to(ROOT)) for path in (ROOT / "op").rglob("*.mojo")]
    structs = {struct for path in files for struct in registered(path).values()}
    assert len(structs) == 16
    assert structs == set(re.findall(r"\b([A-Z]\w+)\b", listed.split('"""')[2]))


def test_record_is_that_of_mojo() -> None:
    body = OPS.split("struct RowCall")[1].split("def __init__")[0]
    fields = re.findall(r"^    var (\w+): (?:Int|StaticTuple\[Int, (\d)\])$", body, re.MULTILINE)
    assert len(fields) == 11
    assert [name for name, _ in fields] == [name for name, _ in RowCall._fields_]
    header = (ROOT / "fused_norm/chain/call.h").read_text()
    struct = re.search(r"struct RowCall \{(.*?)\};", header, re.DOTALL)
    assert struct is not None
    in_c = re.findall(r"(\w+)(?:\[(\d)\])?[,;]", struct[1])
    assert in_c == fields
    assert ctypes.sizeof(RowCall) == 8 * sum(int(size or 1) for _, size in fields)


def test_places_are_those_of_mojo() -> None:
    header = (ROOT / "fused_norm/chain/rows.h").read_text()
    enum = re.search(r"enum class RowOp : int64_t \{(.*?)\}", header, re.DOTALL)
    assert enum is not None
    short = [re.sub("_layer_norm|composed_", "", name).upper() for name in NAMES]
    assert [name.strip() for name in enum[1].split(",")] == short
