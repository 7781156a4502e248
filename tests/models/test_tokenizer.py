"""A folder's tokenizer and template as ludic reads them are those of transformers, or it says that it can't."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from call_templates import FORMATS, tokenizer_with
from chat_templates import FAMILIES
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError
from models.test_encoding import tokenizers
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers, processors
from tokenizers.models import WordPiece
from transformers import AutoTokenizer, GPT2Tokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer
from transformers.models.auto import tokenization_auto
from transformers.utils.chat_template_utils import render_jinja_template

from ludic.models import chat
from ludic.models.chat import load_tokenizer, read_tokenizer
from ludic.models.chat_template import render
from ludic.models.tiny import make_tiny_model, train_tokenizer
from ludic.models.tokenizer import BUILT, OVERRULED, NeedsTransformersError, read_folder

Edit = Callable[[dict[str, Any]], Any]
TEXTS = (
    *("", " ", "ab Ba  é日🦊 e\u0301\n\n it's 12 . ?\tX <|im_end|>\n", "<eos>aa<pad> <unk>", "[CLS] ab [SEP] , 's ."),
    *(f"{name} {name}x" for name in ("<|im_start|>", "<s>", "</s>", "[UNK]", "<|new|>", "<tool_call>", "<image>")),
)
CALL = {"type": "function", "function": {"name": "add", "arguments": {"é<": [1, 2.5, None]}}}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "ab <é> 日"}],
    [{"role": "system", "content": "b"}, {"role": "user", "content": "a\n"}, {"role": "assistant", "content": " b "}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "b\n"},
        {"role": "tool", "content": "b", "name": "add", "tool_call_id": "call00000"},
        {"role": "assistant", "content": "<think>\na\n</think>\n\nb"},
        {"role": "user", "content": "b"},
    ],
]
SCHEMAS = [{"type": "function", "function": {"name": "add", "description": "Ä", "parameters": {"type": "object"}}}]


def save(tokenizer: PreTrainedTokenizerFast, folder: Path, *, model_type: str | None = "qwen3") -> Path:
    tokenizer.save_pretrained(folder)
    if model_type is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type, "vocab_size": 512}))
    return folder


def edit(folder: Path, name: str, change: Edit) -> Path:
    file = folder / name
    values = json.loads(file.read_text()) if file.exists() else {}
    change(values)
    file.write_text(json.dumps(values))
    return folder


def edited(name: str, change: Edit, *, model_type: str | None = "qwen3") -> Callable[[Path], Path]:
    return lambda folder: edit(save(FAMILIES["chatml"].tokenizer(), folder, model_type=model_type), name, change)


def _templates(folder: Path) -> Path:
    (folder / "additional_chat_templates").mkdir(parents=True)
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools | tojson }}{{ messages | tojson }}")
    return save(FAMILIES["chatml"].tokenizer(), folder)


def _wordpiece(folder: Path) -> Path:
    words = {each: number for number, each in enumerate(["[UNK]", "[CLS]", "[SEP]", "ab", "##b", ".", ",", "'", "s"])}
    tokenizer = Tokenizer(WordPiece(words, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.BertPreTokenizer()
    ends = [("[CLS]", 1), ("[SEP]", 2)]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(pad_token="[PAD]", length=9)
    own = {"bos_token": "[CLS]", "eos_token": "[SEP]", "unk_token": "[UNK]"}
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=True, **own)
    return save(made, folder)


def _special_files(folder: Path) -> Path:
    """As older versions of transformers wrote them."""
    save(FAMILIES["chatml"].tokenizer(), folder)
    flags = {"lstrip": False, "normalized": False, "rstrip": True, "single_word": False}
    named = {"bos_token": {"content": "<|new|>", **flags}, "eos_token": "<|im_end|>"}
    more = {"additional_special_tokens": ["<|im_start|>", "<image>"]}
    edit(folder, "special_tokens_map.json", lambda values: values.update(named | more))
    return edit(folder, "tokenizer_config.json", lambda values: values.pop("added_tokens_decoder", None))


def _built(cls: type, **options: Any) -> Callable[[Path], Path]:
    """A folder as those of real models of a class: tokenizer.json holds what the class builds."""

    def write(folder: Path) -> Path:
        vocab = {each: number for number, each in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        vocab |= {"ab": len(vocab), "Ġa": len(vocab) + 1}
        own = {"unk_token": None, "bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|im_start|>"}
        tokenizer = cls(vocab=vocab, merges=[("a", "b"), ("Ġ", "a")], **own | options)
        tokenizer.chat_template = FAMILIES["chatml"].template
        save(tokenizer, folder, model_type="qwen2" if cls is Qwen2Tokenizer else "llama")
        return edit(folder, "tokenizer_config.json", lambda values: values.update(own))

    return write


_LOOPS = """\
{% for m in messages %}
    {% if loop.index0 == 1 %}{% continue %}{% endif %}
    {% generation %}
  {{ m.content | tojson(indent=2) }}
    {%- endgeneration %}
    {% if loop.index0 > 2 %}{% break %}{% endif %}
{% endfor %}
{{ strftime_now('%Y') }}{% if tools %}{{ raise_exception('no ' + tools[0].function.name) }}{% endif %}
"""


def _changed_qwen2(name: str, change: Edit) -> Callable[[Path], Path]:
    return lambda folder: edit(_built(Qwen2Tokenizer)(folder), name, change)


def _renumber(values: dict[str, Any]) -> None:
    values["added_tokens"].append({**values["added_tokens"][-1], "id": 500, "content": "<|far|>"})


def _all_plain(values: dict[str, Any]) -> None:
    for token in values["added_tokens"]:
        token["special"] = False


def _class_of_model(folder: Path) -> Path:
    edited("tokenizer_config.json", lambda values: values.pop("tokenizer_class"))(folder)
    return edit(folder, "config.json", lambda values: values.update(tokenizer_class="PreTrainedTokenizerFast"))


def _tiny(folder: Path) -> Path:
    make_tiny_model(str(folder), ["aa", "bb", "ab"])
    return folder


def _config(**values: Any) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        edited("tokenizer_config.json", lambda config: config.update(values))(folder)
        if "chat_template" in values:
            (folder / "chat_template.jinja").unlink()
        return folder

    return write


def _with_model_type(model_type: str) -> Callable[[Path], Path]:
    return lambda folder: save(FAMILIES["chatml"].tokenizer(), folder, model_type=model_type)


SAME: Mapping[str, Callable[[Path], Path]] = {
    **{
        name: lambda folder, each=each: save(each.tokenizer(["ab\n\nb"] * 9), folder) for name, each in FAMILIES.items()
    },
    **{
        f"calls {number}": lambda folder, each=each: save(tokenizer_with(each), folder)
        for number, each in enumerate(FORMATS)
    },
    "tiny": _tiny,
    "bytes": lambda folder: save(train_tokenizer(["ab"] * 9, vocab_size=300), folder),
    "without config.json": edited("tokenizer_config.json", lambda values: None, model_type=None),
    "of llama": _with_model_type("llama"),
    "of a type that nobody knows": _with_model_type("somebodys_own"),
    "with a class in config.json that is not asked": edited(
        "config.json", lambda values: values.update(tokenizer_class="GPT2Tokenizer")
    ),
    "of mistral": _with_model_type("mistral"),
    "of phi3, whose class is overruled by the plain one": _with_model_type("phi3"),
    "wordpiece": _wordpiece,
    "several templates": _templates,
    "a list of templates": _config(chat_template=[{"name": "default", "template": "{{ bos_token }}{{ eos_token }}"}]),
    "blanks, loops and functions": _config(chat_template=_LOOPS),
    "padding that no configuration names": lambda folder: edit(
        _wordpiece(folder), "tokenizer_config.json", lambda values: values.pop("pad_token", None)
    ),
    "a named token that is not special by itself": _config(
        bos_token="<s>", added_tokens_decoder={"999": {"content": "<s>", "special": False}}
    ),
    "a named token that is not special in tokenizer.json": lambda folder: edit(
        save(FAMILIES["chatml"].tokenizer(), folder), "tokenizer.json", _all_plain
    ),
    "new tokens": _config(bos_token="<|new|>", image_token="<image>", extra_special_tokens=["<|more|>", "<s>"]),
    "named extra tokens": _config(extra_special_tokens={"image_token": "<image>", "video_token": "<|im_start|>"}),
    "old extra tokens": _config(extra_special_tokens=None, additional_special_tokens=["<|more|>"]),
    "names as text": _config(split_special_tokens=True),
    "bos asked for": _config(bos_token="<s>", add_bos_token=True, add_eos_token=True),
    "files of special tokens": _special_files,
    "files that it names": _config(vocab_file="/nowhere", chat_template_file="/nowhere"),
    "qwen2": _built(Qwen2Tokenizer),
    "gpt2": _built(GPT2Tokenizer),
}
"""Folders that both read."""
OTHERS: Mapping[str, tuple[Callable[[Path], Path], str]] = {
    "qwen2 with other words": (_with_model_type("qwen2"), "Qwen2Tokenizer .*normalizer, pre_tokenizer"),
    "qwen2 by its class": (_config(tokenizer_class="Qwen2TokenizerFast"), "Qwen2Tokenizer .*pre_tokenizer"),
    "gpt2 with spaces": (_built(GPT2Tokenizer, add_prefix_space=True), "pre_tokenizer, add_prefix_space"),
    "qwen2 without pad_token": (
        _changed_qwen2("tokenizer_config.json", lambda values: values.pop("pad_token")),
        "pad_token",
    ),
    "qwen2 with other flags": (
        _changed_qwen2("tokenizer_config.json", lambda v: v.update(added_tokens_decoder={"5": {"content": "<s>"}})),
        "added_tokens_decoder",
    ),
    "qwen2 with gaps": (_changed_qwen2("tokenizer.json", _renumber), "added_tokens"),
    "llama": (_config(tokenizer_class="LlamaTokenizerFast"), "does not know what that class builds"),
    "no class": (
        edited("tokenizer_config.json", lambda values: values.pop("tokenizer_class")),
        "the type of its model",
    ),
    "a class in config.json": (_class_of_model, "tokenizer_class"),
    "files of mistral-common": (edited("tekken.json", lambda values: None), "mistral-common"),
    "extra tokens of two kinds": (
        _config(extra_special_tokens={"image_token": "<image>"}, additional_special_tokens=["<|more|>"]),
        "both additional_special_tokens and extra_special_tokens",
    ),
    "code": (_config(auto_map={"AutoTokenizer": ["a.B", None]}), "auto_map"),
    "other words of mistral": (_config(fix_mistral_regex=True), "fix_mistral_regex"),
    "added_tokens.json": (edited("added_tokens.json", lambda values: values.update({"<|x|>": 400})), "older kind"),
}
"""Folders that only transformers reads, and why."""


def everything(tokenizer: Any) -> dict[str, Any]:
    """What ludic asks of a tokenizer."""
    texts = [*TEXTS]
    found = {
        name: tokenizer(texts, add_special_tokens=added)["input_ids"] for name, added in (("all", True), ("own", False))
    }
    ids = found["own"][2] + [tokenizer.eos_token_id or 0, 3, 0, 1, 2, 3, 5, 4, 5, 3, 7, 8]
    return {
        **found,
        "one": [tokenizer(text)["input_ids"] for text in texts],
        "decoded": [tokenizer.decode(ids, skip_special_tokens=skipped) for skipped in (True, False)],
        "ids": [tokenizer.convert_tokens_to_ids(name) for name in ("ab", "<|im_end|>", "<image>", "nothing")],
        "named": dict(tokenizer.special_tokens_map),
        "special": sorted(tokenizer.all_special_tokens),
        "added": {number: repr(token) for number, token in tokenizer.added_tokens_decoder.items()},
        "ends": (tokenizer.eos_token_id, tokenizer.bos_token_id),
        "template": tokenizer.chat_template,
        "split": tokenizer.split_special_tokens,
    }


def rendered(tokenizer: Any, messages: list[dict[str, Any]], tools: Any, prompted: bool) -> Any:
    """Text and marks by ludic, or the error of the template."""
    try:
        template = tokenizer.get_chat_template(tools=tools)
        own = dict(tokenizer.special_tokens_map)
        return render(template, messages, tools=tools, add_generation_prompt=prompted, special_tokens=own)
    except Exception as error:
        return type(error), str(error) if isinstance(error, TemplateError) else ""


def rendered_there(tokenizer: Any, messages: list[dict[str, Any]], tools: Any, prompted: bool) -> Any:
    try:
        text = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=prompted, tokenize=False)
        _, marks = render_jinja_template(
            [messages],
            tools=tools,
            chat_template=tokenizer.get_chat_template(tools=tools),
            add_generation_prompt=prompted,
            return_assistant_tokens_mask=True,
            **tokenizer.special_tokens_map,
        )
        return text, marks[0]
    except Exception as error:
        return type(error), str(error) if isinstance(error, TemplateError) else ""


@pytest.mark.parametrize("name", SAME)
def test_a_folder_gives_the_tokens_texts_and_marks_that_transformers_gives(name: str, tmp_path: Path) -> None:
    folder = SAME[name](tmp_path / "model")
    mine, theirs = read_folder(folder), load_tokenizer(str(folder))
    assert everything(mine) == everything(theirs)
    for messages in CONVERSATIONS:
        for tools in (None, SCHEMAS):
            for prompted in (False, True):
                wanted = rendered_there(theirs, messages, tools, prompted)
                assert rendered(mine, messages, tools, prompted) == wanted


@pytest.mark.parametrize("name", OTHERS)
def test_a_folder_that_transformers_reads_otherwise_is_refused_or_read_by_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, why = OTHERS[name]
    folder = write(tmp_path / "model")
    with pytest.raises(NeedsTransformersError, match=why):
        read_folder(folder)
    if name != "code":
        assert isinstance(read_tokenizer(str(folder)), PreTrainedTokenizerFast)
    monkeypatch.setattr(chat, "require", _refuse)
    with pytest.raises(ImportError, match=f"transformers, train, {folder}.*{why}"):
        read_tokenizer(str(folder))


def _refuse(*what: str) -> None:
    raise ImportError(", ".join(what))


def test_model_types_whose_class_is_overruled_are_those_of_transformers() -> None:
    names = {
        each: tokenization_auto.TOKENIZER_MAPPING_NAMES[each]
        for each in tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
    }
    plain = ("TokenizersBackend", "PythonBackend", "PreTrainedTokenizerFast", "MistralCommonBackend", None)
    assert {each: name for each, name in names.items() if name not in plain} == OVERRULED


@pytest.mark.parametrize("name", BUILT)
def test_classes_build_what_is_written_of_them(name: str, tmp_path: Path) -> None:
    """And not only where tokenizer.json says the same, as above."""
    folder = _config(tokenizer_class=name)(tmp_path / "model")
    backend = json.loads(AutoTokenizer.from_pretrained(folder).backend_tokenizer.to_str())
    _drop_offsets(backend)
    assert backend["normalizer"] == BUILT[name].normalizer
    assert backend["pre_tokenizer"] == BUILT[name].pre_tokenizer
    assert backend["decoder"]["type"] == "ByteLevel"


def _drop_offsets(values: Any) -> None:
    for each in values if isinstance(values, list) else values.values() if isinstance(values, dict) else ():
        _drop_offsets(each)
    if isinstance(values, dict):
        values.pop("trim_offsets", None)


@settings(max_examples=60)
@given(st.sampled_from(sorted(tokenizers())), st.text(st.sampled_from("abBé e\u0301日🦊▁<>.[UNK]\n"), max_size=30))
def test_random_texts_have_the_same_tokens(tmp_path_factory: pytest.TempPathFactory, name: str, text: str) -> None:
    folder = tmp_path_factory.getbasetemp() / f"tokenizer-{name.replace(' ', '-')}"
    if not folder.exists():
        save(tokenizers()[name], folder)
    mine, theirs = read_folder(folder), load_tokenizer(str(folder))
    ids = theirs(text)["input_ids"]
    assert mine(text)["input_ids"] == ids
    assert mine.decode(ids) == theirs.decode(ids)


MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": st.text(max_size=8)},
        optional={"reasoning_content": st.text(max_size=5), "tool_calls": st.just([CALL])},
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=100)
@given(st.sampled_from(sorted(FAMILIES)), MESSAGES, st.booleans())
def test_random_conversations_are_rendered_as_transformers_renders_them(
    name: str, messages: list[dict[str, Any]], prompted: bool
) -> None:
    tokenizer = _families().setdefault(name, FAMILIES[name].tokenizer())
    assert rendered(tokenizer, messages, None, prompted) == rendered_there(tokenizer, messages, None, prompted)


def _families(found: dict[str, Any] = {}) -> dict[str, Any]:  # noqa: B006  (they take a second to make)
    return found


def test_a_token_that_only_the_configuration_changes_is_the_same(tmp_path: Path) -> None:
    tokenizer = FAMILIES["chatml"].tokenizer()
    tokenizer.add_tokens([AddedToken("<tool_call>", lstrip=True, normalized=False)])
    folder = save(tokenizer, tmp_path / "model")
    change = {"999": {"content": "<s>", "lstrip": True, "normalized": True, "rstrip": False, "single_word": True}}
    edit(folder, "tokenizer_config.json", lambda values: values.update(added_tokens_decoder=change))
    assert everything(read_folder(folder)) == everything(load_tokenizer(str(folder)))
