"""Users' files in a root: kept once, found from anywhere, never run unasked."""

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from ludic.errors import ConfigError, ConsentError, SchemaError, StoreError
from ludic.root.code import keep_files
from ludic.root.root import Root
from ludic.run.code_snapshots import find_files, trusted_files
from ludic.run.code_uses import sampling_uses
from ludic.run.config import RunConfig
from ludic.run.run_json import create_root, run_of
from ludic.settings.consent import CodeUse
from ludic.settings.user_files import UserFile, read_user_file

CATS = "import words\nclass Cats: ...\n"
ENVIRONMENT = CodeUse(role="environment", setting="cats.py:Cats")
ADVANTAGE = CodeUse(role="advantage", setting="mine.sql", named_by_root=False)


def digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The working directory, with an environment that imports a module beside it; nothing is consented to yet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LUDIC_CONFIG_DIR", str(tmp_path / "config"))
    (tmp_path / "cats.py").write_text(CATS)
    (tmp_path / "words.py").write_text("MANY = 3\n")
    (tmp_path / "mine.sql").write_text("select rollout_id, 1 as advantage from rollouts")
    return tmp_path


@pytest.fixture
def owned(folder, root_url, run_config) -> Root:
    return create_root(root_url, replace(run_config, env=("cats.py:Cats", "moar_cats")))


def be_another_user(monkeypatch, folder: Path) -> None:
    monkeypatch.setenv("LUDIC_CONFIG_DIR", str(folder / "other"))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def names(root: Root) -> list[str]:
    return [name.removeprefix("code/") for name in root.list("code")]


def test_a_new_root_holds_the_files_of_its_environments_and_what_they_import(owned):
    assert names(owned) == sorted(["1.json", f"{digest(CATS)}.py", f"{digest('MANY = 3' + chr(10))}.py"])
    assert owned.read(f"code/{digest(CATS)}.py").decode() == CATS


def test_whoever_creates_a_root_may_run_its_files_from_anywhere(owned, folder, monkeypatch, caplog):
    monkeypatch.chdir("/")
    for name in ("cats.py", "words.py"):
        (folder / name).unlink()
    files = trusted_files(owned, sampling_uses(run_of(owned)))
    assert files["cats.py"].source.decode() == CATS
    assert files["cats.py"].imports["words"].source == b"MANY = 3\n"
    assert files["cats.py"].path == folder / "cats.py"
    assert warnings(caplog) == []


def test_a_file_that_is_not_there_ends_the_creation_before_it_begins(folder, root_url, run_config):
    with pytest.raises(ConfigError, match=r"there is no file .*dogs\.py"):
        create_root(root_url, replace(run_config, env=("dogs.py:Dogs",)))
    create_root(root_url, run_config)


def test_another_user_must_agree_first_and_is_told_to_what(owned, folder, monkeypatch):
    be_another_user(monkeypatch, folder)
    with pytest.raises(ConsentError) as caught:
        trusted_files(owned, sampling_uses(run_of(owned)))
    assert (
        f"environment 'cats.py:Cats', {owned.url}/code/{digest(CATS)}.py, sha256 {digest(CATS)[:12]}, run as "
        f"{folder}/cats.py; read it, and" in str(caught.value)
    )


def test_a_root_of_before_is_refused_without_reading_files_into_it(folder, root, monkeypatch):
    with pytest.raises(ConsentError, match=r"'cats.py:Cats', .*cats\.py, sha256"):
        trusted_files(root, [ENVIRONMENT])
    assert names(root) == []


def test_a_name_that_the_user_gave_is_consent_to_the_file_on_the_disk_not_to_a_copy(folder, root, monkeypatch):
    keep_files(root, trusted_files(root, [ADVANTAGE]))
    assert len(names(root)) == 2
    be_another_user(monkeypatch, folder)
    with pytest.raises(ConsentError, match=r"advantage 'mine\.sql'"):
        trusted_files(root, [ADVANTAGE])


def test_an_edited_file_does_not_run_until_it_is_asked_for(owned, folder, caplog):
    (folder / "cats.py").write_text("class Cats: 'new'\n")
    files = trusted_files(owned, [ENVIRONMENT])
    assert files["cats.py"].source.decode() == CATS
    (warning,) = warnings(caplog)
    assert f"{folder}/cats.py is not the text that the run uses (sha256 {digest(CATS)[:12]}, and " in warning
    assert "--update-code takes the file as it is now" in warning
    now = find_files(owned, [ENVIRONMENT], update=True).files
    keep_files(owned, now)
    assert find_files(owned, [ENVIRONMENT]).files == now
    assert now["cats.py"].source == b"class Cats: 'new'\n"


