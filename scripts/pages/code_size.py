"""Write how many lines of code each layer has into docs/architecture.md.

    python scripts/pages/code_size.py

Lines of Python, C++ and Mojo, docstrings and comments included, rounded to hundreds.
`tests/test_architecture.py` tells when the page is more than a tenth off.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks import markdown

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "architecture.md"
SUFFIXES = (".py", ".h", ".cpp", ".mojo")
# Each layer of the page, by the files and folders that it is.
LAYERS = {
    "what users call": (
        *("functional.py", "modules", "composed.py", "trainable_eps.py", "freeze.py"),
        *("composition.py", "reference.py", "norms.py", "activations.py", "__init__.py"),
        *("head.py", "cross_entropy.py", "qkv.py", "rotation.py", "recipes.py"),
    ),
    "models": ("models",),
    "ops": ("ops", "call"),
    "chain": ("chain", "devices"),
    "native": ("native",),
    "graphs (MAX)": ("graphs", "../op/max", "../op/register.mojo"),
    "tools": ("__main__.py", "doctor.py", "bench.py", "tuning"),
    "norm_linear": ("../op/norm_linear",),
    "gemm": ("../op/gemm",),
    "rows, norms, passes": ("../op/rows", "../op/norms", "../op/passes"),
    "head, rotary": ("../op/head", "../op/rotary"),
}


def sizes() -> dict[str, int]:
    """Return the lines of each layer."""
    return {
        layer: sum(map(lines, (ROOT / "fused_norm" / each for each in paths)))
        for layer, paths in LAYERS.items()
    }


def lines(path: Path) -> int:
    """Return the lines of code of a file, or of all files of a folder."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(len(f.read_text().splitlines()) for f in files if f.suffix in SUFFIXES)


def main() -> None:
    """Rewrite the table of the page."""
    rows = [[layer, f"{round(size, -2):,}"] for layer, size in sizes().items()]
    table = markdown.table(["layer", "lines"], rows)
    PAGE.write_text(markdown.filled(PAGE.read_text(), {"code size": f"\n{table}\n"}))


if __name__ == "__main__":
    main()
