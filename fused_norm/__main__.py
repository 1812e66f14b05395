"""Examine this machine, build its kernels, and measure them."""

from __future__ import annotations

import difflib
import sys
import textwrap
from collections.abc import Sequence

import torch

import fused_norm
from fused_norm import bench, doctor
from fused_norm.chain import library
from fused_norm.native import build as native
from fused_norm.native import cache, compiler
from fused_norm.parser import Parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    parser = Parser(prog="python -m fused_norm", description=__doc__)
    parser.add_argument("--version", action="version", version=_versions())
    commands = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND")
    examine = commands.add_parser(
        "doctor",
        help="report what this machine has, what is missing, and what to do",
        description="Report what this machine has, what is missing, and what to do. "
        "Exits with 1 if the kernels cannot be used.",
    )
    examine.add_argument("--json", action="store_true", help="print the report as JSON")
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
        help="compile only the C++: the chain, and the node that makes small calls faster",
    )
    commands.add_parser("bench", help="compare a few calls with PyTorch eager", add_help=False)
    commands.add_parser(
        "tune", help="measure which strategy is fastest, for later calls", add_help=False
    )
    options, rest = parser.parse_known_args(arguments)
    if options.command == "bench":
        return bench.main(rest)
    if options.command == "tune":
        # Imported late, since it imports the model passes.
        from fused_norm.tuning import command

        return command.main(rest)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if options.command is None:
        parser.print_help()
        return 0
    if options.command == "doctor":
        return doctor.report(options.json)
    for target in options.target or ():
        if problem := _unknown(target):
            build.error(problem)
    if options.autograd:
        return _build_node(force=options.force)
    return _build(options.target, options.dtype, force=options.force)


def _versions() -> str:
    mojo = compiler.version() or "none"
    return (
        f"fused_norm {fused_norm.__version__} (PyTorch {torch.__version__}, Mojo compiler {mojo})"
    )


def _unknown(target: str) -> str | None:
    """Return what is wrong with the name of a target, None if nothing is or nothing can tell."""
    name = target.split(":")[-1]
    if target == "cpu" or compiler.version() is None:
        return None
    known = compiler.accelerators()
    if name in known or not known:
        return None
    near = difflib.get_close_matches(name, known, n=1)
    meant = f"Did you mean {near[0]}? " if near else ""
    targets = textwrap.fill(f"{meant}Targets: cpu, {', '.join(known)}", 79)
    return f"unknown target {target!r}\n{targets}"


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
