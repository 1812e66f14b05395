"""What docs/architecture.md says: one record in three languages, imports that run one way."""

from __future__ import annotations

import ast
import ctypes
import importlib.util
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

from fused_norm import activations, composition, recipes
from fused_norm.call import head_record, record, rotary_record
from fused_norm.chain import kernels
from fused_norm.ops.node import NodeSpec

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "scripts/measure"))

from hopper_kernels import modules  # noqa: E402

CALL_H = (ROOT / "fused_norm/chain/call.h").read_text()
CALL_MOJO = (ROOT / "op/call.mojo").read_text()
MATRICES_MOJO = (ROOT / "op/passes/matrices.mojo").read_text()
PARTS_MOJO = (ROOT / "op/gemm/sm90/parts.mojo").read_text()
PLAN_MOJO = (ROOT / "op/norm_linear/plan.mojo").read_text()
ACTIVATION_MOJO = (ROOT / "op/gemm/activation.mojo").read_text()
OPERANDS_H = (ROOT / "fused_norm/chain/operands.h").read_text()
CHAIN_H = (ROOT / "fused_norm/chain/chain.h").read_text()
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text()
EXTENDING = (ROOT / "docs/extending.md").read_text()

# Each may import those before it, and parts of itself.
PYTHON_LAYERS = [
    ["reference"],
    ["activations", "norms"],
    ["native", "recipes"],
    ["composition", "cross_entropy", "rotation"],
    ["call"],
    ["devices"],
    ["chain"],
    ["ops"],
    ["functional", "composed", "freeze", "head", "trainable_eps"],
    ["qkv"],
    ["modules", "models"],
    ["parser"],
    ["doctor", "bench", "tuning", "graphs"],
    ["__main__"],
]
MOJO_LAYERS = [
    ["call", "python", "team", "pages", "pdl", "rounding", "argument", "magnitudes"],
    ["device", "entry"],
    ["norms"],
    ["rows", "gemm"],
    ["passes"],
    ["norm_linear", "head", "rotary"],
    ["max", "puzzle"],
    ["register"],
]
DEEPEST_CHAIN = 16


def fields_in_c(struct: str) -> list[tuple[str, str]]:
    """Return the type and name of each field of a struct in call.h."""
    body = re.search(rf"struct {struct} \{{(.*?)\}};", CALL_H, re.S)
    assert body is not None
    fields = []
    for line in filter(None, (part.strip() for part in body[1].split(";"))):
        kind, names = line.split(maxsplit=1)
        fields += [(kind, name.strip(" *")) for name in names.split(",")]
    return fields


def fields_in_mojo(struct: str) -> list[tuple[str, str]]:
    text = MATRICES_MOJO if struct == "Matrix" else CALL_MOJO
    body = re.search(rf"^struct {struct}\(.*?(?=^struct |\Z)", text, re.M | re.S)
    assert body is not None
    return [(kind, name) for name, kind in re.findall(r"^    var (\w+): (\w+)$", body[0], re.M)]


@pytest.mark.parametrize(
    ("struct", "numbers"),
    [("Call", ["eps", "weight_offset", "y_one_scale"]), ("Part", []), ("Matrix", [])],
)
def test_record_is_one_in_three_languages(struct: str, numbers: list[str]) -> None:
    fields = getattr(record, struct)._fields_
    in_c, in_mojo = fields_in_c(struct), fields_in_mojo(struct)
    python = [name for name, _ in fields]
    assert [name for _, name in in_c] == python
    assert [name for _, name in in_mojo] == python
    for found in (
        [name for kind, name in in_c if kind == "double"],
        [name for kind, name in in_mojo if kind == "Float64"],
        [name for name, kind in fields if kind is ctypes.c_double],
    ):
        assert found == numbers
    assert {kind for kind, _ in in_mojo} <= {"Int", "Float64"}


@pytest.mark.parametrize(
    ("struct", "file", "python", "numbers"),
    [
        ("HeadCall", "op/head/call.mojo", head_record.HeadCall, head_record.NUMBERS),
        ("RotaryCall", "op/rotary/call.mojo", rotary_record.RotaryCall, rotary_record.NUMBERS),
    ],
)
def test_smaller_records_are_one_in_two_languages(
    struct: str, file: str, python: type[ctypes.Structure], numbers: tuple[str, ...]
) -> None:
    source = (ROOT / file).read_text()
    body = re.search(rf"^struct {struct}\(.*?(?=^comptime )", source, re.M | re.S)
    assert body is not None
    fields = re.findall(r"^    var (\w+): (\w+)$", body[0], re.M)
    assert [name for name, _ in fields] == [field[0] for field in python._fields_]
    assert tuple(name for name, kind in fields if kind == "Float64") == numbers


