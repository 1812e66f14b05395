"""Write docs/reliability.md: what was tried on the library, and what failed and was fixed.

python scripts/pages/reliability_page.py
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import mutate

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reliability.md"

INTRODUCTION = """\
<!-- `scripts/pages/reliability_page.py` writes this page and counts its tests; do not edit it. -->

# Reliability

What the library promises, how the tests try to break it, and which wrong edits to the code they
notice.

```bash
uv run poe test                                    # all but the slow tests
uv run poe test --all                              # every test that this machine can run
uv run pytest tests/reliability                    # most of what follows
uv run pytest tests/reliability -m gpu --all       # its GPU tests, with the sanitizers
uv run pytest -m gpu --forward-strategy folded     # one strategy of Hopper's forward at every size
uv run poe mutate                                  # wrong edits, one at a time
```

The oldest PyTorch tested is 2.11, on an H200; the newest is 2.15, on a CPU.

## Promises

"""

# What holds, and the tests that show it.
PROMISES = {
    "A call reads the current values of its weights, whatever wrote them: calls keep nothing, "
    "unless the parameters are frozen": ("test_folds.py", "test_freeze.py"),
    "A CUDA graph never reads freed memory": ("test_folds.py::test_graph_keeps_what_it_reads",),
    "The gradient of a frozen parameter is an error; `train()`, `load_state_dict` and `unfreeze` "
    "end freezing": ("test_freeze.py",),
    "No parameter is recognized by its address alone, and nothing refers to it after a call": (
        "test_parameters.py",
    ),
}

TRIALS = """
## Trials

Each parametrization counts as one test; most check the output and five gradients. Tests that need a
GPU count too; without one, they are skipped.
"""

# Where, and what is tried there; a name after :: is one test with its parametrizations.
TRIED = {
    "tests/reliability/test_pytorch_cases.py": "PyTorch's OpInfo samples of `layer_norm`, "
    "`native_layer_norm` and `linear`, and module_db's modules, each paired with the op that it "
    "lacks: 137 cases in four dtypes, contiguous and not; second and forward-mode derivatives; "
    "errors",
    "tests/reliability/test_peer_cases.py": "shapes and tolerances from the tests of "
    "TransformerEngine, Liger, Apex, FLA and quack",
    "tests/reliability/test_properties.py": "hypothesis, 60 examples per test: shift and scale "
    "invariance, independent rows (bit for bit, dx too), linearity in W and b, "
    "gradient identities, any strides; CPU = GPU, fused = composed",
    "tests/reliability/test_numbers.py": "mean/std to 1e6, scales of 1e-30 to 1e17, subnormal "
    "rows, sums and variances that overflow, NaN and infinity in each tensor, eps of 0, negative, "
    "infinite",
    "tests/reliability/test_sizes.py": "more than 2^31 and 2^32 elements of x, y and W; batches "
    "beyond 65535; rows of 262144; one output; every M, K, N to 40",
    "tests/reliability/test_memory.py": "inputs between NaNs; 3,000 (`--all`: 100,000) calls of "
    "changing shape; modules deleted; an input freed on a side stream; out of memory; "
    "compute-sanitizer's four tools",
    "tests/reliability/test_concurrency.py": "16 threads, fork, spawn, forkserver, DataLoader "
    "workers, Ctrl-C at any moment, stalled streams, two devices",
    "tests/reliability/test_bad_input.py": "a fuzzer: 36 changes to one argument, to all of them, "
    "and to several in 2,000 calls; 1,000 wrong inputs and parameters after valid ones; the "
    "exception is PyTorch's, word for word, and no kernel runs",
    "tests/reliability/test_install.py": "installing, using, upgrading and uninstalling a wheel",
    "tests/ops/test_folds.py": "on Hopper: writes that no version counter shows (fused "
    "optimizers, `.data`, `vector_to_parameters`, dlpack, the driver), CUDA graphs, "
    "streams, offloading",
    "tests/test_freeze.py": "what ends freezing, what it forbids, copies, the backend's option, "
    "Inductor's",
    "tests/native/test_native.py": "building: full, damaged and unwritable caches, two processes "
    "at once, an interrupted build, a missing compiler",
    "tests/scripts/test_wheel.py": "the contents of a wheel; using it writes nothing next to "
    "its code",
    "tests/op/norm_linear/test_cpu_kernels.py": "CPU kernels between canaries, at any alignment "
    "and thread count",
    "tests/graphs/test_max_ops.py": "MAX graphs against the library, bit for bit on a CPU",
}

FIXED = """
## Errors found and fixed

