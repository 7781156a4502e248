from hashlib import sha256

import pytest

from ludic.settings.user_files import MAX_BYTES, UserFile, file_of, files_of, read_user_file


@pytest.mark.parametrize(
    ("setting", "file"),
    [
        ("cats.py:Cats", "cats.py"),
        ("/a/b.py:make", "/a/b.py"),
        ("mine.sql", "mine.sql"),
        ("moar_cats", None),
        ("reasoning_gym/leg_counting", None),
        ("package.module:Class", None),
    ],
)
def test_a_setting_names_a_file_or_none(setting, file):
    assert file_of(setting) == file


def test_files_are_listed_once():
    assert files_of(["cats.py:Cats", "rloo", "cats.py:Dogs", "mine.sql"]) == ["cats.py", "mine.sql"]


def test_modules_beside_a_file_come_with_it_in_turn(tmp_path):
    (tmp_path / "cats.py").write_text(
        "import json, words\nfrom numpy import array\ndef late():\n    import lazy.part\n"
    )
    (tmp_path / "words.py").write_text("from more import MANY\nimport cats\n")
    (tmp_path / "more.py").write_text("MANY = 3\n")
    (tmp_path / "lazy.py").write_text("part = 1\n")
    (tmp_path / "json.py").write_text("raise SystemExit('the standard library goes first')\n")
    (tmp_path / "unused.py").write_text("")
    file = read_user_file(tmp_path / "cats.py")
    assert sorted(file.imports) == ["lazy", "more", "words"]
    assert file.imports["more"] == UserFile(path=tmp_path / "more.py", source=b"MANY = 3\n")
    assert file.digests["more"] == sha256(b"MANY = 3\n").hexdigest()


def test_another_text_of_a_module_beside_it_is_another_text(tmp_path):
    (tmp_path / "cats.py").write_text("import words\n")
    (tmp_path / "words.py").write_text("A = 1\n")
    before = read_user_file(tmp_path / "cats.py")
    assert before.is_same_text(read_user_file(tmp_path / "cats.py"))
    (tmp_path / "words.py").write_text("A = 2\n")
    assert not before.is_same_text(read_user_file(tmp_path / "cats.py"))


def test_a_broken_file_is_read_all_the_same(tmp_path):
    (tmp_path / "cats.py").write_text("import (\n")
    assert read_user_file(tmp_path / "cats.py").imports == {}


def test_a_missing_file_and_one_that_is_too_long_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no file .*cats\.py"):
        read_user_file(tmp_path / "cats.py")
    (tmp_path / "cats.py").write_bytes(b"#" * (MAX_BYTES + 1))
    with pytest.raises(OSError, match="more than 10,000,000 bytes"):
        read_user_file(tmp_path / "cats.py")
