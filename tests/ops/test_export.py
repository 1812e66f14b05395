"""Programs that leave Python or this machine: `.pt2` files, AOTInductor, PyTorch's ops, ONNX."""

from __future__ import annotations

import functools
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from compiling import ITS_OWN_WARNINGS
from processes import run_python
from torch import Tensor, nn

import fused_norm as fn

pytestmark = ITS_OWN_WARNINGS

OPS = {
    "fused_norm.add_statistics.default",
    "fused_norm.norm_linear_forward.default",
}


class Model(nn.Module):
    """Every op that inference takes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = fn.LayerNormLinear(8, 8)
        self.mlp = fn.LayerNormMLP(8, 16, activation="gelu_tanh")
        self.parts = fn.LayerNormLinear(
            8, 8, normalization="RMSNorm", parameters_split=("q", "k"), return_layernorm_output=True
        )
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.mlp(self.first(x), x)
        y, z = self.parts(h)
        total, statistics = fn.linear_add(y + z, self.last.weight, self.last.bias, h)
        return fn.norm_linear(
            total, self.last.weight, statistics=statistics, activation="swiglu"
        ).sigmoid()


class Rows(nn.Module):
    """The Spiral language's ops."""

    def forward(self, x: Tensor) -> Tensor:
        return fn.trainable_eps_layer_norm(x, x[0, :1]) + fn.composed.layer_norm(x)


X = torch.linspace(-1, 1, 24).view(3, 8) ** 3


@functools.cache
def exported() -> tuple[Model, torch.export.ExportedProgram]:
    model = Model()
    rows = torch.export.Dim("rows", min=2, max=4096)
    return model, torch.export.export(model, (X,), dynamic_shapes=({0: rows},))


def ops(program: torch.export.ExportedProgram) -> set[str]:
    return {str(node.target) for node in program.graph.nodes if node.op == "call_function"}


def run(script: str) -> subprocess.CompletedProcess[str]:
    return run_python("-W", "ignore", "-c", textwrap.dedent(script))


def test_programs_hold_what_inference_takes() -> None:
    """Regression: of a model in training they held what is kept for a backward.

    And where parameters require gradients, autograd followed what the kernels are made of.
    """
    model, program = exported()
    found = {op for op in ops(program) if op.startswith("fused_norm")}
    assert found == OPS
    op = torch.ops.fused_norm.norm_linear_forward.default
    calls = [node for node in program.graph.nodes if node.target is op]
    assert len(calls) == 4
    assert not any(node.args[-1] for node in calls)
    x = torch.randn(7, 8)
    torch.testing.assert_close(program.module()(x), model(x))


class OneBias(nn.Module):
    """Two layers, of which one has a bias, and an output that nothing may read."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        layers, norm = [self.q, self.k], self.norm
        (q, k), _ = fn.norm_linear(
            x,
            [layer.weight for layer in layers],
            [layer.bias for layer in layers],
            norm_weight=norm.weight,
            norm_bias=norm.bias,
            residual=x.sin(),
            return_sum=True,
        )
        return q * k


def gradients(module: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
    """Return what a step of training makes, and the second derivative along it."""
    module.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    y = module(x)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    dx.square().sum().backward()
    found = {name: p.grad for name, p in module.named_parameters()}
    return {"y": y.detach(), "dx": dx.detach(), "x": x.grad, **found}


class Heads(nn.Module):
    """Rotations of queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gamma = nn.Linear(8, 12, bias=False), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        rotary = torch.linspace(0, 1, 12).to(x).view(3, 4).cos(), x[:, :4].detach()
        weights = list(self.layer.weight.split(4))
        norms = {"q_norm": self.gamma, "k_norm": self.gamma}
        q, k, v = fn.norm_qkv(x, weights, head_dim=4, rotary=rotary, **norms)
        return torch.cat([q, k, v]).flatten(1)


@pytest.mark.filterwarnings("error:.*an autograd kernel was not registered:UserWarning")
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("kind", [Model, Rows, OneBias, Heads])
def test_programs_can_be_trained(kind: type[nn.Module], strict: bool) -> None:
    """Regression: our ops in a program passed no gradient on, with a warning only."""
    torch.manual_seed(0)
    model = kind().double()
    x = X.double()
    program = torch.export.export(model, (x,), strict=strict)
    assert any(op.startswith("fused_norm.") for op in ops(program))
    own = gradients(model, x)
    found = gradients(program.module(), x)
    assert found.keys() == own.keys()
    for name, gradient in own.items():
        torch.testing.assert_close(found[name], gradient, msg=name)


