"""The backend as users reach it: by name, through Inductor, checkpointed, with its options."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_python
from small_model import Model, assert_alike, step

import fused_norm as fn

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("fresh_backend")


def test_entry_point_names_the_backend() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    points = project["entry-points"]["torch_dynamo_backends"]
    assert points == {"fused_norm": "fused_norm.models:backend"}


def test_import_is_light() -> None:
    code = (
        "import sys, fused_norm; print(sorted({'torch._dynamo', 'rich', 'sympy'} & {*sys.modules}))"
    )
    done = run_python("-c", code, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_eager() -> None:
    model = Model()
    assert_alike(
        model, torch.compile(model, backend="fused_norm", options={"then": "eager"}, fullgraph=True)
    )


def test_in_place_keeps_names() -> None:
    model = Model()
    names = list(model.state_dict())
    model.compile(backend="fused_norm", options={"then": "eager"})
    model(torch.randn(2, 3, 32))
    assert list(model.state_dict()) == names


def test_inductor_takes_the_ops() -> None:
    """Forward and backward are compiled by Inductor around our ops, for all sizes at once."""
    from torch._inductor.utils import run_and_get_code

    # Of one block: its C++ compiler takes as long again for another.
    model = Model(count=1)
    options = {"small": True, "max_autotune": False}
    compiled = torch.compile(model, backend="fused_norm", options=options, dynamic=True)
    _, code = run_and_get_code(lambda: step(model, compiled, torch.randn(2, 9, 32)))
    text = "".join(code)
    assert "torch.ops.fused_norm.norm_linear_forward" in text
    assert "torch.ops.fused_norm.norm_linear_backward" in text
    assert "native_layer_norm" not in text
    with torch.compiler.set_stance("fail_on_recompile"):
        assert_alike(model, compiled, (3, 5, 32))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"no_such_option": 1}, r"unknown option 'no_such_option'"),
        ({"smal": True}, r"unknown option 'smal'.*did you mean 'small'\?"),
        ({"max_autotun": True}, r"did you mean 'max_autotune'\?"),
        ({"max_autotune": True, "then": "eager"}, r"unknown option 'max_autotune'"),
        ({"roundin": "once", "then": "aot_eager"}, r"did you mean 'rounding'\?"),
        ({"small": "yes"}, r"small must be True or False, got 'yes'"),
    ],
)
def test_options_that_nobody_knows_are_refused(options: dict[str, Any], message: str) -> None:
    """Regression: with `then`, what was misspelt was ignored in silence."""
    model, x = Model(), torch.randn(2, 3, 32)
    with pytest.raises(ValueError, match=message):
        fn.explain(model, x, options=options)
    with pytest.raises(Exception, match=message):
        torch.compile(model, backend="fused_norm", options=options)(x)


@pytest.mark.as_dispatched
def test_small_acts_before_eager(watch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the option was ignored, and each call left itself to PyTorch's ops."""
    from fused_norm import composition

    # With the node, no call waits for Python, and none is too small.
    monkeypatch.setattr("fused_norm.ops.node.module", lambda: None)

    model, x = Model(), torch.randn(2, 9, 32)
    calls = watch(composition, "compute")
    for small, expected in ((False, 0), (None, 4), (True, 0)):
        torch._dynamo.reset()
        options = {"then": "eager"} | ({} if small is None else {"small": small})
        torch.compile(model, backend="fused_norm", options=options)(x)
        assert len(calls) == expected, options
        calls.clear()


def test_other_backends_may_follow() -> None:
    model = Model()
    assert_alike(model, torch.compile(model, backend="fused_norm", options={"then": "aot_eager"}))


@pytest.mark.parametrize("then", ["eager", "aot_eager"])
def test_checkpointing(then: str) -> None:
    model = Model(checkpoints=True)
    report = fn.explain(model, torch.randn(2, 9, 32), options={"then": then})
    assert len(report.fused) == 4, report
    assert_alike(model, torch.compile(model, backend="fused_norm", options={"then": then}))


def test_a_module_that_is_first_compiled_in_a_checkpoint() -> None:
    """What the pass runs to see its types saves nothing for the checkpoint."""
    model = Model()
    x = torch.randn(2, 9, 32)
    expected = step(model, model, x)
    for block in model.blocks:
        block.compile(backend="fused_norm", options={"then": "eager"})
    model.checkpoints = True
    for ours, own in zip(step(model, model, x), expected, strict=True):
        torch.testing.assert_close(ours, own, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
def test_cuda_graph_trees() -> None:
    """Small calls are fused, too: a graph starts them at no cost. Replays see new inputs."""
    model = Model().cuda()
    compiled = torch.compile(model, backend="fused_norm", mode="reduce-overhead")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        x = torch.randn(2, 9, 32, device="cuda")
        for ours, own in zip(step(model, compiled, x), step(model, model, x), strict=True):
            torch.testing.assert_close(ours, own, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference(mode: Any) -> None:
    model, x = Model().eval(), torch.randn(2, 9, 32)
    compiled = torch.compile(model, backend="fused_norm", options={"then": "eager"})
    with mode():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)


def test_hooks_act() -> None:
    model = Model()
    model.blocks[0].norm1.register_forward_hook(lambda module, args, output: output * 2)
    assert_alike(model, torch.compile(model, backend="fused_norm", options={"then": "eager"}))


def test_compiled_autograd() -> None:
    model = Model()
    compiled = torch.compile(model, backend="fused_norm", options={"then": "aot_eager"})
    x = torch.randn(2, 9, 32)
    own = step(model, model, x)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        ours = step(model, compiled, x)
    for a, b in zip(ours, own, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
