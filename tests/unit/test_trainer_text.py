from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from node.text import TextError, check_text, expand, load_tokens, split_tokens, train_bpe
from protocol.errors import ConfigError
from protocol.spec import Data, RunSpec


def load(tmp_path: Path, *text: str) -> np.ndarray:
    return load_tokens(Data(text=text), 256, None, tmp_path / "cache")


def cached(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "cache").iterdir())


def test_files_are_sorted_read_once_and_separated(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(b"bb")
    (tmp_path / "a.txt").write_bytes(b"a\xff")
    tokens = load(tmp_path, f"{tmp_path}/b.txt", f"{tmp_path}/*.txt")
    assert tokens.tobytes() == np.array([97, 255, 10, 98, 98, 10], np.uint16).tobytes()


def test_globs_reach_any_depth_and_an_entry_with_a_mark_takes_out(tmp_path: Path) -> None:
    (tmp_path / "x" / "y").mkdir(parents=True)
    for name in ("x/1.py", "x/y/2.py", "x/y/.3.py"):
        (tmp_path / name).touch()
    found = expand([f"{tmp_path}/**/*.py", f"!{tmp_path}/**/2.py"])
    assert found == [f"{tmp_path}/x/1.py", f"{tmp_path}/x/y/.3.py"]


def test_stdlib_is_the_librarys_folder() -> None:
    assert expand(["{stdlib}/this.py"]) == [os.path.join(sysconfig.get_path("stdlib"), "this.py")]


@pytest.mark.parametrize("entry", ["nothing/*.txt", "nothing.txt", "."])
def test_an_entry_without_a_file_is_an_error_that_names_key_and_entry(
    tmp_path: Path, entry: str
) -> None:
    with pytest.raises(TextError, match=r"^data\.text: '.*' matches no file") as caught:
        load(tmp_path, f"{tmp_path}/{entry}")
    assert isinstance(caught.value, ValueError)


def test_everything_taken_out_and_empty_text_are_errors(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    with pytest.raises(TextError, match=r"^data\.text: no file is left"):
        load(tmp_path, f"{tmp_path}/a.txt", f"!{tmp_path}/*.txt")
    with pytest.raises(TextError, match=r"^data\.text: its 1 files are empty"):
        load(tmp_path, f"{tmp_path}/a.txt")
    assert cached(tmp_path) == []


def test_an_unreadable_file_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_bytes(b"a")

    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(TextError, match=r"^data\.text: .*a\.txt cannot be read: Permission"):
        load(tmp_path, f"{tmp_path}/a.txt")


def test_the_cache_is_built_once_and_again_when_a_file_changes(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"a")
    load(tmp_path, str(path))
    (file,) = cached(tmp_path)
    before = file.stat().st_mtime_ns
    load(tmp_path, str(path))
    assert file.stat().st_mtime_ns == before
    os.utime(path, ns=(0, 0))
    load(tmp_path, str(path))
    assert len(cached(tmp_path)) == 2


BUILD = """
import sys
from pathlib import Path
from node.text import load_tokens
from protocol.spec import Data
print(load_tokens(Data(text=(sys.argv[1],)), 256, None, Path(sys.argv[2])).sum())
"""


def test_processes_that_start_together_build_one_cache(tmp_path: Path) -> None:
    text, cache = tmp_path / "a.txt", tmp_path / "cache"
    text.write_bytes(b"\1" * 1_000_000)
    command = [sys.executable, "-P", "-c", BUILD, str(text), str(cache)]
    builders = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(4)]
    assert {int(builder.communicate()[0]) for builder in builders} == {1_000_010}
    assert [path.stat().st_size for path in cache.iterdir()] == [2 * 1_000_001]


def test_bpe_shortens_the_text_and_its_vocabulary_must_fit(tmp_path: Path) -> None:
    text, out = tmp_path / "a.txt", tmp_path / "bpe.json"
    text.write_bytes(b"the cat and the dog and the bird\n" * 50)
    train_bpe([str(text)], 300, out)
    data = Data(text=(str(text),), tokenizer="bpe")
    tokens = load_tokens(data, 300, str(out), tmp_path / "cache")
    assert 0 < len(tokens) < text.stat().st_size // 3
    assert tokens.max() < 300
    with pytest.raises(ConfigError, match=r"model\.vocab_size = 256 is below"):
        load_tokens(data, 256, str(out), tmp_path / "cache")


def test_without_the_library_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r'"bpe" needs .* pip install \'atoll\[bpe\]\''):
        train_bpe([], 300, tmp_path / "bpe.json")
    (tmp_path / "a.txt").write_bytes(b"a")
    (tmp_path / "t.json").write_bytes(b"{}")
    with pytest.raises(ConfigError, match=r'"model" needs .* pip install \'atoll\[hf\]\''):
        load_with(tmp_path, "model", 300, tmp_path / "t.json")


def load_with(tmp_path: Path, kind: str, vocab_size: int, tokenizer: Path) -> np.ndarray:
    data = Data(text=(str(tmp_path / "a.txt"),), tokenizer=kind)  # type: ignore[arg-type]
    return load_tokens(data, vocab_size, str(tokenizer), tmp_path / "cache")


