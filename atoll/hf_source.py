"""`--hf SOURCE`: the configuration and the tokenizer of a causal language model, once for the whole run.

SOURCE is a directory as `save_pretrained` leaves it, a config.json, or a name on the Hugging Face hub.
Only these two JSON files are read: no weights, no code, and from a local source nothing of the library.
They go into the run directory, so islands need neither SOURCE nor the hub.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError

from protocol.errors import ConfigError
from protocol.spec import HfModel, read_toml

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
MAX_CONFIG_BYTES = 1 << 18
_MAX_READ_BYTES = 1 << 28


def config_of(source: str) -> str:
    """The text of its config.json. Raises ConfigError, as does all below."""
    path = _file(source, CONFIG)
    config = _json_object(source, path)
    text = json.dumps(config, indent=2).replace("'", "\\u0027")  # so it fits between '''
    if len(text) > MAX_CONFIG_BYTES:
        raise ConfigError(f"--hf {source}: {path.name} is larger than {MAX_CONFIG_BYTES} bytes")
    return text


def tokenizer_of(source: str) -> bytes:
    """Its tokenizer.json, compact."""
    path = _file(source, TOKENIZER)
    if not path.is_file():
        raise ConfigError(
            f'--hf {source}: has no {TOKENIZER}, which data.tokenizer = "model" needs: write one with '
            "AutoTokenizer.from_pretrained(...).save_pretrained(DIRECTORY)"
        )
    tokenizer = _json_object(source, path)
    return json.dumps(tokenizer, separators=(",", ":"), ensure_ascii=False).encode()


def with_config(spec: Path, config: str, new_model: bool) -> str:
    """The spec's text with this model in it; comments stay.

    Args:
        new_model: replaces the whole table `model`, of which only `context` stays.
    """
    recipe = _recipe_in(read_toml(spec))
    try:
        document = tomlkit.parse(spec.read_bytes())
        if new_model:
            old = document.pop("model", {})
            document["model"] = {
                "context": old.get("context", HfModel.model_fields["context"].default)
            }
        elif recipe not in (None, "hf"):
            raise ConfigError(
                f'{spec}: model.recipe = "{recipe}" is not what --hf makes: leave one of them out'
            )
        model = document.setdefault("model", tomlkit.table())
        if not isinstance(model, MutableMapping):
            raise ConfigError(f"{spec}: model: input should be a table")
        model["recipe"] = "hf"
        model["config"] = tomlkit.string(config, literal=True, multiline=True)
        text = document.as_string()
        tomllib.loads(text)
    except (TOMLKitError, ValueError) as error:
        raise ConfigError(f"{spec}: model.config cannot be put in: {error}") from None
    return text


def _recipe_in(table: Mapping[str, Any]) -> Any:
    model = table.get("model")
    return model.get("recipe") if isinstance(model, Mapping) else None


def _file(source: str, name: str) -> Path:
    path = Path(source)
    if path.is_dir():
        return path / name
    if path.is_file():
        return path if name == CONFIG else path.parent / name
    if not HUB_NAME.fullmatch(source):
        raise ConfigError(
            f"--hf {source}: no such file or directory, and no name on the Hugging Face hub"
        )
    return _from_hub(source, name)


def _from_hub(source: str, name: str) -> Path:
    try:
        import huggingface_hub
    except ImportError:
        raise ConfigError(
            f"--hf {source}: no such file or directory; a name on the hub needs the extra: "
            "pip install 'atoll[hf]'"
        ) from None
    try:
        return Path(huggingface_hub.hf_hub_download(source, name))
    except Exception as error:  # whatever its HTTP client raises
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"--hf {source}: no such file or directory here, and from the hub: {name}: {reason}"
        ) from None


def _json_object(source: str, path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MAX_READ_BYTES:
            raise ConfigError(f"--hf {source}: {path.name} is too large: is this the right file?")
        table = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"--hf {source}: {path.name} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--hf {source}: {path.name} is not valid JSON: {error}") from None
    if not isinstance(table, dict):
        raise ConfigError(f"--hf {source}: {path.name} must be a JSON object")
    return table