def test_fields_take_eight_bytes() -> None:
    assert record.Call.eps.offset == 8


def test_strategies_are_the_same_in_three_languages() -> None:
    mojo = dict(re.findall(r"^comptime (\w+) = (\d+)$", PLAN_MOJO, re.M))
    enum = re.search(r"enum Strategy : int64_t \{(.*?)\}", CALL_H)
    assert enum is not None
    names = [name.strip() for name in enum[1].split(",")]
    assert mojo == {name: str(number) for number, name in enumerate(names)}
    assert {name: str(getattr(record, name)) for name in names} == mojo


def test_limits_are_the_same_in_every_language() -> None:
    found: dict[str, int] = {}
    for names in re.findall(r"^constexpr int64_t (.*?);", CALL_H, re.M):
        found |= {n: int(v) for n, v in (part.split(" = ") for part in names.split(", "))}
    limits = ("LONGEST_ROW", "MOST_GROUPS", "MOST_KEPT", "MOST_PARTS", "MOST_MATRICES")
    gated = int(re.findall(r"^comptime GATED = (\d+)$", ACTIVATION_MOJO, re.M)[0])
    relu = int(re.findall(r"^comptime RELU = Int32\((\d+)\)$", ACTIVATION_MOJO, re.M)[0])
    assert relu == activations.number_of("relu")
    others = {"GATED": gated, "NO_NORM": record.NO_NORM, "RELU": relu}
    of_blocks = re.findall(r"^comptime (SCALE_BLOCK|VECTORS|SQUARES) = (\d+)$", CALL_MOJO, re.M)
    assert len(of_blocks) == 3
    others |= {name: int(value) for name, value in of_blocks}
    assert others["SCALE_BLOCK"] == recipes.BLOCK
    assert found == {name: getattr(record, name) for name in limits} | others
    assert gated == activations.GATED
    parts = re.findall(r"^comptime MOST_PARTS = (\d+)$", PARTS_MOJO, re.M)
    assert [int(most) for most in parts] == [record.MOST_PARTS]
    matrices = re.findall(r"^comptime MOST_MATRICES = (\d+)$", MATRICES_MOJO, re.M)
    assert [int(most) for most in matrices] == [record.MOST_MATRICES]


def test_operands_are_the_same_in_two_languages() -> None:
    """Their order, their forms, and the record's names for them and their gradients."""
    enum = re.search(r"enum Place : size_t \{(.*?)\}", CHAIN_H, re.S)
    assert enum is not None
    *places, end = [name.strip() for name in enum[1].split(",")]
    named = composition.NAMED
    assert [place.lower() for place in places] == list(named)
    assert end == "NAMED"
    table = re.findall(
        r"\{(\w+), Form::(\w+), &Call::(\w+), (?:&Call::(\w+)|nullptr)\}", OPERANDS_H
    )
    assert {place.lower(): form.lower() for place, form, _, _ in table} == composition.FORMS
    assert list(composition.FORMS) == list(named[1 : 1 + len(composition.FORMS)])
    fields = {name for name, _ in record.Call._fields_}
    for place, form, address, gradient in table:
        name = place.lower()
        assert address == name
        assert gradient == ("" if form in ("ROWS", "STATISTICS") else f"d{name}")
        assert {address, gradient} <= fields | {""}


