"""examples/huggingface, as its README says, on one island: from the Trainer to `from_pretrained`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "huggingface"
ROUNDS, STEP_TOKENS = 5, 16 * 64


def atoll(*words: str) -> list[str]:
    return [sys.executable, "-m", "atoll", *words]


@pytest.fixture
def final(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The final model of a short run with one island."""
    for file in EXAMPLE.iterdir():
        if file.is_file():
            shutil.copy(file, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    spec = Path("run.toml").read_text().replace("expected_islands = 2", "expected_islands = 1")
    Path("run.toml").write_text(spec.replace("614_400", str(ROUNDS * 10 * STEP_TOKENS)))
    save = [sys.executable, "train.py", "--save-start", "start.safetensors"]
    subprocess.run(save, check=True, timeout=60)
    init = atoll("run", "init", "myrun", "--spec", "run.toml", "--weights", "start.safetensors")
    subprocess.run(init, check=True, timeout=60, stdout=subprocess.DEVNULL)
    words = atoll("run", "start", "myrun", "--listen", "127.0.0.1:0")
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as start:
        try:
            assert start.stdout is not None
            address = next(line for line in start.stdout if b"atoll join" in line).split()[2]
            train = [sys.executable, "train.py"]
            join = atoll("join", address.decode(), "--name", "north", "--", *train)
            subprocess.run(join, check=True, timeout=90, stderr=subprocess.DEVNULL)
            assert start.wait(30) == 0
        finally:
            start.kill()
    return Path("runs/north/final.safetensors")


@torch.no_grad()
def test_the_final_model_loads_with_from_pretrained_and_is_the_anchor(final: Path) -> None:
    subprocess.run(
        [sys.executable, "export.py", str(final), "exported"],
        check=True,
        timeout=60,
        capture_output=True,
    )
    loaded = transformers.AutoModelForCausalLM.from_pretrained("exported").eval()
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight

    anchor = load_file(final)
    assert "lm_head.weight" not in anchor
    plain = transformers.LlamaForCausalLM(loaded.config).eval()
    plain.load_state_dict(anchor | {"lm_head.weight": anchor["model.embed_tokens.weight"]})
    tokens = torch.arange(48).view(2, 24)
    assert torch.equal(loaded(tokens).logits, plain(tokens).logits)

    events = [json.loads(line) for line in (final.parent / "events.jsonl").read_text().splitlines()]
    evaluations = [e for e in events if e["event"] == "evaluation"]
    assert [e["round"] for e in evaluations] == [ROUNDS]
    assert evaluations[0]["loss"] < 5.0  # bytes at random: 5.5
    boundaries = [e for e in events if e["event"] == "boundary"]
    assert [e["step"] for e in boundaries] == [10, 20, 30, 40, 50]
    assert boundaries[-1]["tokens"] == 50 * STEP_TOKENS


def test_a_file_of_another_model_is_not_exported(tmp_path: Path) -> None:
    save_file({"other": torch.zeros(1)}, tmp_path / "final.safetensors")
    done = subprocess.run(
        [sys.executable, str(EXAMPLE / "export.py"), "final.safetensors", "exported"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    assert "is not of this model" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "exported").exists()
