"""The backend as users reach it: by name, through Inductor, exported, checkpointed, explained."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomllib
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fused_norm as fn
from fused_norm.models import backend

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
SMALL = {"small": True}


class Block(nn.Module):
    """A block of a transformer without its attention."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.RMSNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gate, self.up = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(self.norm1(x)).chunk(3, -1)
        x = x + self.out(torch.sigmoid(q) * k + v)
        z = self.norm2(x)
        return x + self.down(F.silu(self.gate(z)) * self.up(z))


class Model(nn.Module):
    def __init__(self, checkpoints: bool = False, count: int = 2) -> None:
        super().__init__()
        self.blocks, self.checkpoints = nn.ModuleList(Block() for _ in range(count)), checkpoints
        for p in self.parameters():
            nn.init.normal_(p, 0.5 if p.dim() == 1 else 0.0, 0.2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return x


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Register the backend where the checkout is not installed, and forget what was compiled."""
    from torch._dynamo.backends.registry import _COMPILER_FNS, lookup_backend, register_backend

    torch._dynamo.reset()
    if _COMPILER_FNS.get("fused_norm") is not backend:
        _COMPILER_FNS.pop("fused_norm", None)
        register_backend(backend, name="fused_norm")
    assert lookup_backend("fused_norm") is backend
    yield
    torch._dynamo.reset()


def step(model: nn.Module, run: Any, x: Tensor) -> list[Tensor]:
    """Return the output and every gradient."""
    x = x.detach().requires_grad_()
    model.zero_grad(set_to_none=True)
    y = run(x)
    y.backward(torch.linspace(-1, 1, y.numel(), device=y.device).view_as(y).to(y.dtype))
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


def assert_alike(model: nn.Module, run: Any, shape: tuple[int, ...] = (2, 9, 32)) -> None:
    x = torch.randn(shape)
    for ours, own in zip(step(model, run, x), step(model, model, x), strict=True):
        torch.testing.assert_close(ours, own, rtol=1e-4, atol=1e-4)


def test_entry_point_names_the_backend() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    points = project["entry-points"]["torch_dynamo_backends"]
    assert points == {"fused_norm": "fused_norm.models:backend"}


def test_import_is_light() -> None:
    code = (
        "import sys, fused_norm; print(sorted({'torch._dynamo', 'rich', 'sympy'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
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
def test_report_is_of_the_call_that_is_asked_about() -> None:
    """Small calls are left before Inductor, and not where options or a mode have them fused."""
    model, x = Model(), torch.randn(2, 9, 32)
    left = fn.explain(model, x)
    assert left.fused == []
    reason = "PyTorch's ops are faster for a call this small"
    assert left.summary() == f"0 of 4 norms fused in 1 graph: {reason} (4 of 4)"
    assert {site.implementation for site in fn.explain(model, x, options=SMALL).sites} == {
        "kernels"
    }
    assert {
        site.implementation for site in fn.explain(model, x, options={"then": "eager"}).sites
    } == {reason}
    assert len(fn.explain(model, x, mode="reduce-overhead").fused) == 4
    sizes = {size for s in fn.explain(model, x, dynamic=True).sites for size in s.shape}
    assert not sizes <= {"2", "9", "32"}
    with pytest.raises(RuntimeError, match="Either mode or options"):
        fn.explain(model, x, options=SMALL, mode="reduce-overhead")


@pytest.mark.as_dispatched
def test_rows_that_come_transposed_are_left_in_training() -> None:
    """Calls would copy them, and Inductor reads them in place; what a graph makes, it lays out."""

    class Behind(Model):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mT.contiguous().mT)

    x = torch.randn(2, 20000, 32)
    turned = x.mT.contiguous().mT
    why = "its rows are transposed in memory, and training would copy them"
    for model, given, reason in ((Model(), x, ""), (Model(), turned, why), (Behind(), x, "")):
        found = fn.explain(model, given, training=True)
        assert {site.reason for site in found.sites} == {reason}
        assert len(fn.explain(model, given, training=True, options=SMALL).fused) == 4
        with torch.no_grad():
            assert len(fn.explain(model, given).fused) == 4


def test_report_tells_training_from_inference() -> None:
    seen = []

    class Watched(Model):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(torch.is_grad_enabled())
            return super().forward(x)

    for training in (False, True):
        torch._dynamo.reset()
        fn.explain(torch.compiler.disable(Watched()), torch.randn(2, 9, 32), training=training)
    assert seen == [False, True]


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


def test_bfloat16_of_a_cpu_whose_instructions_only_pytorch_uses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`explain` says what `doctor` says."""
    monkeypatch.setattr(
        "fused_norm.chain.kernels.bfloat16_product", lambda: "avx512_bf16 and sse4a"
    )
    model, x = Model().bfloat16(), torch.randn(2, 9, 32, dtype=torch.bfloat16)
    reason = "PyTorch's products of bfloat16 use avx512_bf16 and sse4a here, and ours do not"
    assert reason in fn.explain(model, x).summary()
    assert {site.implementation for site in fn.explain(model, x, options=SMALL).sites} == {reason}
    with fn.batch_invariant():
        assert {site.implementation for site in fn.explain(model, x, options=SMALL).sites} == {
            "kernels"
        }


def test_other_backends_may_follow() -> None:
    model = Model()
    assert_alike(model, torch.compile(model, backend="fused_norm", options={"then": "aot_eager"}))


@pytest.mark.parametrize("then", ["eager", "aot_eager"])
def test_checkpointing(then: str) -> None:
    model = Model(checkpoints=True)
    report = fn.explain(model, torch.randn(2, 9, 32), options={"then": then})
    assert len(report.fused) == 4, report
    assert_alike(model, torch.compile(model, backend="fused_norm", options={"then": then}))


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


def test_report() -> None:
    report = fn.explain(Model(), torch.randn(2, 9, 32), options=SMALL)
    assert [site.path for site in report.sites] == [
        f"blocks.{i}.norm{j}" for i in range(2) for j in (1, 2)
    ]
    assert all(site.fused and site.bytes_saved > 0 for site in report.sites)
    assert all(site.ops_after < site.ops_before for site in report.sites if "mlp" in site.calls[0])
    data = json.loads(report.to_json())
    assert data["graphs"] == 1
    assert data["sites"][1]["calls"] == ["norm_mlp: residual, swiglu"]
    text = str(report)
    assert text.splitlines()[-1].startswith("4 of 4 norms fused in 1 graph: ")
    assert "blocks.0.norm1" in text


def test_report_says_why_not() -> None:
    report = fn.explain(nn.Sequential(nn.LayerNorm(8), nn.Tanh()), torch.randn(2, 8))
    assert report.sites[0].reason == "output read by no Linear: tanh"
    assert "left: output read by no Linear: tanh" in str(report)


def test_fast_path_of_pytorch_has_no_norms() -> None:
    """In inference PyTorch's encoder layer is one op, which can be switched off."""
    layer = nn.TransformerEncoderLayer(32, 2, 48, 0.0, batch_first=True, norm_first=True).eval()
    x = torch.randn(2, 5, 32)
    with torch.no_grad():
        expected = layer(x)
        report = fn.explain(layer, x)
        assert report.sites == []
        assert str(report).startswith(
            "0 of 0 norms fused in 1 graph: PyTorch computes 1 encoder layer"
        )
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            assert len(fn.explain(layer, x, options=SMALL).fused) == 2
            compiled = torch.compile(layer, backend="fused_norm", options={"then": "eager"})
            torch.testing.assert_close(compiled(x), expected, rtol=1e-5, atol=1e-5)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)


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