| found by | error | fixed in | tested by |
|---|---|---|---|
| OpInfo, forward mode | tangents were silently dropped: jvp gave zeros, and a Hessian raised an \
error | `validation.py` | `test_forward_derivatives_of_samples`, `test_hessians` |
| OpInfo, forward mode | a backward inside forward mode dropped the tangent of its grad_output | \
`norm_linear.py`, `rows.py` | `test_tangents_of_gradients` |
| fuzzer | a nested tensor raised an internal error where PyTorch gives a result | \
`validation.py`, `parameters.py` | `test_one_wrong_argument[x-nested]` |
| fuzzer | a sparse LayerNorm parameter or bias reached a kernel's wrapper | `validation.py` | \
`test_one_wrong_argument[ln_weight-sparse]` |
| fuzzer | a class or a number instead of a tensor raised a different error than in PyTorch | \
`validation.py` | `test_one_wrong_argument[x-class]`, `test_row_ops[div-number]` |
| quack's long rows, on an H200 | in tiles of 64 columns with few k blocks, an output box was \
overwritten before TMA had read it: with few rows, 8 outputs and at least 32768 features, \
a tenth of dx came from another column | `store.mojo` | `test_quack`, `test_sm90.py`, \
`test_sm90_backward.py` |
| `poe mutate`, on an H200 | capturing a CUDA graph failed in a process that had not used cuBLAS \
before, if the chosen strategy did | `kernels.h` | `test_cuda_graph_of_nothing_else` |
| a review | folds were kept by version counters, which fused optimizers and writes through \
`.data` do not change: results were those of old weights (error 1.31 of the result) | \
`frozen.py`: none is kept | `test_writes_that_no_version_tells_of` |
| a review | a fold that a CUDA graph read was freed when the weight was used with another norm | \
`frozen.py` | `test_graph_keeps_what_it_reads` |
| a review | a gamma of another dtype or length in the same memory was taken for the one before | \
`parameters.py` | `test_other_gamma_in_the_same_memory` |
| a review | scratch memory that was kept between calls belonged to a CUDA graph | `forward.h`, \
`kernels.h` | `test_graph_trees_of_the_compiler` |
| packing kernels | building into a relative `FUSED_NORM_CACHE_DIR` failed | \
`build.py` | `test_relative_folder` |

On one H200 and on two, the GPU tests pass with every strategy that the forward can be forced to
use, and with the backward in Python and in C++. The sanitizers report nothing in our kernels.
(Racecheck names a kernel of cuBLAS. Initcheck does not see what TMA writes, so it runs only on
kernels without TMA.)

On a CPU, the tests of properties, numbers, sizes, memory and concurrency found no error in the
library. They found three things about PyTorch:

- With a NaN in one row, its bfloat16 product on a CPU (40 x 100 by 100 x 30) turns a second row
  into NaN; ours does not.
- A row of 8.5e37 gives NaN in PyTorch, and the bias here.
- A program that ends while daemon threads compute aborts, with PyTorch's ops as well as ours.

## Wrong edits

Each of these edits to the code must make a test fail. Those marked *needs a GPU* have not run yet.

"""


def main() -> int:
    """Write the page and return an exit status."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "--all", *TRIED]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    PAGE.write_text(page(Counter(re.findall(r"^(tests/\S+?)::", listed, re.MULTILINE))))
    return 0


def page(tests: Counter[str]) -> str:
    """Return the page.

    Args:
        tests: How many tests each file has.
    """
    text = INTRODUCTION + "| what holds | shown by |\n|---|---|\n"
    for promise, shown in PROMISES.items():
        text += f"| {promise} | {', '.join(f'`{name}`' for name in shown)} |\n"
    text += TRIALS + "\n| where | tests | what |\n|---|---|---|\n"
    for where, what in TRIED.items():
        text += f"| [{Path(where).name}](../{where}) | {tests[where]} | {what} |\n"
    text += FIXED + "| edit | in | result | noticed by |\n|---|---|---|---|\n"
    for result in mutate.recorded().values():
        failed = [re.sub(r"^tests/(\w+/)*|\[.*", "", name) for name in result["failed"]]
        names = ", ".join(f"`{name}`" for name in list(dict.fromkeys(failed))[:2])
        state = result["result"]
        if state == "not run" and result["target"] == "gpu":
            state = "needs a GPU"
        text += f"| {result['name']} | {Path(result['file']).name} | {state} | {names} |\n"
    return text


if __name__ == "__main__":
    sys.exit(main())
