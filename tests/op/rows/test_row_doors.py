"""A row op has one name in Mojo, in Python and for MAX, and its record the same fields."""

from __future__ import annotations

import re

import torch
from kernel_harness import ROOT

import fused_norm  # noqa: F401  registers the ops
from fused_norm.chain import row_record as record

OPS = (ROOT / "op/rows/op.mojo").read_text()
NAMES = re.findall(r'^    Entry\[\s*"(\w+)"', OPS, re.MULTILINE)


def registered(path: str) -> dict[str, str]:
    """Return the structs that a file registers for MAX, by the names of their ops."""
    pattern = re.compile(r'^@register\("(\w+)"\)\nstruct (\w+):', re.MULTILINE)
    return dict(pattern.findall((ROOT / path).read_text()))


def test_every_op_has_every_door() -> None:
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
    first = 0
    for name, size in fields:
        assert getattr(record, name.upper()) == first, name
        first += int(size or 1)
    view, _ = record.new_record()
    assert len(view) == first
    assert len(fields) == 11
