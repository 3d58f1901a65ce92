"""Text files -> one memory-mapped stream of token numbers, built once per content.

`data.text` holds paths and globs (`**` = any depth, `{stdlib}` = the Python library's folder); an entry
that begins with "!" takes files out again. Files are sorted and read once each, a newline after every
one. A tokenizer is a tokenizer.json, trained by `train_bpe` or a model's own; it may put its marks around
a file, but never cuts or pads one. The stream is cached under a digest of the tokenizer and of every
file's path, size and time of change; the builder holds a lock on the cache folder, so processes that
start together build it once, and a reader sees a whole cache file or none.
"""

from __future__ import annotations

import fcntl
import glob
import json
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from protocol.errors import ConfigError
from protocol.spec import Data, RunSpec

CACHE_VERSION = 1
SEPARATOR = b"\n"
EXTRAS = {"bpe": "bpe", "model": "hf"}  # data.tokenizer -> the extra with its library

Tokens = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
Encode = Callable[[bytes], npt.ArrayLike]


class TextError(ConfigError, ValueError):
    """`data.text` does not yield a usable token stream."""


def load_tokens(data: Data, vocab_size: int, tokenizer_path: str | None, cache_dir: Path) -> Tokens:
    """The read-only token stream of `data.text`.

    Raises:
        TextError: no file, an unreadable one, or no text at all.
        ConfigError: the tokenizer is missing, none, or has more tokens than `vocab_size`.
    """
    files = expand(data.text)
    tokenizer_path = tokenizer_path if data.tokenizer != "bytes" else None
    dtype = np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)
    cache_dir.mkdir(parents=True, exist_ok=True)
    path = cache_dir / f"tokens-{_key(files, vocab_size, tokenizer_path)}.{dtype.name}"
    with _locked(cache_dir):
        if not path.exists():
            _build(path, files, dtype, _encoder(data, vocab_size, tokenizer_path))
    return np.memmap(path, dtype, mode="r")


def check_text(spec: RunSpec, tokenizer: Path, cache_dir: Path, text: Sequence[str] = ()) -> None:
    """Builds the token cache and sees that both parts hold a window, before anything is started.

    `text` replaces the spec's paths where this host's files lie elsewhere. Raises TextError.
    """
    data = spec.data.model_copy(update={"text": tuple(text)}) if text else spec.data
    model = spec.built_in_model
    tokens = load_tokens(data, model.vocab_size, str(tokenizer), cache_dir)
    split_tokens(tokens, model.context, data.held_out)


def split_tokens(tokens: Tokens, context: int, held_out: float) -> tuple[Tokens, Tokens]:
    """(training part, held-out part). Raises TextError if either holds no window."""
    cut = int(len(tokens) * (1 - held_out))
    parts = tokens[:cut], tokens[cut:]
    for part, name in zip(parts, ("training", "held-out"), strict=True):
        if len(part) <= context:
            raise TextError(
                f"data.text: its {name} part has {len(part)} tokens, fewer than "
                f"model.context + 1 = {context + 1}: add text, or change data.held_out"
            )
    return parts


def expand(text: Sequence[str]) -> list[str]:
    """Files named by the entries of `data.text`, sorted, each once."""
    named: set[str] = set()
    excluded: set[str] = set()
    for entry in text:
        pattern = entry.removeprefix("!").replace("{stdlib}", sysconfig.get_path("stdlib"))
        found = glob.glob(pattern, recursive=True, include_hidden=True)
        files = {os.path.abspath(path) for path in found if os.path.isfile(path)}
        if entry.startswith("!"):
            excluded |= files
        elif files:
            named |= files
        else:
            raise TextError(f"data.text: {entry!r} matches no file: correct the path or glob")
    if not named - excluded:
        raise TextError('data.text: no file is left: take out some of the entries with "!"')
    return sorted(named - excluded)


def train_bpe(paths: Sequence[str], vocab_size: int, out_path: Path) -> None:
    """Trains a byte-level BPE tokenizer on the files and writes it as a JSON file."""
    library = _tokenizers("bpe")
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (_read(path).decode(errors="replace") for path in paths)
    tokenizer.train_from_iterator(texts, trainer)
    temporary = out_path.with_suffix(".tmp")
    tokenizer.save(str(temporary))
    os.replace(temporary, out_path)


def _tokenizers(kind: str) -> Any:
    try:
        import tokenizers
    except ImportError:
        raise ConfigError(
            f"data.tokenizer = \"{kind}\" needs the extra: pip install 'atoll[{EXTRAS[kind]}]'"
        ) from None
    return tokenizers


def _encoder(data: Data, vocab_size: int, tokenizer_path: str | None) -> Encode:
    if tokenizer_path is None:
        return lambda text: np.frombuffer(text, np.uint8)
    tokenizer = _tokenizer(data.tokenizer, tokenizer_path)
    needed = max(tokenizer.get_vocab().values(), default=-1) + 1
    if needed > vocab_size:
        key = "model.config: its " if data.tokenizer == "model" else "model."
        raise ConfigError(
            f"{key}vocab_size = {vocab_size} is below the {needed} tokens of {tokenizer_path}: raise it"
        )
    return lambda text: tokenizer.encode(text.decode(errors="replace")).ids


def _tokenizer(kind: str, path: str) -> Any:
    try:
        tokenizer = _tokenizers(kind).Tokenizer.from_file(path)
    except ConfigError:
        raise
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(
            f'data.tokenizer = "{kind}": {path} is no tokenizer.json that can be read: {error}'
        ) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _key(files: Sequence[str], vocab_size: int, tokenizer_path: str | None) -> str:
    tokenizer = "bytes"
    if tokenizer_path is not None:
        tokenizer = blake3(_read(tokenizer_path, "tokenizer_path")).hexdigest()
    stats = [(path, stat.st_size, stat.st_mtime_ns) for path in files if (stat := os.stat(path))]
    described = [CACHE_VERSION, tokenizer, vocab_size, stats]
    return blake3(json.dumps(described).encode()).hexdigest(16)


def _build(path: Path, files: Sequence[str], dtype: np.dtype[Any], encode: Encode) -> None:
    """Writes beside `path` and renames; only the holder of the lock is here."""
    temporary = path.with_suffix(".tmp")
    text_bytes = 0
    with open(temporary, "wb") as out:
        for file in files:
            data = _read(file)
            text_bytes += len(data)
            out.write(np.asarray(encode(data + SEPARATOR), dtype).tobytes())
        out.flush()
        os.fsync(out.fileno())
    if not text_bytes:
        temporary.unlink()
        raise TextError(f"data.text: its {len(files)} files are empty: add text")
    os.replace(temporary, path)


def _read(path: str, key: str = "data.text") -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise TextError(
            f"{key}: {path} cannot be read: {error.strerror}; mend or leave it out"
        ) from None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds the folder's advisory lock; it ends with the process, whatever ends that."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