def word_tokenizer(path: Path, **words: int) -> Path:
    """A tokenizer.json of whole words that cuts at 3 tokens, pads to 8 and puts a mark in front."""
    tokenizer = Tokenizer(models.WordLevel({"[?]": 0, "[B]": 1, **words}, unk_token="[?]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing("[B] $A", special_tokens=[("[B]", 1)])
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(path))
    return path


def test_a_models_tokenizer_neither_cuts_nor_pads_the_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("cat dog cat dog bird cat")
    tokenizer = word_tokenizer(tmp_path / "t.json", cat=2, dog=3)
    assert load_with(tmp_path, "model", 4, tokenizer).tolist() == [1, 2, 3, 2, 3, 0, 2]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("model", r"^model\.config: its vocab_size = 7 is below the 8 tokens of .*t\.json"),
        ("bpe", r"^model\.vocab_size = 7 is below the 8 tokens of .*t\.json: raise it"),
    ],
)
def test_a_vocabulary_has_room_for_the_highest_token_whatever_their_number(
    tmp_path: Path, kind: str, said: str
) -> None:
    (tmp_path / "a.txt").write_text("cat")
    tokenizer = word_tokenizer(tmp_path / "t.json", cat=7)
    assert load_with(tmp_path, kind, 8, tokenizer).tolist() == [1, 7]
    with pytest.raises(ConfigError, match=said):
        load_with(tmp_path, kind, 7, tokenizer)


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b'{"model": {"type": "x"}}', b"\xff"])
def test_a_file_that_is_no_tokenizer_is_one_line(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.txt").write_text("cat")
    (tmp_path / "t.json").write_bytes(data)
    with pytest.raises(
        ConfigError, match=r'^data\.tokenizer = "model": .*t\.json is no tokenizer'
    ) as caught:
        load_with(tmp_path, "model", 300, tmp_path / "t.json")
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"^tokenizer_path: .*none\.json cannot be read"):
        load_with(tmp_path, "model", 300, tmp_path / "none.json")


# --- is it enough? -----------------------------------------------------------------------------


def spec_on(*text: str, **tables: dict[str, object]) -> RunSpec:
    data = {"text": text, "held_out": 0.5} | tables.pop("data", {})
    table = {"name": "run", "target_tokens": 1_000, "model": {"context": 8}, "data": data}
    return RunSpec.model_validate(table | tables)


@pytest.mark.parametrize("count", [18, 19, 1_000])
def test_both_parts_together_are_the_stream_and_each_holds_a_window(count: int) -> None:
    tokens = np.arange(count, dtype=np.uint16)
    training, held_out = split_tokens(tokens, 8, 0.5)
    assert np.array_equal(np.concatenate([training, held_out]), tokens)
    assert min(len(training), len(held_out)) >= 9


def test_text_that_is_enough_is_checked_without_a_word_and_leaves_the_cache_built(
    tmp_path: Path,
) -> None:
    text = tmp_path / "a.txt"
    text.write_bytes(b"x" * 17)
    check_text(spec_on(str(text)), tmp_path / "none.json", tmp_path / "cache")
    assert len(cached(tmp_path)) == 1


@pytest.mark.parametrize(
    ("text_bytes", "part"), [(16, "training"), (5, "training")], ids=["one short", "far short"]
)
def test_too_little_text_is_found_before_anything_is_started(
    tmp_path: Path, text_bytes: int, part: str
) -> None:
    text = tmp_path / "a.txt"
    text.write_bytes(b"x" * text_bytes)
    with pytest.raises(TextError, match=rf"^data\.text: its {part} part has \d+ tokens, fewer"):
        check_text(spec_on(str(text)), tmp_path / "none.json", tmp_path / "cache")


def test_too_little_held_out_text_is_found_too(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_bytes(b"x" * 100)
    spec = spec_on(str(text), data={"held_out": 0.05})
    with pytest.raises(TextError, match=r"its held-out part has .* or change data\.held_out"):
        check_text(spec, tmp_path / "none.json", tmp_path / "cache")


def test_text_of_this_host_stands_in_for_the_paths_of_the_spec(tmp_path: Path) -> None:
    here = tmp_path / "here.txt"
    here.write_bytes(b"x" * 100)
    spec = spec_on("/nowhere/at/all.txt")
    with pytest.raises(TextError, match="matches no file"):
        check_text(spec, tmp_path / "none.json", tmp_path / "cache")
    check_text(spec, tmp_path / "none.json", tmp_path / "cache", [str(here)])
    with pytest.raises(TextError, match="matches no file"):
        check_text(spec_on(str(here)), tmp_path / "none.json", tmp_path / "cache", ["/nowhere"])


def test_a_trained_vocabulary_is_checked_with_its_own_tokens(tmp_path: Path) -> None:
    text, out = tmp_path / "a.txt", tmp_path / "bpe.json"
    text.write_bytes(b"the cat and the dog and the bird\n" * 50)
    train_bpe([str(text)], 300, out)
    data = {"tokenizer": "bpe"}
    fits = spec_on(str(text), data=data, model={"context": 8, "vocab_size": 300})
    check_text(fits, out, tmp_path / "cache")
    small = spec_on(str(text), data=data, model={"context": 8, "vocab_size": 256})
    with pytest.raises(ConfigError, match=r"model\.vocab_size = 256 is below"):
        check_text(small, out, tmp_path / "cache")
