"""All that islands agree on has the same bits with and without wide SIMD: a stand-in for another CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__

CHILD = Path(__file__).with_name("equal_bits_child.py")
WIDE = [name for name in ("X86_V3", "X86_V4") if __cpu_features__.get(name)]  # AVX2, AVX-512

pytestmark = pytest.mark.skipif(not WIDE, reason="needs an x86-64 CPU with AVX2 or AVX-512")


def run_child(disabled: list[str]) -> dict[str, Any]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("NPY_")}
    if disabled:
        environment["NPY_DISABLE_CPU_FEATURES"] = " ".join(disabled)
    done = subprocess.run(
        [sys.executable, str(CHILD)], env=environment, capture_output=True, check=True, text=True
    )
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.fixture(scope="module")
def wide() -> dict[str, Any]:
    return run_child([])


@pytest.fixture(scope="module")
def narrow() -> dict[str, Any]:
    """All that NumPy would choose at run time is off: only its x86-64-v2 baseline is left."""
    return run_child(__cpu_dispatch__)


def test_the_two_children_really_differ(wide: dict[str, Any], narrow: dict[str, Any]) -> None:
    assert set(WIDE) <= set(wide["simd"])
    assert narrow["simd"] == []
    assert wide["inputs"] == narrow["inputs"]


def test_exp_would_have_betrayed_the_cpu(wide: dict[str, Any], narrow: dict[str, Any]) -> None:
    assert wide["exp"] != narrow["exp"]


def test_what_islands_agree_on_has_the_same_bits(
    wide: dict[str, Any], narrow: dict[str, Any]
) -> None:
    assert len(wide["agreed"]) == 9
    assert wide["agreed"] == narrow["agreed"]
