"""What the site's hooks do to a page: each name once in its contents, a search without code."""

from __future__ import annotations

import sys
from pathlib import Path, PurePosixPath
from types import SimpleNamespace

import pytest

for needed in ("mkdocs", "latex2mathml"):
    pytest.importorskip(needed, reason=f"{needed} is not installed: uv sync")
ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts/pages"))

import site_hooks  # noqa: E402


def item(name: str, *children: SimpleNamespace) -> SimpleNamespace:
    return SimpleNamespace(id=name, children=list(children))


def test_an_option_breaks_nowhere() -> None:
    """Regression: browsers broke `--target` behind its hyphens."""
    content = "<code>--target cpu</code> <code>a --b</code> <code>-x</code> <code>--</code>"
    found = site_hooks.on_page_content(content, SimpleNamespace(toc=[]))
    expected = content.replace("--target", '<span class="option">--target</span>')
    assert found == expected.replace("-x", '<span class="option">-x</span>')


def test_the_contents_name_each_function_once() -> None:
    """Regression: below the page's heading of a function stood mkdocstrings' own."""
    module = item("fused_norm.modules.Module", item("fused_norm.modules.Module.forward"))
    page = item("functions", item("module", module), item("function", item("fused_norm.function")))
    content = "<th>#</th><td><code>test_a.py::test_b</code></td><code>plain</code>"
    found = site_hooks.on_page_content(content, SimpleNamespace(toc=[page]))
    first, second = page.children
    assert [child.id for child in first.children] == ["fused_norm.modules.Module.forward"]
    assert second.children == []
    assert found == content.replace("::", "::<wbr>").replace("<th>", '<th class="numbers">')


def test_the_search_leaves_out_code_and_lists_of_files() -> None:
    folder = PurePosixPath("tutorial/puzzle")
    for text in (site_hooks._listed(folder), site_hooks._highlighted(folder / "driver.py")):
        assert text.startswith("---\nsearch: {exclude: true}\n")
