"""docs/reliability.md is what its script writes; each wrong edit still finds its text."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def scripts() -> tuple[ModuleType, ModuleType, ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "scripts")
        patch.syspath_prepend(ROOT / "scripts/pages")
        import mutate
        import mutations
        import reliability_page

    return mutate, mutations, reliability_page


def test_page_is_the_scripts(scripts: tuple[ModuleType, ...]) -> None:
    """But for the numbers of tests, which take long to count."""
    page = scripts[2].PAGE.read_text()
    count = re.compile(r"\) \| \d+ \|")
    assert count.sub("#", page) == count.sub("#", scripts[2].page(Counter()))
    assert ") | 0 |" not in page


def test_page_names_what_there_is(scripts: tuple[ModuleType, ...]) -> None:
    for where in scripts[2].TRIED:
        assert (ROOT / where).is_file()
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for name in re.findall(r"`(test_\w+)[\[`]", scripts[2].FIXED):
        assert f"def {name}(" in tests, name
    files = {path.name: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    for name in (name for shown in scripts[2].PROMISES.values() for name in shown):
        file, _, test = name.partition("::")
        assert f"def {test or 'test_'}" in files[file], name


def test_edits_find_their_text(scripts: tuple[ModuleType, ...]) -> None:
    names = set()
    for mutation in scripts[1].MUTATIONS:
        assert (ROOT / mutation.file).read_text().count(mutation.old) == 1, mutation.name
        assert mutation.old != mutation.new
        assert (ROOT / mutation.tests[0]).is_file()
        if mutation.target == "gpu" and mutation.file.endswith(".mojo"):
            assert mutation.tests in scripts[1].KERNELS, mutation.name
        names.add(mutation.name)
    assert len(names) == len(scripts[1].MUTATIONS) >= 20


def test_every_edit_was_noticed(scripts: tuple[ModuleType, ...]) -> None:
    """As recorded; a GPU's may wait for one. An edit that was changed has to be made again."""
    recorded = scripts[0].recorded()
    assert json.loads(scripts[0].RESULTS.read_text()) == list(recorded.values())
    for mutation in scripts[1].MUTATIONS:
        wanted = {"noticed"} if mutation.target == "cpu" else {"noticed", "not run"}
        assert recorded[mutation.name]["result"] in wanted, mutation.name


@pytest.mark.parametrize("part", ["file", "old", "new", "tests"])
def test_an_edit_that_changed_was_not_made(
    scripts: tuple[ModuleType, ...], part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the page gave results of edits whose text had changed after them."""
    first, *others = scripts[1].MUTATIONS
    changed = replace(first, **{part: ("tests/other.py",) if part == "tests" else "other"})
    monkeypatch.setattr(scripts[0], "MUTATIONS", [changed, *others])
    recorded = scripts[0].recorded()
    assert recorded[first.name]["result"] == "not run"
    assert f"| {first.name} | {Path(changed.file).name} | not run |  |" in scripts[2].page(
        Counter()
    )
