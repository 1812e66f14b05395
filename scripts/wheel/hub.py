"""Make a repository of Hugging Face's `kernels` from a wheel.

    python scripts/wheel/hub.py WHEEL [--output build/hub]

`kernels.get_local_kernel` loads the folder, and `hf upload` would publish it. A wheel of sources
becomes the variants `torch-cpu` and `torch-cuda`, whose kernels are compiled on first use; a wheel
with kernels those of its machine, for PyTorch 2.11 and later by the stable ABI: the CPU's, and one
for each major version of CUDA if it has GPU kernels.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import zipfile
from pathlib import Path

import fused_norm

TEMPLATE = Path(__file__).parent / "hub_kernel"
NAME = "fused-norm"
# The major version of the interface, by which the Hub names branches.
INTERFACE = 1
PURE = "none-any"
# The oldest of each major version that PyTorch 2.11 comes with: `kernels` takes later minor ones.
CUDA = ("cu126", "cu130")


def main(arguments: list[str] | None = None) -> int:
    """Make the repository and return an exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--output", type=Path, default=Path("build/hub"))
    options = parser.parse_args(arguments)
    for path in make(options.wheel, options.output):
        print(path)
    return 0


def make(wheel: Path, folder: Path) -> list[Path]:
    """Write the variants that a wheel serves and return their folders.

    Args:
        wheel: The wheel.
        folder: The repository.
    """
    return [_variant(wheel, folder / "build" / name, name) for name in variants(wheel)]


def variants(wheel: Path) -> list[str]:
    """Return the names of the variants that a wheel serves, as `kernels` parses them.

    Args:
        wheel: The wheel.
    """
    if PURE in wheel.name:
        return ["torch-cpu", "torch-cuda"]
    machine = wheel.stem.split("manylinux_2_35_")[1]
    with zipfile.ZipFile(wheel) as archive:
        has_gpu = any("/prebuilt/" in name and "-nvidia_" in name for name in archive.namelist())
    backends = ["cpu", *(CUDA if has_gpu else ())]
    return [f"torch-stable-abi211-{backend}-{machine}-linux" for backend in backends]


def _variant(wheel: Path, folder: Path, name: str) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    # The licenses stay; the rest of the metadata is a wheel's.
    (information,) = folder.glob("*.dist-info")
    shutil.move(information / "licenses", folder / "licenses")
    shutil.rmtree(information)
    for path in TEMPLATE.glob("*.py"):
        text = path.read_text().replace("{version}", fused_norm.__version__)
        (folder / path.name).write_text(text)
    backend = "cpu" if "-cpu" in name else "cuda"
    metadata = {
        "id": f"_fused_norm_{backend}_{fused_norm.__version__.replace('.', '_')}",
        "name": NAME,
        "version": INTERFACE,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": backend},
    }
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=1) + "\n")
    return folder


if __name__ == "__main__":
    sys.exit(main())
