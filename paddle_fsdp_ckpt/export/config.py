"""The ``config.json`` of a model in Hugging Face's form, and the files that go with it."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError
from ..storage.json_values import JsonValue, cut_text, parse_json

CONFIG_NAME = "config.json"
TIED = "tie_word_embeddings"
"""The field that says that the head's weight is the embedding's."""

_COMPANIONS = (
    CONFIG_NAME,
    "generation_config.json",
    "tokenizer*",
    "vocab.*",
    "merges.txt",
    "*.tiktoken",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*preprocessor_config.json",
)
_NESTED = ("thinker_config", "text_config")
"""Where models of several parts keep the configuration of the language model, from the outside in."""

_MAX_NBYTES = 1 << 26
_MOST_LAYERS = 1 << 12


@dataclass(frozen=True)
class ModelConfig:
    """What a ``config.json`` says.

    Attributes:
        path: of the file.
        levels: its objects, from that of the language model outwards.
    """

    path: Path
    levels: tuple[dict[str, JsonValue], ...]

    @property
    def layers(self) -> int:
        """How many layers the decoder has.

        Raises:
            CheckpointError: this is missing, or no number of layers.
        """
        return self.count("num_hidden_layers", most=_MOST_LAYERS)

    @property
    def model_type(self) -> JsonValue:
        """The family of the language model, or None."""
        return self.levels[0].get("model_type")

    @property
    def quantization(self) -> str | None:
        """How the model's tensors are quantized, such as ``gptq``; None where nothing says that they are."""
        fields = self.get("quantization_config")
        if not isinstance(fields, dict):
            return None
        if fields.get("quant_method"):
            return f"{fields['quant_method']!s:.100}"
        return "bitsandbytes" if fields.get("load_in_8bit") or fields.get("load_in_4bit") else None

    def get(self, name: str) -> JsonValue:
        """Return a field, from the innermost object that has it; None where none has."""
        return next((level[name] for level in self.levels if level.get(name) is not None), None)

    def count(self, name: str, default: int | None = None, *, most: int | None = None) -> int:
        """Return a field that must be a whole number from 1 on, to ``most`` perhaps; where it is missing, the default, if there is one.

        Raises:
            CheckpointError: it is missing or something else.
        """
        value = self.get(name)
        if value is None and default is not None:
            return default
        if type(value) is not int or value < 1 or (most is not None and value > most):
            to = "on" if most is None else f"to {most}"
            raise CheckpointError(f"'{self.path}' has {name} = {value!r:.100}, and a whole number from 1 {to} is needed")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Return a field that must be true or false, or the default where it is missing.

        Raises:
            CheckpointError: it is something else.
        """
        value = self.get(name)
        if value is None:
            return default
        if type(value) is not bool:
            raise CheckpointError(f"'{self.path}' has {name} = {value!r:.100}, and true or false is needed")
        return value


def read_config(path: Path) -> ModelConfig:
    """Read a ``config.json``, or the one in a directory.

    Raises:
        CheckpointError: there is none, or it is malformed.
    """
    if path.is_dir():
        path = path / CONFIG_NAME
    if not path.is_file():
        raise CheckpointError(
            f"there is no file '{path}'; give the {CONFIG_NAME} of a model in Hugging Face's form, or the directory in which it lies"
        )
    if path.stat().st_size > _MAX_NBYTES:
        raise CheckpointError(f"'{path}' has {path.stat().st_size} bytes, which no model's configuration has; it was not read")
    try:
        fields = parse_json(path.read_text(encoding="utf-8"), allow_nan=True)
    except ValueError as error:
        raise CheckpointError(f"'{path}' is not JSON: {cut_text(error)}") from error
    if not isinstance(fields, dict):
        raise CheckpointError(f"'{path}' holds a {type(fields).__name__}, not an object")
    levels = [fields]
    for name in _NESTED:
        inner = levels[0].get(name)
        if isinstance(inner, dict):
            levels.insert(0, inner)
    return ModelConfig(path, tuple(levels))


def companion_files(config: Path) -> dict[str, Path]:
    """Return the files that are to go with a model's weights, configuration and tokenizer, by the names that they get; sorted.

    Args:
        config: the configuration, whatever it is called, beside which the others lie; or the directory in which all lie.
    """
    directory = config if config.is_dir() else config.parent
    beside = sorted(path for path in directory.iterdir() if path.is_file() and any(fnmatch.fnmatch(path.name, one) for one in _COMPANIONS))
    files = {path.name: path for path in beside}
    return files if config.is_dir() else dict(sorted((files | {CONFIG_NAME: config}).items()))