class Loss(nn.Module):
    """A loss whose op has no gradients where only the op is left."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        target = torch.arange(3)
        return fn.linear_cross_entropy(x, self.layer.weight, target) + x.sum()


class In8Bits(Loss):
    def forward(self, x: Tensor) -> Tensor:
        rows, weight = x.repeat(1, 2), self.layer.weight.repeat(1, 2)
        return fn.norm_linear(rows, weight, recipe="rowwise").sum() + x.sum()


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("kind", [Loss, In8Bits])
def test_programs_say_what_cannot_be_trained(kind: type[nn.Module], strict: bool) -> None:
    """Regression: the gradient was that of the sum of x alone."""
    model = kind()
    module = torch.export.export(model, (X,), strict=strict).module()
    y = module(X)
    torch.testing.assert_close(y, model(X))
    with pytest.raises(RuntimeError, match="has no gradients in an exported program"):
        y.backward()


def test_only_exports_have_autograd_see_ops() -> None:
    """A function of Python for it takes as long as a small call."""
    code = """
import torch, fused_norm as fn
def is_seen():
    name = "fused_norm::norm_linear_forward"
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, "Autograd")
class Model(torch.nn.Module):
    def forward(self, x):
        return fn.norm_linear(x, x)
x = torch.randn(4, 4)
torch.compile(Model(), backend="aot_eager")(x)
assert not is_seen()
torch.export.export(Model(), (x,))
assert is_seen()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_compiled_programs_can_be_trained() -> None:
    torch.manual_seed(0)
    model = OneBias()
    module = torch.export.export(model, (X,)).module()
    compiled = torch.compile(module, backend="aot_eager")
    for each in (compiled, model):
        each(X).square().sum().backward()
    for name, p in module.named_parameters():
        torch.testing.assert_close(p.grad, model.get_parameter(name).grad, msg=name)


def test_programs_under_transforms() -> None:
    model = OneBias().double()
    module = torch.export.export(model, (X.double(),)).module()
    found, own = (
        torch.func.jacrev(lambda x, each=each: each(x).sum(0))(X.double())
        for each in (module, model)
    )
    torch.testing.assert_close(found, own)


def test_decompositions_reach_the_ops_of_pytorch(tmp_path: Path) -> None:
    model, program = exported()
    program = program.run_decompositions(fn.decompositions())
    assert all(op.startswith(("aten.", "<built-in")) for op in ops(program)), ops(program)
    x = torch.randn(7, 8)
    torch.testing.assert_close(program.module()(x), model(x))
    torch.export.save(program, tmp_path / "model.pt2")
    torch.save((x, model(x).detach()), tmp_path / "expected.pt")
    result = run(
        f"""
        import sys, torch
        x, expected = torch.load("{tmp_path}/expected.pt")
        y = torch.export.load("{tmp_path}/model.pt2").module()(x)
        torch.testing.assert_close(y, expected)
        assert "fused_norm" not in sys.modules
        """
    )
    assert result.returncode == 0, result.stderr


def test_decompositions_of_rows() -> None:
    program = torch.export.export(Rows(), (X,))
    assert sum(op.startswith("fused_norm.") for op in ops(program)) == 4
    program = program.run_decompositions(fn.decompositions())
    assert all(op.startswith(("aten.", "<built-in")) for op in ops(program)), ops(program)
    torch.testing.assert_close(program.module()(X), Rows()(X))


def test_files_ask_for_the_package(tmp_path: Path) -> None:
    model, program = exported()
    path = tmp_path / "model.pt2"
    torch.export.save(program, path)
    loaded = torch.export.load(path)
    torch.testing.assert_close(loaded.module()(X), model(X))
    result = run(f"import torch; torch.export.load({str(path)!r})")
    assert result.returncode != 0
    assert "the custom op is not registered" in result.stderr
    assert "torch.ops.fused_norm." in result.stderr


@pytest.mark.slow
def test_aot_inductor(tmp_path: Path) -> None:
    model, program = exported()
    path = torch._inductor.aoti_compile_and_package(
        program, package_path=str(tmp_path / "model.pt2")
    )
    compiled = torch._inductor.aoti_load_package(path)
    for rows in (3, 7):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(compiled(x), model(x))


# ONNX's own packages.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("model", [Model(), Rows()], ids=["Model", "Rows"])
def test_onnx(model: nn.Module) -> None:
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    program = torch.onnx.export(model.eval(), (X,), dynamo=True, verbose=False)
    assert {node.domain for node in program.model.graph} == {""}
    reference = pytest.importorskip("onnx.reference", reason="onnx is not installed")
    (y,) = reference.ReferenceEvaluator(program.model_proto).run(None, {"x": X.numpy()})
    torch.testing.assert_close(torch.from_numpy(y), model(X))
