"""Exported programs with the backend's rewrites."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_model import Model

import fused_norm as fn

pytestmark = pytest.mark.usefixtures("fresh_backend")


@pytest.mark.parametrize("dynamic", [False, True])
def test_exported_program(dynamic: bool, tmp_path: Path) -> None:
    model, x = Model().eval(), torch.randn(4, 9, 32)
    shapes = {"x": {0: torch.export.Dim("batch", min=2)}} if dynamic else None
    program = torch.export.export(model, (x,), dynamic_shapes=shapes)
    before = [node.target for node in program.graph.nodes]
    ours = fn.optimize(program)
    assert [node.target for node in program.graph.nodes] == before
    targets = [node.target for node in ours.graph.nodes]
    assert targets.count(torch.ops.fused_norm.norm_linear_forward.default) == 4
    assert torch.ops.aten.layer_norm.default not in targets
    assert ours.state_dict.keys() == model.state_dict().keys()
    torch.export.save(ours, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2")
    x = torch.randn(7 if dynamic else 4, 9, 32)
    for each in (ours, loaded):
        torch.testing.assert_close(each.module()(x), model(x), rtol=1e-5, atol=1e-5)


def test_exported_program_with_an_input_called_like_a_builtin() -> None:
    """Regression: a copied graph renames `input`, which nn.Sequential calls its own."""
    model, x = (
        torch.nn.Sequential(torch.nn.LayerNorm(32), torch.nn.Linear(32, 48)),
        torch.randn(9, 32),
    )
    program = fn.optimize(torch.export.export(model, (x,)))
    assert program.graph_signature.user_inputs == ("input",)
    torch.testing.assert_close(program.module()(x), model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_ahead_of_time(tmp_path: Path) -> None:
    model, x = Model().eval(), torch.randn(4, 9, 32)
    program = fn.optimize(torch.export.export(model, (x,)))
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "m.pt2"))
    with torch.no_grad():
        found = torch._inductor.aoti_load_package(path)(x)
    torch.testing.assert_close(found, model(x), rtol=1e-5, atol=1e-5)
