"""The README and the guide do what they say: commands run from the text, messages are the code's.

A comment before a fenced block says what a reader need not see:

    <!-- first CODE -->      Python that runs before the block
    <!-- slow: REASON -->    with --all only
    <!-- not run: REASON --> never here; the reason shows among the skipped tests
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.png import description, digest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs/guide").glob("*.md"))]
FENCE = re.compile(
    r"(?:^<!-- (?P<note>first\b|slow:|not run:)(?P<words>(?:(?!-->).)*)-->\n)?"
    r"^```(?P<language>\w+)\n(?P<code>.*?)^```",
    re.DOTALL | re.MULTILINE,
)
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)\s]*)?\)|(?:src|srcset)=\"([^\"]+)\"")
# Of the dependency group `models`, which not everyone installs.
OPTIONAL = {"accelerate", "diffusers", "peft", "timm"}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    code: str
    note: str
    words: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(language: str) -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in FENCE.finditer(text):
            line = text.count("\n", 0, match.start("code"))
            note, words = (match["note"] or "").rstrip(":"), (match["words"] or "").strip()
            found.append(Block(page, line, match["language"], match["code"], note, words))
    return [block for block in found if block.language == language]


def cases(language: str) -> list[Any]:
    return [
        pytest.param(block, id=str(block), marks=[pytest.mark.slow] if block.note == "slow" else [])
        for block in blocks(language)
    ]


def skip_unless_run(block: Block) -> None:
    if block.note == "not run":
        assert block.words, "a reason"
        pytest.skip(f"{block} is not run: {block.words}")


class Notebook:
    """The Python of a page, whose blocks go on from one another."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {"__name__": "__page__"}
        self.done: set[Block] = set()

    def run(self, block: Block) -> None:
        for each in blocks("python"):
            if each.page == block.page and each.line <= block.line and each not in self.done:
                if each.note == "slow" and each != block:
                    continue
                self.done.add(each)
                if each.note != "not run":
                    self._run(each)

    def _run(self, block: Block) -> None:
        if block.note == "first":
            exec(compile(block.words, f"{block} (first)", "exec"), self.names)
        # Line numbers are those of the page.
        code = "\n" * block.line + block.code
        try:
            exec(compile(code, str(block.page), "exec"), self.names)
        except ModuleNotFoundError as error:
            if error.name not in OPTIONAL:
                raise
            pytest.skip(f"{error.name} is not installed")


@pytest.fixture(scope="module")
def notebooks() -> dict[Path, Notebook]:
    return {page: Notebook() for page in PAGES}


# transformers' own, of names that it still uses; PyTorch's own, of a block compiled by itself.
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("block", cases("python"))
def test_python(block: Block, notebooks: dict[Path, Notebook]) -> None:
    skip_unless_run(block)
    notebooks[block.page].run(block)


@pytest.mark.parametrize("block", cases("bash"))
def test_commands(block: Block) -> None:
    skip_unless_run(block)
    here = Path(sys.executable).parent
    path = os.pathsep.join([str(here), os.environ["PATH"]])
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}
    for line in block.code.splitlines():
        # What `uv run` would find is installed here already.
        command = shlex.split(line.removeprefix("uv run "), comments=True)
        if command[0] == "poe" and shutil.which("poe", path=path) is None:
            pytest.skip("poe is not installed")
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"


def test_every_language_is_run() -> None:
    languages = {m["language"] for page in PAGES for m in FENCE.finditer(page.read_text())}
    assert languages == {"python", "bash"}


def pages_of_repository() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [ROOT / name for name in listed.stdout.split() if (ROOT / name).is_file()]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout")
def test_links_lead_somewhere() -> None:
    missing = []
    for page in pages_of_repository():
        text = re.sub(
            r"^```.*?^```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL | re.MULTILINE
        )
        for target in (a or b for a, b in LINK.findall(text)):
            if not re.match(r"[a-z]+:", target) and not (page.parent / target).exists():
                missing.append(f"{page.relative_to(ROOT)}: {target}")
    assert missing == []


def test_readme_links_every_page() -> None:
    linked = {a for a, _ in LINK.findall((ROOT / "README.md").read_text())}
    pages = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")}
    assert pages - linked == set()


def templates() -> list[tuple[re.Pattern[str], int]]:
    """Return every text of the package as a pattern, and how many of its letters are given."""
    found = []
    for path in (ROOT / "fused_norm").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [p.value if isinstance(p, ast.Constant) else "%s" for p in node.values]
                text = "".join(map(str, parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value
            else:
                continue
            words = re.sub(r"\s+", " ", text.replace("`", "")).strip()
            pattern = ".*".join(map(re.escape, words.split("%s")))
            found.append((re.compile(pattern), len(words.replace("%s", ""))))
    return found


def test_troubleshooting_has_the_messages_of_the_code() -> None:
    page = (ROOT / "docs/guide/troubleshooting.md").read_text()
    messages = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert len(messages) > 25
    known = templates()
    for message in messages:
        given = len(re.sub(r"<[^>]*>", "", message))
        found = [p for p, letters in known if p.fullmatch(message) and letters > 0.5 * given]
        assert found, f"the code says nothing like {message!r}"


def test_figures_are_those_of_the_script() -> None:
    """`python tutorial/tutorial_figures.py` draws them again."""
    images = sorted((ROOT / "docs/images").glob("tutorial-*.png"))
    page = (ROOT / "docs/tutorial.md").read_text()
    assert {image.name for image in images} == set(re.findall(r"images/(tutorial-\S+?\.png)", page))
    wanted = digest(ROOT / "tutorial/tutorial_figures.py")
    assert {description(image) for image in images} == {wanted}


def test_steps_in_graphs_are_those_measured() -> None:
    page = (ROOT / "docs/guide/cuda-graphs.md").read_text()
    rows = re.findall(r"^\| (\d+) x (\d+) x (\d+) \|(.*)\|$", page, re.M)
    assert len(rows) == 2
    measured = json.loads((ROOT / "benchmarks/results/h200-host.json").read_text())["measurements"]
    steps = {
        tuple(m["shape"]): {result["provider"]: result["timings"] for result in m["results"]}
        for m in measured
        if m["mode"] == "train"
    }
    for *sizes, cells in rows:
        found = steps[tuple(map(int, sizes))]
        expected = [
            f"{found[provider][clock]['median']:.0f} us"
            for provider in ("fused_norm", "eager")
            for clock in ("launch", "graph")
        ]
        assert [cell.strip() for cell in cells.split("|")] == expected
