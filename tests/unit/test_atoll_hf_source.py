"""`--hf SOURCE`: what is read from where, what it makes of a spec, and every fault as one line."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from atoll.hf_source import MAX_CONFIG_BYTES, config_of, tokenizer_of, with_config
from protocol.errors import ConfigError
from protocol.spec import HfModel, parse_spec

CONFIG = {"vocab_size": 300, "note": "it's '''\\ \"quoted\"\n\té", "layers": [1, 2.5, None]}
SPEC = """
# what we agreed on
name = "tiny"
target_tokens = 2_000  # few

[model]  # to be filled in
context = 16

[data]
text = ["a.txt"]
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text('{\n  "model": {"ü": 1}\n}')
    return folder


def spec_file(folder: Path, old: str = "", new: str = "") -> Path:
    assert old in SPEC
    path = folder / "spec.toml"
    path.write_text(SPEC.replace(old, new) if old else SPEC)
    return path


def one_line(error: pytest.ExceptionInfo[ConfigError], *parts: str) -> None:
    (line,) = str(error.value).splitlines()
    for part in parts:
        assert part in line


# --- sources -----------------------------------------------------------------------------------


def test_a_directory_and_the_config_in_it_are_the_same_source(source: Path) -> None:
    renamed = source / "other.json"
    renamed.write_bytes((source / "config.json").read_bytes())
    for given in (source, source / "config.json", renamed):
        assert json.loads(config_of(str(given))) == CONFIG
        assert tokenizer_of(str(given)) == '{"model":{"ü":1}}'.encode()


def test_a_local_source_needs_no_library(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("huggingface_hub", "transformers", "torch"):
        monkeypatch.setitem(sys.modules, name, None)
    assert json.loads(config_of(str(source))) == CONFIG


def test_a_name_on_the_hub_is_fetched_from_there(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def download(name: str, file: str) -> str:
        asked.append((name, file))
        return str(source / file)

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(hf_hub_download=download))
    assert json.loads(config_of("someone/some-model.v1")) == CONFIG
    assert tokenizer_of("someone/some-model.v1").startswith(b"{")
    assert asked == [("someone/some-model.v1", file) for file in ("config.json", "tokenizer.json")]


def test_a_hub_that_does_not_answer_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str, file: str) -> str:
        raise RuntimeError("404 Client Error.\nSecond line")

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(hf_hub_download=download))
    with pytest.raises(ConfigError) as caught:
        config_of("someone/nothing")
    one_line(caught, "--hf someone/nothing", "config.json: 404 Client Error.")


def test_a_hub_name_without_the_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError) as caught:
        config_of("someone/nothing")
    one_line(caught, "pip install 'atoll[hf]'")


@pytest.mark.parametrize("given", ["/no/such/folder", "a b", "x/y/z", "../x/y", "\0"])
def test_what_is_neither_a_path_nor_a_name_is_one_line(given: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(given)
    one_line(caught, "no such file or directory, and no name on the Hugging Face hub")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "config.json cannot be read: No such file"),
        ("{", "config.json is not valid JSON"),
        ("[" * 100_000, "config.json is not valid JSON"),
        ("[]", "config.json must be a JSON object"),
        (json.dumps({"x": "x" * MAX_CONFIG_BYTES}), "config.json is larger than"),
    ],
    ids=["missing", "cut", "deep", "list", "large"],
)
def test_a_config_that_is_none_is_one_line(source: Path, text: str | None, said: str) -> None:
    (source / "config.json").unlink()
    if text is not None:
        (source / "config.json").write_text(text)
    with pytest.raises(ConfigError) as caught:
        config_of(str(source))
    one_line(caught, f"--hf {source}", said)


def test_a_source_without_a_tokenizer_says_how_to_get_one(source: Path) -> None:
    (source / "tokenizer.json").unlink()
    with pytest.raises(ConfigError) as caught:
        tokenizer_of(str(source))
    one_line(caught, "has no tokenizer.json", "save_pretrained(DIRECTORY)")


# --- the spec ----------------------------------------------------------------------------------


def test_the_config_is_put_into_the_spec_and_comments_stay(source: Path, tmp_path: Path) -> None:
    text = with_config(spec_file(tmp_path), config_of(str(source)), new_model=False)
    for kept in ("# what we agreed on", "2_000  # few", "[model]  # to be filled in"):
        assert kept in text
    model = parse_spec(tomllib.loads(text), "spec").model
    assert isinstance(model, HfModel)
    assert model.context == 16
    assert model.vocab_size == 300
    assert json.loads(model.config) == CONFIG


def test_putting_it_in_twice_changes_nothing(source: Path, tmp_path: Path) -> None:
    path, config = spec_file(tmp_path), config_of(str(source))
    once = with_config(path, config, new_model=False)
    path.write_text(once)
    assert with_config(path, config, new_model=False) == once


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("[model]  # to be filled in\ncontext = 16\n", ""),
        ("[model]  # to be filled in\ncontext = 16\n", "[model]\n"),
        ("[model]  # to be filled in\ncontext = 16\n", "model.context = 16\n"),
        ("\n[model]  # to be filled in\ncontext = 16\n", "model = { context = 16 }\n"),
        ("context = 16", 'context = 16\nrecipe = "hf"'),
    ],
    ids=["no table", "empty", "dotted", "inline", "named"],
)
def test_every_spelling_of_the_table_is_filled_in(
    source: Path, tmp_path: Path, old: str, new: str
) -> None:
    text = with_config(spec_file(tmp_path, old, new), config_of(str(source)), new_model=False)
    model = parse_spec(tomllib.loads(text), "spec").model
    assert isinstance(model, HfModel)
    assert json.loads(model.config) == CONFIG


def test_a_new_model_keeps_only_the_context(source: Path, tmp_path: Path) -> None:
    path = spec_file(tmp_path, "context = 16", "context = 16\nwidth = 96\nheads = 3")
    model = parse_spec(
        tomllib.loads(with_config(path, config_of(str(source)), new_model=True)), "spec"
    ).model
    assert isinstance(model, HfModel)
    assert model.context == 16


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("context = 16", 'recipe = "gpt"', 'model.recipe = "gpt" is not what --hf makes'),
        ("\n[model]  # to be filled in\ncontext = 16\n", "model = 3\n", "model: input should be"),
        ("[model]", "[model", "not valid TOML"),
    ],
)
def test_a_spec_it_does_not_fit_into_is_one_line(
    source: Path, tmp_path: Path, old: str, new: str, said: str
) -> None:
    path = spec_file(tmp_path, old, new)
    with pytest.raises(ConfigError) as caught:
        with_config(path, config_of(str(source)), new_model=False)
    one_line(caught, str(path), said)