def test_a_changed_module_beside_a_file_is_a_change(owned, folder, caplog):
    (folder / "words.py").write_text("MANY = 4\n")
    trusted_files(owned, [ENVIRONMENT])
    then, now = (digest(text)[:12] for text in ("MANY = 3\n", "MANY = 4\n"))
    (warning,) = warnings(caplog)
    assert warning.startswith(f"{folder}/words.py is not the text that the run uses (sha256 {then}, and {now} here)")


def test_what_is_there_is_not_put_again(owned, folder):
    before = names(owned)
    keep_files(owned, find_files(owned, [ENVIRONMENT]).files)
    assert names(owned) == before


def test_files_that_are_kept_at_the_same_time_are_all_kept(folder, root):
    files = {f"{number}.sql": UserFile(path=folder / f"{number}.sql", source=b"%d" % number) for number in range(8)}
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: keep_files(root, {name: files[name]}), files))
    uses = [CodeUse(role="filter", setting=name) for name in files]
    assert find_files(root, uses).files == files


def test_a_run_made_after_another_gets_its_files_but_no_consent(owned, folder, monkeypatch, tmp_path):
    be_another_user(monkeypatch, folder)
    after = create_root(str(tmp_path / "after"), run_of(owned), like=owned)
    assert names(after) == names(owned)
    with pytest.raises(ConsentError):
        trusted_files(after, sampling_uses(run_of(after)))


def test_a_damaged_copy_is_named_and_not_run(owned):
    name = f"code/{digest(CATS)}.py"
    owned.put(name, b"import os\n")
    with pytest.raises(SchemaError, match=rf"{name} is damaged: its sha256 is .*, wanted the one in its name"):
        trusted_files(owned, [ENVIRONMENT])
    owned.delete(name)
    with pytest.raises(StoreError, match=rf"{name}, the text of .*cats\.py', is missing; --update-code puts it back"):
        trusted_files(owned, [ENVIRONMENT])


@pytest.mark.parametrize(
    "entry",
    [
        {"sha256": "../../../etc/passwd", "path": "/cats.py", "imports": {}},
        {"sha256": digest(CATS), "path": "cats.py", "imports": {}},
        {"sha256": digest(CATS), "path": "/dev/zero", "imports": {}},
        {"sha256": digest(CATS), "path": "/cats.py", "imports": {"../up": {"sha256": digest(CATS), "path": "/a.py"}}},
        {"sha256": digest(CATS), "path": "/cats.py"},
        "no entry",
    ],
)
def test_a_list_that_ludic_does_not_write_is_refused(root, entry):
    root.put("code/1.json", json.dumps({"files": {"cats.py": entry}}).encode())
    with pytest.raises(SchemaError, match=r"code/1\.json is no list of users' files that ludic can read"):
        find_files(root, [ENVIRONMENT])


def test_a_file_that_can_not_be_kept_twice_is_read_from_where_it_was(owned, folder, monkeypatch):
    monkeypatch.chdir("/")
    assert find_files(owned, [ENVIRONMENT], update=True).files["cats.py"] == read_user_file(folder / "cats.py")


@pytest.mark.parametrize(
    ("options", "own"),
    [
        ({"scorer": "one.py:score", "group_scorer": "two.py:together"}, ["one.py:score", "two.py:together"]),
        ({"scorer": "trl:one.py:score", "group_scorer": "trl:two.py:score"}, ["one.py:score", "two.py:score"]),
        ({"scorer": ["exact", "verl:one.py:score", "one.py:score"]}, ["one.py:score"]),
        ({"scorer": {"regex": 1, "one.py:a": 0.5, "trl:one.py:b": 0}}, ["one.py:a", "one.py:b"]),
        ({"scorer": 7, "group_scorer": [7]}, []),
    ],
)
def test_all_scorers_of_questions_are_users_code(options, own):
    run = RunConfig(model="m", env=("qa/a.jsonl",), env_options={"qa/a.jsonl": options})
    assert [use.setting for use in sampling_uses(run) if use.role == "scorer"] == own
