"""What is installed is ours alone, complete, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("atoll", "coordinator", "node", "outer_optimizer", "protocol")


@pytest.mark.parametrize("package", PACKAGES)
def test_no_other_distribution_ships_our_import_names(package: str) -> None:
    owners = set(packages_distributions().get(package, []))
    assert owners <= {"atoll"}


def test_the_wheel_holds_our_packages_generated_code_and_the_quickstart(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
        + ["--disable-pip-version-check", "--wheel-dir", str(tmp_path), str(ROOT)],
        check=True,
        timeout=90,
    )
    (wheel,) = tmp_path.glob("atoll-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == set(PACKAGES)
    assert {
        "atoll/quickstart_files/run.toml",
        "atoll/quickstart_files/scenario.toml",
        "protocol/atoll_records_pb2.py",
        "protocol/atoll_coordinator_pb2.pyi",
        "node/trainer.py",
    } <= set(names)


def test_the_project_reads_alone() -> None:
    """No file points to places that a user of the project does not have."""
    strange = ("/wo" + "rk/", "../" + "shared", "DESIGN " + "§", "facts " + "§", "PROTOCOL " + "§")
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False
    ).stdout.decode()
    for name in filter(None, tracked.split("\0")):
        path = ROOT / name
        if path.suffix in (".py", ".md", ".toml", ".proto", ".sh", "") and path.is_file():
            text = path.read_text(errors="replace")
            assert not [word for word in strange if word in text], name