@pytest.mark.parametrize("name", ["Question", "Answer"])
def test_what_the_chain_asks_is_the_same_in_two_languages(name: str) -> None:
    body = re.search(rf"struct {name} \{{(.*?)\}};", CHAIN_H, re.S)
    assert body is not None
    kinds = {"int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64, "const char": ctypes.c_char_p}
    kinds["const double"] = ctypes.c_int64
    fields = []
    for line in filter(None, (part.strip() for part in body[1].split(";"))):
        kind = next(kind for kind in kinds if line.startswith(kind))
        names = line.removeprefix(kind).split(",")
        fields += [(each.strip(" *"), kinds[kind]) for each in names]
    assert fields == list(getattr(kernels, name)._fields_)


def test_a_spec_is_the_same_in_two_languages() -> None:
    """Python gives the node its bytes."""
    body = re.search(r"^struct Spec \{(.*?)^$", CHAIN_H, re.M | re.S)
    assert body is not None
    kinds = {"int64_t": ctypes.c_int64, "double": ctypes.c_double, "bool": ctypes.c_bool}
    fields = []
    for kind, names in re.findall(r"(\w+) ([^;]+);", body[1]):
        for name, count in re.findall(r"(\w+)(?:\[(\d+)\])? = ", names):
            fields.append((name, kinds[kind] * int(count) if count else kinds[kind]))
    assert fields == list(NodeSpec._fields_)
    assert ctypes.sizeof(NodeSpec) == sum(ctypes.sizeof(kind) for _, kind in fields)


# Each may include those before it.
C_LAYERS = [
    ["call", "chain"],
    ["tensor"],
    ["operations"],
    ["kernels"],
    ["operands", "choice"],
    ["linear", "folds", "rows"],
    ["grouped", "eight_bits"],
    ["eight_bits_quantize"],
    ["forward", "parameters"],
    ["backward"],
    ["gradients"],
    ["family_ops"],
    ["row_ops"],
    ["eight_bits_products"],
    ["eight_bits_ops"],
    ["eight_bits_gradients", "eight_bits_layers", "eight_bits_norm"],
    ["eight_bits_mlp"],
]


def test_c_includes_run_one_way() -> None:
    folder = ROOT / "fused_norm/chain"
    includes = {
        path.stem: set(re.findall(r'^#include "(\w+)\.h"$', path.read_text(), re.M))
        for path in folder.glob("*.h")
    }
    assert_one_way(includes, C_LAYERS)
    # The node calls the chain by its address, and knows nothing of kernels.
    node = re.findall(r'^#include "(\w+)\.h"$', (folder / "node.cpp").read_text(), re.M)
    assert node == ["chain"]


def test_code_size_is_what_the_page_says() -> None:
    spec = importlib.util.spec_from_file_location("code_size", ROOT / "scripts/pages/code_size.py")
    assert spec is not None
    assert spec.loader is not None
    code_size = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(code_size)
    for layer, size in code_size.sizes().items():
        row = re.search(rf"^\| {re.escape(layer)} \| ([\d,]+) \|$", ARCHITECTURE, re.M)
        assert row is not None, layer
        assert abs(int(row[1].replace(",", "")) - size) <= 0.1 * size + 50, layer


@pytest.mark.parametrize("page", ["architecture.md", "extending.md"])
def test_pages_name_files_that_are_there(page: str) -> None:
    for name in re.findall(r"`([\w/]+/[\w./]+)`", (ROOT / "docs" / page).read_text()):
        places = [ROOT / each for each in ("", "fused_norm", "op/norm_linear")]
        assert "NAME" in name or any((place / name).exists() for place in places), name


def code_of(path: Path) -> str:
    """Return a file without its comments and docstrings."""
    text = path.read_text()
    if path.suffix == ".mojo":
        return re.sub(r"#[^\n]*", "", re.sub(r'""".*?"""', "", text, flags=re.S))
    if path.suffix != ".py":
        return re.sub(r"//[^\n]*", "", text)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return " ".join(
        token.string
        for token in tokens
        if token.type != tokenize.COMMENT and not token.string.startswith('"""')
    )


# Folders that take the family further, which the table leaves out.
OTHERS = {"graphs", "max", "models", "puzzle"}


def test_what_a_modulation_touches_is_what_the_page_says() -> None:
    """The files that name AdaLN's shift are those of the page, and few."""
    found = re.search(r"^A modulation .* (\d+) files:\n\n((?:(?:\d\.|  ) .*\n)+)", EXTENDING, re.M)
    assert found is not None
    listed = set(re.findall(r"`(\S+)`", found[2]))
    assert len(listed) == int(found[1]) <= 11
    named = set()
    for path in [*(ROOT / "fused_norm").rglob("*"), *(ROOT / "op").rglob("*.mojo")]:
        place = path.relative_to(ROOT)
        if path.suffix in (".py", ".h", ".cpp", ".mojo") and not OTHERS & set(place.parts):
            # Kernels name it as the record's: what else is a shift there shifts something else.
            words = r"\bd?shift\b|\bSHIFT\b"
            if path.suffix == ".mojo":
                words = r"\bcall\.d?shift\b|\bvar d?shift: Int$"
            if re.search(words, code_of(path), re.M):
                named.add(str(place))
    assert named == listed


def python_imports() -> dict[str, set[str]]:
    """Return the top-level parts of the package that each of its parts imports when imported."""
    found: dict[str, set[str]] = {}
    package = ROOT / "fused_norm"
    for path in package.rglob("*.py"):
        part = path.relative_to(package).parts[0].removesuffix(".py")
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.ImportFrom) or not node.module:
                continue
            parts = node.module.split(".")
            if parts[0] != "fused_norm":
                continue
            names = parts[1:2] or [alias.name for alias in node.names]
            found.setdefault(part, set()).update(names)
    return found


