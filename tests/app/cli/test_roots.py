"""A root is enough to go on: what the commands do with a model that moved, and with one that a URL names."""

import shutil
from pathlib import Path

import fsspec
import pytest
from tiny_runs import fill, query

from ludic.app.launch.roots import open_or_start
from ludic.errors import MissingRootError
from ludic.root.root import Root
from ludic.root.weights.weight_folders import read_identity
from ludic.run.config import RunConfig

RUN = ["--env", "moar_cats", "--num-steps", "1"]


@pytest.fixture
def model(tmp_path: Path, model_folder: str) -> Path:
    return Path(shutil.copytree(model_folder, tmp_path / "models" / "mine"))


@pytest.mark.slow
def test_a_run_whose_model_is_nowhere_leaves_no_root(ludic, tmp_path: Path) -> None:
    for path in ("./none", "memory://none"):
        result = ludic("run", tmp_path / "run", "--model", path, *RUN)
        assert (result.code, result.err.count("\n")) == (1, 1)
        assert result.err.startswith(f"ludic: {path}: ")
    with pytest.raises(MissingRootError):
        Root.open(str(tmp_path / "run"))


@pytest.mark.slow
def test_a_trainer_is_told_where_the_model_is_now(ludic, make_trained, tmp_path: Path) -> None:
    root = make_trained(str(tmp_path / "run"))
    elsewhere = shutil.copytree(root.record.model, tmp_path / "elsewhere")
    fill(root, num_files=1, worker_id="w1-test", seed=9)
    flags = ["--num-steps", "2", "--rollout-timeout-s", "5"]
    assert ludic("train", root.url, *flags, "--model", elsewhere).out == f"trained to step 2 of 2 in {root.url}\n"
    (elsewhere / "config.json").write_text("{}")
    result = ludic("train", root.url, "--num-steps", "3", "--model", elsewhere)
    assert (result.code, result.err.count("\n")) == (1, 1)
    assert "config differs (config.json)" in result.err
    assert query(root, "select count(*) from attempts") == [(2,)]


def test_a_model_is_sampled_from_by_its_url(ludic, model_folder: str, s3_bucket: str) -> None:
    fs, path = fsspec.core.url_to_fs(f"{s3_bucket}/sampled", use_listings_cache=False)
    fs.put(model_folder, path, recursive=True)
    prompt = ["--prompt", "aa ab", "--max-tokens", "3", "--json"]
    by_url, by_path = ludic("sample", f"{s3_bucket}/sampled", *prompt), ludic("sample", model_folder, *prompt)
    assert by_url.out.replace(f"{s3_bucket}/sampled", model_folder) == by_path.out
    assert "holds neither a run" in ludic("sample", f"{s3_bucket}/nothing", *prompt).err


@pytest.mark.parametrize(
    "args",
    [
        ("verify", "{root}", "--config", "s3://bucket/verify.toml"),
        ("export", "{root}", "--format", "jsonl", "--out", "s3://bucket/rows.jsonl"),
        ("export", "{root}", "--format", "iceberg", "--out", "s3://bucket/catalog"),
        ("train", "{root}", "--advantage", "s3://bucket/mine.sql", "--num-steps", "9"),
    ],
)
def test_where_only_a_path_will_do_a_url_is_refused_and_no_folder_is_made(
    ludic, trained: Root, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    result = ludic(*(arg.format(root=trained.url) for arg in args))
    assert (result.code, result.err.count("\n")) == (1, 1)
    assert "s3://bucket/" in result.err
    assert "a URL; wanted a path on this machine" in result.err
    assert list(tmp_path.iterdir()) == []


def test_imported_texts_become_tokens_by_the_tokenizer_that_the_root_keeps(ludic, tmp_path: Path, model: Path) -> None:
    root = open_or_start(str(tmp_path / "run"), RunConfig(model=str(model), env=("moar_cats",)))
    shutil.rmtree(model)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "aa ab", "completion": "ac ad", "episode_reward": 1.0}\n')
    result = ludic("import", root.url, tmp_path / "rows.jsonl", "--from", "jsonl")
    assert result.code == 0, result.err
    assert result.out.startswith(f"{tmp_path / 'rows.jsonl'}: 1 rollout in 1 group")


def test_an_import_keeps_the_model_that_it_starts_a_run_with(ludic, tmp_path: Path, model: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "aa ab", "completion": "ac ad", "episode_reward": 1.0}\n')
    url = str(tmp_path / "run")
    assert ludic("import", url, tmp_path / "rows.jsonl", "--from", "jsonl", "--model", model).code == 0
    assert read_identity(Root.open(url)) is not None
