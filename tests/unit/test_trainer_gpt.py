from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from node.gpt import Gpt, cross_entropy
from node.model import build_model
from node.settings import TrainerSettings, load_settings
from node.start_state import write_start_state
from protocol.errors import ConfigError
from protocol.spec import GptModel

torch.set_num_threads(1)

TABLE = {
    "seed": 1,
    "target_tokens": 10_000,
    "model": {"width": 32, "depth": 2, "heads": 4, "context": 16},
    "data": {"text": ["unused"]},
    "inner": {},
    "cache_dir": "unused",
    "index": 0,
    "islands": 1,
}


def settings_of(**changes: object) -> TrainerSettings:
    return TrainerSettings.model_validate(TABLE | changes)


def test_loss_of_the_start_state_is_that_of_guessing() -> None:
    model = build_model(settings_of().model, 1)
    tokens = torch.randint(256, (4, 17))
    assert cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]).item() == pytest.approx(
        math.log(256), abs=0.05
    )


def test_a_later_token_changes_no_earlier_logit() -> None:
    model = build_model(settings_of().model, 1)
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 9] = (changed[0, 9] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


def test_attention_sees_where_a_token_stands() -> None:
    model = build_model(settings_of().model, 1)
    nearer, farther = torch.tensor([[1, 2, 3, 3]]), torch.tensor([[2, 1, 3, 3]])
    assert not torch.equal(model(nearer)[:, -1], model(farther)[:, -1])


def test_what_writes_into_the_residual_stream_starts_smaller() -> None:
    torch.manual_seed(0)
    deviation = {
        name: p.std().item()
        for name, p in Gpt(GptModel(width=128, depth=8)).named_parameters()
        if p.dim() == 2
    }
    for name, found in deviation.items():
        residual = name.endswith(("out.weight", "down.weight"))
        assert found == pytest.approx(0.02 / 4 if residual else 0.02, rel=0.05), name


def test_one_seed_makes_one_start_state(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        torch.manual_seed(seed + 100)
        layout = write_start_state(settings_of(seed=seed), tmp_path / f"{name}.safetensors")
    a, b, c = ((tmp_path / f"{name}.safetensors").read_bytes() for name in "abc")
    assert a == b != c
    listed = json.loads((tmp_path / "a.layout.json").read_text())
    assert [tuple(entry) for entry in listed] == [(n, list(s), d) for n, s, d in layout]
    assert [entry[0] for entry in listed] == [
        n for n, _ in build_model(settings_of().model, 1).named_parameters()
    ]
    build_model(settings_of().model, 2).load_state_dict(load_file(tmp_path / "a.safetensors"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"index": 4, "islands": 4}, "index = 4 must be below islands = 4"),
        ({"colour": 1}, "colour: unknown key"),
        ({"seed": -1}, "seed: "),
        ({"model": {"width": 30, "heads": 4}}, "model.width = 30"),
        ({"data": {"text": ["x"], "tokenizer": "bpe"}}, "tokenizer_path: "),
        ({"target_tokens": 100}, "target_tokens = 100"),
    ],
)
def test_a_wrong_setting_is_one_line_that_names_the_key(
    tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    path = tmp_path / "settings.json"
    path.write_text(json.dumps(TABLE | changes))
    with pytest.raises(ConfigError) as caught:
        load_settings(path)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_settings_that_are_no_json_or_no_file_are_config_errors(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    with pytest.raises(ConfigError, match="cannot be read"):
        load_settings(path)
    path.write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        load_settings(path)
