"""Read a tokenizer folder with the package tokenizers, if that gives the same tokens as transformers' AutoTokenizer.

For some model families transformers builds the tokenizer with its own code from parts of tokenizer.json: for example,
it replaces the pre-tokenizer of every folder of model type qwen2. A folder is read here only if its files show that
both results are the same; for others `read_folder` raises NeedsTransformersError, so that no text is tokenised
differently than in a trainer or a worker. Imports no torch and no transformers.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from ludic.errors import ModelError


class Tokenizer(Protocol):
    """Interface of the tokenizers that ludic uses; transformers' tokenizers implement it."""

    name_or_path: str
    """Folder or id that it was loaded from, for errors."""
    chat_template: str | dict[str, str] | None
    """Its chat template, or several by name."""
    split_special_tokens: bool
    """True if names of special tokens in a text are encoded as plain text."""

    @property
    def special_tokens_map(self) -> Mapping[str, str]:
        """Names of tokens with a special role, such as eos_token, by role."""
        ...

    @property
    def all_special_tokens(self) -> Sequence[str]:
        """Names of these tokens and of other special tokens."""
        ...

    @property
    def added_tokens_decoder(self) -> Mapping[int, AddedToken]:
        """Tokens that were added to the vocabulary, by id."""
        ...

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text."""
        ...

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a text."""
        ...

    def __call__(self, text: Any, *, add_special_tokens: bool = True) -> Mapping[str, Any]:
        """Return the `input_ids` of a text, or of each of several."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids."""
        ...

    def convert_tokens_to_ids(self, tokens: str) -> int | None:
        """Return the id of a token by its name; that of the unknown token if there is none."""
        ...

    def get_chat_template(self, *, tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """Return the chat template, of several the one for tools or the default. Raises ValueError without one."""
        ...


class NeedsTransformersError(ModelError):
    """Only transformers can read this tokenizer folder correctly."""


NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Roles of tokens in every tokenizer; a folder may name more."""
_PLAIN = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes of transformers that use tokenizer.json unchanged."""
OVERRULED: Mapping[str, str] = {
    "hyperclovax_vision_v2": "GPT2Tokenizer",
    "qwen2": "Qwen2Tokenizer",
    "qwen3_5": "Qwen3_5Tokenizer",
    "qwen3_5_moe": "Qwen3_5Tokenizer",
    "qwen3_5_moe_text": "Qwen3_5Tokenizer",
    "qwen4_exp": "Qwen3_5Tokenizer",
}
"""Class that transformers uses for a model type, whatever tokenizer_config.json says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """Parts of a byte-level BPE tokenizer that a class of transformers builds instead of those in tokenizer.json."""

    normalizer: Any
    pre_tokenizer: Any
    defaults: tuple[str, ...]
    """Named tokens that the class adds itself."""


_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BUILT: Mapping[str, Built] = {
    "Qwen2Tokenizer": Built(
        normalizer={"type": "NFC"},
        pre_tokenizer={
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": _QWEN2_WORDS}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        },
        defaults=("unk_token", "eos_token", "pad_token"),
    ),
    "GPT2Tokenizer": Built(
        normalizer=None,
        pre_tokenizer={"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
        defaults=("unk_token", "bos_token", "eos_token"),
    ),
}
"""By class; tests/models/test_tokenizer.py compares them with transformers."""


class FolderTokenizer:
    """A tokenizer that `read_folder` read; has the members of transformers' tokenizers that `Tokenizer` lists."""

    def __init__(self, backend: Backend, config: Mapping[str, Any], name_or_path: str) -> None:
        """config: tokenizer_config.json, completed from other files. Adds tokens to the backend that only the config
        names."""
        self.backend_tokenizer, self.name_or_path = backend, name_or_path
        template = config.get("chat_template")
        if isinstance(template, list):
            template = {each["name"]: each["template"] for each in template}
        self.chat_template: str | dict[str, str] | None = template
        self.split_special_tokens = bool(config.get("split_special_tokens", False))
        corrupts = config.get("clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False)
        is_bpe = type(backend.model).__name__ == "BPE"
        self._cleans_up = config.get("clean_up_tokenization_spaces", False) and (corrupts or not is_bpe)
        self._named = _named(config, backend)
        self._more = list(_texts_of("extra_special_tokens", config.get("extra_special_tokens") or []))
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = self.split_special_tokens
        _add(backend, config.get("added_tokens_decoder", {}), self._named, self._more)

    @property
    def special_tokens_map(self) -> dict[str, str]:
        return {name: str(token) for name, token in self._named.items()}

    @property
    def all_special_tokens(self) -> list[str]:
        return list(dict.fromkeys(map(str, [*self._named.values(), *self._more])))

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        return self.backend_tokenizer.get_added_tokens_decoder()

    @property
    def eos_token_id(self) -> int | None:
        return self._id_of("eos_token")

    @property
    def bos_token_id(self) -> int | None:
        return self._id_of("bos_token")

    def _id_of(self, use: str) -> int | None:
        return self.convert_tokens_to_ids(str(self._named[use])) if use in self._named else None

    def __call__(self, text: Any, *, add_special_tokens: bool = True) -> dict[str, Any]:
        if isinstance(text, str):
            return {"input_ids": self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids}
        found = self.backend_tokenizer.encode_batch_fast(list(text), add_special_tokens=add_special_tokens)
        return {"input_ids": [each.ids for each in found]}

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        text = self.backend_tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        if self._cleans_up:
            for found, instead in _CLEANED_UP:
                text = text.replace(found, instead)
        return text

    def convert_tokens_to_ids(self, tokens: str) -> int | None:
        found = self.backend_tokenizer.token_to_id(tokens)
        unknown = self._named.get("unk_token")
        return found if found is not None or unknown is None else self.backend_tokenizer.token_to_id(str(unknown))

    def get_chat_template(self, *, tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        template = self.chat_template
        if isinstance(template, str):
            return template
        for name in ("tool_use", "default") if tools is not None else ("default",):
            if template and name in template:
                return template[name]
        raise ValueError(f"it has no template named default, but {sorted(template or {})}")


_CLEANED_UP = (
    *((f" {mark}", mark) for mark in ".?!,"),
    (" ' ", "'"),
    *((f" {end}", end) for end in ("n't", "'m", "'s", "'ve", "'re")),
)
"""Replacements of transformers in decoded texts, in this order, for tokenizers with clean_up_tokenization_spaces."""


# --- Reading a folder ------------------------------------------------------------------------------------


def read_folder(folder: str | Path) -> FolderTokenizer:
    """Return the tokenizer of a local folder.

    Raises NeedsTransformersError if only transformers can read it correctly; any error if a file is damaged.
    """
    folder = Path(folder)
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise NeedsTransformersError("it has no tokenizer.json")
    if any(folder.glob("*tekken*.json")):
        raise NeedsTransformersError("it has files of mistral-common, which are taken where that is installed")
    config = _config_of(folder)
    model = _json(folder / "config.json")
    text = file.read_text(encoding="utf-8")
    own = config.pop("tokenizer_class", None)
    classes = {own, OVERRULED.get(model.get("model_type") or "")} - {None}
    declared = {key for key, value in config.items() if value} & _UNREAD
    declared |= {"model_name"} & {*model} | ({"tokenizer_class"} & {*model} if own is None else set())
    if declared or not classes:
        raise NeedsTransformersError(f"its class depends on {', '.join(sorted(declared)) or 'the type of its model'}")
    for name in classes:
        name = name if name in _PLAIN else name.removesuffix("Fast")
        if name not in _PLAIN and (why := _difference(name, json.loads(text), config)):
            raise NeedsTransformersError(f"transformers builds its {name} otherwise than tokenizer.json says: {why}")
    backend = Backend.from_str(text)
    _merge_legacy(folder, config, backend)
    return FolderTokenizer(backend, config, str(folder))


_UNREAD = {"auto_map", "fast_tokenizer_files", "fix_mistral_regex", "init_inputs", "model_specific_special_tokens"}
"""Entries of tokenizer_config.json by which transformers chooses other code or files."""


def _json(file: Path) -> dict[str, Any]:
    values = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if not isinstance(values, dict):
        raise ModelError(f"{file}: wanted a JSON object")
    return values


def _config_of(folder: Path) -> dict[str, Any]:
    """Return tokenizer_config.json, with the chat templates that are files of their own."""
    config = _json(folder / "tokenizer_config.json")
    templates = {"default": folder / "chat_template.jinja"} if (folder / "chat_template.jinja").is_file() else {}
    templates |= {file.name.removesuffix(".jinja"): file for file in folder.glob("additional_chat_templates/*.jinja")}
    texts = {name: file.read_text(encoding="utf-8") for name, file in templates.items()}
    if texts:
        config["chat_template"] = texts["default"] if [*texts] == ["default"] else texts
    if "additional_special_tokens" in config and not config.get("extra_special_tokens"):
        config["extra_special_tokens"] = config.pop("additional_special_tokens")
    if config.get("additional_special_tokens"):
        raise NeedsTransformersError("it has both additional_special_tokens and extra_special_tokens")
    return config


def _difference(name: str, tokenizer: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Describe how a tokenizer.json differs from the tokenizer that a class of transformers builds; empty if it does
    not."""
    built = BUILT.get(name)
    if built is None:
        return "ludic does not know what that class builds"
    model = tokenizer["model"]
    options = {"dropout": None, "unk_token": None, "continuing_subword_prefix": "", "end_of_word_suffix": ""}
    flags = dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False)
    differs = [key for key, value in {**options, **flags}.items() if (model.get(key) or value) != value]
    differs += [key for key in ("normalizer", "pre_tokenizer") if _kept(tokenizer.get(key)) != getattr(built, key)]
    differs += ["decoder"] if (tokenizer.get("decoder") or {}).get("type") != "ByteLevel" else []
    differs += ["model"] if model.get("type") != "BPE" else []
    differs += [key for key in built.defaults if key not in config]
    differs += ["add_prefix_space"] if config.get("add_prefix_space") else []
    # The class appends them to the vocabulary in order, wherever tokenizer.json has them.
    added = [each["id"] for each in tokenizer["added_tokens"] if each["content"] not in model["vocab"]]
    size = len(model["vocab"])
    differs += ["added_tokens"] if added != [*range(size, size + len(added))] else []
    own = {each["id"]: {key: value for key, value in each.items() if key != "id"} for each in tokenizer["added_tokens"]}
    declared = {int(token): value for token, value in config.get("added_tokens_decoder", own).items()}
    differs += ["added_tokens_decoder"] if declared != own else []
    return ", ".join(differs)


def _kept(component: Any) -> Any:
    """Return a component of a tokenizer.json without entries that change only the offsets of tokens."""
    if isinstance(component, list):
        return [_kept(each) for each in component]
    if isinstance(component, dict):
        return {key: _kept(value) for key, value in component.items() if key != "trim_offsets"}
    return component


def _merge_legacy(folder: Path, config: dict[str, Any], backend: Backend) -> None:
    """Make AddedTokens of the tokens in a tokenizer_config.json, and of those in files beside older ones."""
    if "added_tokens_decoder" in config:
        added = {int(number): AddedToken(**token) for number, token in config["added_tokens_decoder"].items()}
    else:
        if (folder / "added_tokens.json").is_file():
            raise NeedsTransformersError("its added_tokens.json belongs to a tokenizer of an older kind")
        added = backend.get_added_tokens_decoder()
        for name, value in _json(folder / "special_tokens_map.json").items():
            if name == "extra_special_tokens":
                raise NeedsTransformersError("its special_tokens_map.json has extra_special_tokens")
            if isinstance(value, dict):
                value = AddedToken(**{key: flag for key, flag in value.items() if key != "special"}, special=True)
            config[name] = value
        if "extra_special_tokens" not in config and "additional_special_tokens" in config:
            config["extra_special_tokens"] = config.pop("additional_special_tokens")
    config["added_tokens_decoder"] = added
    for name in [key for key in config if key.endswith("_token")]:
        config[name] = _as_token(config[name])


def _as_token(value: Any) -> Any:
    if isinstance(value, dict) and value.get("__type") == "AddedToken":
        return AddedToken(**{key: each for key, each in value.items() if key != "__type"})
    return value


def _named(config: Mapping[str, Any], backend: Backend) -> dict[str, str | AddedToken]:
    """Return the tokens with a special role, by role."""
    values = dict(config)
    if backend.padding is not None:
        values.setdefault("pad_token", backend.padding["pad_token"])
    found = {name: values[name] for name in NAMED if values.get(name) is not None}
    for name, value in found.items():
        if not isinstance(value, str | AddedToken):
            raise NeedsTransformersError(f"its {name} is {value!r}")
    more = {key: value for key, value in values.items() if key.endswith("_token") and key not in NAMED}
    found |= {key: value for key, value in more.items() if isinstance(value, str | AddedToken)}
    extra = values.get("extra_special_tokens")
    return found | dict(_items_of("extra_special_tokens", extra) if isinstance(extra, dict) else {})


def _items_of(name: str, tokens: Mapping[str, Any]) -> dict[str, str | AddedToken]:
    return dict(zip(tokens, _texts_of(name, list(tokens.values())), strict=True))


def _texts_of(name: str, tokens: Any) -> Sequence[str | AddedToken]:
    found = [] if isinstance(tokens, dict) else [_as_token(each) for each in tokens]
    if not all(isinstance(each, str | AddedToken) for each in found):
        raise NeedsTransformersError(f"its {name} are not texts")
    return found


def _add(
    backend: Backend,
    declared: Mapping[int, AddedToken],
    named: Mapping[str, str | AddedToken],
    more: Sequence[str | AddedToken],
) -> None:
    """Add tokens that tokenizer.json lacks, in the order of transformers, which determines their ids.

    Existing ones are added again, since a token with a role becomes special.
    """
    new: list[str | AddedToken] = [token for _, token in sorted(declared.items())]
    known = {token.content for token in backend.get_added_tokens_decoder().values()} | {str(token) for token in new}
    for token in (*named.values(), *more):
        if str(token) not in known and token not in new:
            new.append(token)
    added = [AddedToken(token, special=True) if isinstance(token, str) else token for token in new]
    for token in added:
        token.special = token.special or str(token) in map(str, named.values())
    backend.add_tokens(added)
