"""The puzzle to fill in: the same as the solution but for the parts to fill in."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest
from processes import run_python

ROOT = Path(__file__).resolve().parents[2]
PROBLEM = ROOT / "problems" / "p22" / "op"
SOLUTION = ROOT / "op" / "puzzle"
PARTS = {"layernorm.mojo": 1, "transpose.mojo": 1, "fused.mojo": 2, "fused_backward.mojo": 6}

# A part to fill in: a comment that says so and how long it is, with hints below it.
PART = re.compile(r"^    # FILL IN \(roughly (\d+) lines\)\n(?:    # .*\n)*", re.MULTILINE)


@pytest.fixture
def problem(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("problem")


def test_problem_is_what_the_solution_gives(problem: ModuleType) -> None:
    assert problem.main(["--check"]) == 0
    assert {path.name for path in PROBLEM.iterdir()} == {path.name for path in SOLUTION.iterdir()}
    assert {path.name for path in PROBLEM.iterdir() if not path.is_symlink()} == set(PARTS)


def test_problem_is_written_anew(
    problem: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anything else at its path: another text, a copy for a link, a file that nothing gives."""
    monkeypatch.setattr(problem, "PROBLEM", tmp_path)
    (tmp_path / "fused.mojo").write_text("another")
    (tmp_path / "linear.mojo").write_text((SOLUTION / "linear.mojo").read_text())
    (tmp_path / "old.mojo").touch()
    assert problem.main(["--check"]) == 1
    assert problem.main([]) == 0
    assert problem.main(["--check"]) == 0
    for path in PROBLEM.iterdir():
        assert (tmp_path / path.name).read_text() == path.read_text()
    assert (tmp_path / "linear.mojo").resolve() == SOLUTION / "linear.mojo"
    assert not (tmp_path / "old.mojo").exists()


@pytest.mark.parametrize("name", PARTS)
def test_agrees_outside_the_parts(name: str) -> None:
    problem = (PROBLEM / name).read_text()
    solution = (SOLUTION / name).read_text()
    # Text before the first part, lines of it, text after it, lines of the second, and so on.
    pieces = PART.split(problem)
    given, lengths = pieces[0::2], [int(length) for length in pieces[1::2]]
    assert len(lengths) == PARTS[name]
    assert all(piece.strip() for piece in given[:-1])

    hints = [part[0] for part in PART.finditer(problem)]
    pattern = re.escape(given[0])
    for hint, piece in zip(hints, given[1:], strict=True):
        pattern += re.escape(hint) + r"\n(.+?) *# END\n" + re.escape(piece)
    match = re.fullmatch(pattern, solution, re.DOTALL)
    assert match, f"{name} differs outside the parts to fill in"
    for body, length in zip(match.groups(), lengths, strict=True):
        code = [line for line in body.splitlines() if line.strip() and "    # " not in line]
        assert len(code) == length


@pytest.mark.slow
def test_compiles_unfilled_and_is_incorrect() -> None:
    result = run_python("solutions/p22/p22.py", "--problem", "--fused", cwd=ROOT)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "warning" not in result.stderr
    assert re.search(r"^   - CPU: +INCORRECT$", result.stdout, re.MULTILINE)
    assert re.search(r"^   - Reference: +OK CORRECT$", result.stdout, re.MULTILINE)
    assert "Overall Correctness: SOME INCORRECT" in result.stdout
