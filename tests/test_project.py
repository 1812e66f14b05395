"""The project's files agree with each other: pins, tasks, and the commands of the README."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

import fused_norm

ROOT = Path(__file__).parents[1]


def load(name: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / name).read_text())


def requirements(lines: list[str]) -> dict[str, str]:
    """Split `name>=1` into the name and the versions."""
    pairs = (re.fullmatch(r"([A-Za-z0-9_-]+)\s*(.*)", line) for line in lines)
    return {pair[1]: pair[2] for pair in pairs if pair}


def pixi_requirements(table: dict[str, Any]) -> dict[str, str]:
    return {
        name: spec if isinstance(spec, str) else spec["version"]
        for name, spec in table.items()
        if name != "fused-norm"
    }


def test_pixi_and_pyproject_agree_on_packages() -> None:
    project, pixi = load("pyproject.toml"), load("pixi.toml")
    expected = requirements(project["project"]["dependencies"])
    expected |= requirements(project["dependency-groups"]["dev"])
    expected |= requirements(project["dependency-groups"]["docs"])
    del expected["poethepoet"]  # runs the tasks that pixi runs itself
    extras = expected.pop("fused-norm").strip("[]").split(",")
    assert pixi["pypi-dependencies"]["fused-norm"]["extras"] == extras
    assert set(extras) <= set(project["project"]["optional-dependencies"])
    for environment, features in pixi["environments"].items():
        given = pixi_requirements(pixi["pypi-dependencies"])
        for feature in features:
            tables = pixi["feature"][feature]
            given |= pixi_requirements(tables.get("pypi-dependencies", {}))
            if "pytorch-cpu" in (conda := tables.get("dependencies", {})):
                given["torch"] = conda["pytorch-cpu"]
        assert given == {name: spec for name, spec in expected.items() if ";" not in spec}, (
            environment
        )
    assert pixi["dependencies"]["python"] == project["project"]["requires-python"]


def test_a_user_gets_no_compiler() -> None:
    """A wheel has the kernels; a compiler, MAX and a debugger are asked for by name."""
    project = load("pyproject.toml")["project"]
    assert set(requirements(project["dependencies"])) == {"numpy", "rich", "torch"}
    extras = project["optional-dependencies"]
    assert set(extras) == {"compiler", "max", "peers", "plots"}
    assert not any("mojo" in requirements(extra) for extra in extras.values())


def test_the_toolchain_of_a_checkout_is_pinned_exactly() -> None:
    """MAX asks for the very compiler that it came with, and users may have the one before."""
    project = load("pyproject.toml")
    extras = project["project"]["optional-dependencies"]
    pins = requirements([*extras["max"], *project["dependency-groups"]["dev"]])
    for name in ("max", "mojo"):
        assert re.fullmatch(r"==\d+\.\d+\.\d+", pins[name]), name
    compiler = requirements(extras["compiler"])
    assert compiler["max-core"] == compiler["max-shmem-libs"].split(";")[0]
    lower, upper = re.fullmatch(r">=26\.(\d+),<26\.(\d+)", compiler["max-core"]).groups()
    assert int(lower) <= int(pins["max"].split(".")[1]) < int(upper)


def test_pixi_and_poe_have_the_same_tasks() -> None:
    poe = load("pyproject.toml")["tool"]["poe"]["tasks"]
    commands = {
        name: task["cmd"]
        if "cmd" in task
        else " && ".join(part["cmd"] for part in task["sequence"])
        for name, task in poe.items()
    }
    assert load("pixi.toml")["tasks"] == commands


def test_checks_find_what_they_run_in_a_fresh_environment() -> None:
    """`uv run poe check` builds the documentation, so uv installs what that takes unasked."""
    project = load("pyproject.toml")
    assert project["tool"]["uv"]["default-groups"] == ["dev", "docs"]
    assert "mkdocs build --strict" in project["tool"]["poe"]["tasks"]["docs"]["cmd"]
    assert '"mkdocs", "build", "--strict"' in (ROOT / "scripts/check.py").read_text()


def test_tasks_that_take_flags_pass_them_on() -> None:
    """Poe drops trailing arguments of everything but a single command; pixi, of tasks with args."""
    for name in ("p22", "layernorm", "test"):
        assert "cmd" in load("pyproject.toml")["tool"]["poe"]["tasks"][name]
        assert isinstance(load("pixi.toml")["tasks"][name], str)


def test_pixi_manifest_is_one() -> None:
    """What pixi's schema (v0.77) asks of the keys that the manifest uses."""
    pixi = load("pixi.toml")
    assert set(pixi) <= {
        *("workspace", "dependencies", "pypi-dependencies", "tasks", "environments", "feature"),
        *("activation", "pypi-options", "system-requirements", "target", "tool"),
    }
    assert pixi["workspace"].keys() >= {"channels", "platforms"}
    assert set(pixi["environments"]) == {"default", "amd", "cpu"}
    for name, features in pixi["environments"].items():
        assert re.fullmatch(r"[a-z\d-]+", name)
        assert set(features) <= set(pixi["feature"])
    for feature in pixi["feature"].values():
        assert set(feature) <= {"platforms", "dependencies", "pypi-dependencies", "tasks"}
    for name, command in pixi["tasks"].items():
        assert re.fullmatch(r"[^\s$]+", name)
        assert isinstance(command, str)
        assert command


@pytest.mark.skipif(shutil.which("pixi") is None, reason="pixi is not installed")
def test_pixi_reads_the_manifest() -> None:
    subprocess.run(["pixi", "task", "list"], cwd=ROOT, check=True, capture_output=True)


def test_ci_runs_the_commands_of_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    ci = (ROOT / ".ci" / "run").read_text()
    block = re.search(r"```bash\n(.*?)```", readme, re.DOTALL)
    assert block
    commands = [line.split("#")[0].strip() for line in block[1].splitlines()]
    assert commands == ["pip install uv", "uv run poe p22 --fused", "uv run poe test"]
    for command in commands[1:]:
        assert f"\n{command}\n" in ci


def test_the_reference_has_all_that_is_public() -> None:
    page = (ROOT / "docs/api.md").read_text()
    missing = [name for name in fused_norm.__all__ if not re.search(rf"^### {name}$", page, re.M)]
    assert missing == ["__version__"]
