"""The ``config.json`` of a model in Hugging Face's form, and the files that go with it."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError
from ..storage.format import JsonValue, cut_text, parse_json

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


def read_config(directory: Path) -> ModelConfig:
    """Read the ``config.json`` of a directory.

    Raises:
        CheckpointError: there is none, or it is malformed.
    """
    path = directory / CONFIG_NAME
    if not path.is_file():
        raise CheckpointError(f"there is no '{path}'; --config wants the directory of a model in Hugging Face's form")
    return read_config_file(path)


def read_config_file(path: Path) -> ModelConfig:
    """Read a ``config.json``.

    Raises:
        CheckpointError: it isn't there, or is malformed.
    """
    if not path.is_file():
        raise CheckpointError(f"there is no file '{path}'; give the config.json of a model in Hugging Face's form")
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


def companion_files(directory: Path) -> list[Path]:
    """Return the files beside a model's weights that are to go with them: configuration and tokenizer; sorted."""
    return sorted(path for path in directory.iterdir() if path.is_file() and any(fnmatch.fnmatch(path.name, one) for one in _COMPANIONS))
