"""A model's folder runs none of the Python that it brings along, and asks nobody whether it may."""

import io
import json
import shutil
from pathlib import Path

import pytest
from tiny_models import make_model

from ludic.engines.transformers_engine import TransformersEngine
from ludic.errors import ModelError
from ludic.models.chat import load_tokenizer
from ludic.training.model import load_model


@pytest.fixture(scope="module")
def sound_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("model"), seed=1)


@pytest.fixture
def hostile_folder(sound_folder: str, tmp_path: Path) -> Path:
    """A model of a type that only its own Python file knows, whose import leaves a marker."""
    folder = Path(shutil.copytree(sound_folder, tmp_path / "model"))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w').close()\nclass C: ...\n")
    auto_map = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.C", "AutoTokenizer": ["evil.C", "evil.C"]}
    for name in ("config.json", "tokenizer_config.json"):
        values = json.loads((folder / name).read_text())
        unknown = {"model_type": "evil", "tokenizer_class": "EvilTokenizer", "auto_map": auto_map}
        (folder / name).write_text(json.dumps({**values, **unknown}))
    return folder


@pytest.mark.parametrize(
    "load",
    [load_model, load_tokenizer, lambda folder: TransformersEngine(folder, device="cpu")],
    ids=["training", "tokenizer", "engine"],
)
def test_a_model_with_code_is_refused_without_a_question(hostile_folder, tmp_path, monkeypatch, load):
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 10))
    with pytest.raises(ModelError):
        load(str(hostile_folder))
    assert not (tmp_path / "marker").exists()