def assert_one_way(imports: dict[str, set[str]], layers: list[list[str]]) -> None:
    rank = {part: number for number, layer in enumerate(layers) for part in layer}
    parts = set(imports) | {name for names in imports.values() for name in names}
    assert parts <= set(rank), parts - set(rank)
    wrong = [
        f"{part} imports {name}"
        for part, names in imports.items()
        for name in names - {part}
        if rank[name] >= rank[part]
    ]
    assert not wrong


def test_python_imports_run_one_way() -> None:
    imports = python_imports()
    # And models, when it is first asked for.
    public = {"composed", "freeze", "functional", "head", "modules", "ops"}
    public |= {"qkv", "trainable_eps"}
    assert imports.pop("__init__") == public
    for names in imports.values():
        # `from fused_norm import name` of something public is for those at the end of the line.
        names -= {"fused_layernorm_linear", "frozen_parameters", "trainable_eps_layer_norm"}
    assert_one_way(imports, PYTHON_LAYERS)


def test_models_are_imported_when_asked_for() -> None:
    script = """
import sys
import fused_norm as fn

assert "fused_norm.models" not in sys.modules
assert {*fn.__all__} <= {*dir(fn)}
assert fn.models.optimize is fn.optimize
assert callable(fn.explain)
assert not hasattr(fn, "another")
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], cwd=ROOT, check=True)


def test_mojo_imports_run_one_way() -> None:
    parts: dict[str, set[str]] = {}
    for name, imports in modules().items():
        if name.startswith("op.") and not name.endswith("__init__"):
            part = name.split(".")[1]
            parts.setdefault(part, set()).update(i.split(".")[1] for i in imports)
    assert_one_way(parts, MOJO_LAYERS)


def test_mojo_has_no_cycle_and_no_deep_chain() -> None:
    imports = modules()

    def chain(name: str, above: tuple[str, ...] = ()) -> list[str]:
        assert name not in above, f"cycle: {' -> '.join((*above, name))}"
        below = [chain(i, (*above, name)) for i in imports[name]]
        return [name, *max(below, key=len, default=[])]

    longest = max((chain(name) for name in imports), key=len)
    assert len(longest) <= DEEPEST_CHAIN, " -> ".join(longest)


@pytest.mark.parametrize("part", ["gemm/cpu", "gemm/sm90"])
def test_products_know_no_norm(part: str) -> None:
    for path in (ROOT / "op" / part).rglob("*.mojo"):
        assert not re.search(r"gamma|beta\b|layer.?norm", path.read_text(), re.I), path


def launched_kernels() -> list[tuple[Path, str]]:
    """Return each GPU kernel that Mojo code launches, with the file that defines it."""
    texts = {
        path: path.read_text()
        for path in [*(ROOT / "op").rglob("*.mojo"), *(ROOT / "tutorial/worklog").glob("*.mojo")]
    }
    launched = set()
    for text in texts.values():
        names = dict(re.findall(r"^ *comptime (\w+) = (\w+)\[", text, re.M))
        for name in re.findall(r"\b(?:compile|enqueue)_function\[\s*(\w+)", text):
            launched.add(names.get(name, name))
    return [
        (path, name)
        for path, text in sorted(texts.items())
        for name in re.findall(r"^def (\w+)\b", text, re.M)
        if name in launched
    ]


def test_kernels_say_their_grid_and_block() -> None:
    kernels = launched_kernels()
    assert len(kernels) > 15
    for path, name in kernels:
        docstring = re.search(rf'^def {name}\b.*?"""(.*?)"""', path.read_text(), re.M | re.S)
        assert docstring is not None, f"{path}: {name}"
        assert {"Grid:", "Block:"} <= set(docstring[1].split()), f"{path}: {name}"


def test_one_function_knows_whether_a_compiler_calls() -> None:
    """PyTorch's own says so of less in older releases: a graph quantized frozen weights again."""
    users = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "fused_norm").rglob("*.py")
        if "compiler.is_compiling" in path.read_text()
    ]
    assert users == ["fused_norm/ops/registration.py"]
