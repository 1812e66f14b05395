"""python -m fused_norm doctor | build | bench: look at, prepare and measure this machine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from fused_norm import bench, doctor
from fused_norm.chain import library
from fused_norm.native import build as native
from fused_norm.native import cache


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m fused_norm", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="report what this machine has and what is missing")
    build = commands.add_parser("build", help="build the kernels ahead of their first use")
    build.add_argument(
        "--target",
        action="append",
        metavar="TARGET",
        help="cpu, or a GPU architecture such as sm_90a or gfx942, attached or not "
        "(default: cpu and every attached GPU); may be repeated",
    )
    build.add_argument(
        "--dtype",
        action="append",
        choices=list(native.DTYPES.values()),
        help="default: all; may be repeated",
    )
    build.add_argument("--force", action="store_true", help="rebuild what is already built")
    build.add_argument(
        "--autograd",
        action="store_true",
        help="compile only C++: the chain, and the node that takes Python out of training steps",
    )
    commands.add_parser("bench", help="measure our calls against PyTorch's", add_help=False)
    options, rest = parser.parse_known_args(arguments)
    if options.command == "bench":
        return bench.main(rest)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if options.command == "doctor":
        return doctor.report()
    if options.autograd:
        return _build_node(force=options.force)
    return _build(options.target, options.dtype, force=options.force)


def _build(targets: list[str] | None, dtypes: list[str] | None, *, force: bool) -> int:
    failed = 0
    for target in targets or native.attached_targets():
        for extension in native.extensions(target, dtypes or list(native.DTYPES.values())):
            try:
                path = native.build(extension, force=force)
            except cache.BuildError as error:
                print(error, file=sys.stderr)
                failed += 1
            else:
                print(f"{extension}: {path}")
    return 1 if failed else 0


def _build_node(*, force: bool) -> int:
    try:
        for binary in (library.CHAIN, library.NODE):
            print(f"{binary.name}: {library.build(binary, force=force)}")
    except cache.BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
