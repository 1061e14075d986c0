"""`python -m perilune_research kernels`: how well the engine model's shape holds on measured kernels.

Exit status: 0; 2 for a wrong call or file.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import msgspec

from perilune_lab.terminal.exits import wrong_call
from perilune_research.kernels.fit import Fit, Measured, decode, mixed, prefill

RECORDED = Path(__file__).parent / "h200.json"

_EPILOG = """\
examples (after `python -m perilune_research`):
  kernels                  the recorded steps of one H200
  kernels steps.json       your own; on a machine that has PyTorch with CUDA:
                           python3 research/perilune_research/kernels/measure.py steps.json
"""


def table(measured: Measured) -> str:
    """Return the table of fits in Markdown."""
    rows: list[tuple[str, Fit, str]] = [
        ("prefill", prefill(measured), "TFLOP/s"),
        ("decode", decode(measured), "TB/s"),
        ("mixed", mixed(measured), "TFLOP/s"),
    ]
    lines = [
        f"{measured.gpu}, PyTorch {measured.torch}: a matrix product reaches"
        f" {measured.matmul_flops_per_s / 1e12:.0f} TFLOP/s,"
        f" a copy {measured.copy_bytes_per_s / 1e12:.1f} TB/s.",
        "",
        "| step | shapes | fixed | rate | median error | worst error |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, found, unit in rows:
        fixed, rate = f"{found.line.fixed_s * 1e3:.1f} ms", f"{found.line.per_s / 1e12:.3g} {unit}"
        if name == "mixed":
            fixed = rate = "as above"
        lines.append(
            f"| {name} | {len(found.errors)} | {fixed} | {rate}"
            f" | {found.median_error:.1%} | {found.worst_error:.1%} |"
        )
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m perilune_research kernels",
        description="Fit the engine model's rooflines to steps measured on a GPU, and print the errors.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "file", nargs="?", type=Path, default=RECORDED, metavar="FILE", help="what measure.py wrote"
    )
    return made


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit status."""
    options = parser().parse_args(argv)
    try:
        measured = msgspec.json.decode(options.file.read_bytes(), type=Measured)
        print(table(measured))
    except OSError as e:
        return wrong_call("kernels", f"cannot read {options.file}: {e.strerror}")
    except (msgspec.DecodeError, ValueError) as e:
        return wrong_call("kernels", f"{options.file} is not what measure.py writes: {e}")
    return 0
