"""examples/mixed_islands as it stands, against the same run with one rank per island."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "mixed_islands"


def simulated(scenario: str, folder: Path) -> dict[str, Any]:
    out = folder / f"{scenario}.json"
    command = [sys.executable, "-P", "-m", "atoll", "simulate", str(EXAMPLE / f"{scenario}.toml")]
    subprocess.run([*command, "--json", str(out)], check=True, timeout=500, capture_output=True)
    report: dict[str, Any] = json.loads(out.read_bytes())
    return report


@pytest.mark.timeout(1_200)
def test_meshes_cost_the_run_at_most_one_percent_of_its_loss(tmp_path: Path) -> None:
    mixed, single = (simulated(name, tmp_path) for name in ("scenario", "single_ranks"))
    assert mixed["digests_agree"]
    assert mixed["loss"]["final"] <= 1.01 * single["loss"]["final"]
