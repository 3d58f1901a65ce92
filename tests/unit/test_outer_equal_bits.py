"""The outer step gives the same bits whichever vector instructions NumPy uses, where np.exp does not."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CHILD = Path(__file__).with_name("equal_bits_child.py")
ROOT = CHILD.parents[2]


def host_flags() -> set[str]:
    """The CPU's own word, not NumPy's; empty where Linux does not tell."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return set(next((line for line in lines if line.startswith("flags")), "").split())


def run_child(disabled: str) -> dict[str, Any]:
    """`disabled`: NumPy's names of CPU levels it must not use."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("NPY_")}
    env["PYTHONPATH"] = str(ROOT)
    if disabled:
        env["NPY_DISABLE_CPU_FEATURES"] = disabled
    done = subprocess.run(
        [sys.executable, str(CHILD)], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def test_every_outer_operation_gives_equal_bits_with_and_without_avx() -> None:
    flags = host_flags()
    if not {"avx2", "fma"} <= flags:
        pytest.skip("this host's CPU has neither AVX2 nor AVX-512: there is nothing to switch off")
    full = run_child("")
    used = [level for level, on in full["levels"].items() if on]
    baseline = run_child(" ".join(used))

    # X86_V3 and X86_V4 are NumPy's names for AVX2 with FMA and for AVX-512.
    assert full["levels"]["X86_V3"]
    avx512 = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"} <= flags
    assert full["levels"]["X86_V4"] == avx512
    assert not any(baseline["levels"].values())

    assert full["round"] == baseline["round"]
    assert full["exp"] != baseline["exp"], "these children would not notice unequal bits"
