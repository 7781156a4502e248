import importlib
import inspect
import sys

import pytest

from ludic.settings.user_code import describe_failure, load_file
from ludic.settings.user_files import UserFile, read_user_file


def test_the_text_that_was_read_runs_whatever_became_of_the_file(tmp_path):
    path = tmp_path / "cats.py"
    path.write_text("def reward():\n    return 1\n")
    file = read_user_file(path)
    path.write_text("def reward():\n    return 2\n")
    module = load_file(file)
    assert module.reward() == 1
    assert inspect.getsource(module.reward) == "def reward():\n    return 1\n"
    path.unlink()
    assert load_file(file).reward() == 1


def test_data_beside_a_file_is_found_from_its_copy(tmp_path):
    (tmp_path / "cats.py").write_text(
        "from pathlib import Path\nTEXT = Path(__file__).with_name('t.txt').read_text()\n"
    )
    (tmp_path / "t.txt").write_text("many cats")
    assert load_file(read_user_file(tmp_path / "cats.py")).TEXT == "many cats"


def test_modules_beside_a_file_run_from_their_copies(tmp_path):
    (tmp_path / "scorer_of_cats.py").write_text("from words_of_cats import REWARD\n")
    (tmp_path / "words_of_cats.py").write_text("REWARD = 7\n")
    file = read_user_file(tmp_path / "scorer_of_cats.py")
    (tmp_path / "words_of_cats.py").unlink()
    assert load_file(file).REWARD == 7
    assert str(tmp_path) not in sys.path


def test_two_modules_of_one_name_are_refused(tmp_path):
    files = []
    for text in ("A = 1\n", "A = 2\n"):
        (tmp_path / "cats.py").write_text("import twice_named\n")
        (tmp_path / "twice_named.py").write_text(text)
        files.append(read_user_file(tmp_path / "cats.py"))
    load_file(files[0])
    load_file(files[0])
    with pytest.raises(ImportError, match=r"twice_named of .* has the name of another module that is in use; rename"):
        load_file(files[1])


def test_a_module_beside_a_file_may_not_hide_one_that_is_in_use(tmp_path):
    (tmp_path / "cats.py").write_text("import pytest\n")
    (tmp_path / "pytest.py").write_text("")
    with pytest.raises(ImportError, match=r"module pytest of .* rename it"):
        load_file(read_user_file(tmp_path / "cats.py"))


def test_a_module_that_the_program_imported_from_the_same_text_stays(tmp_path, monkeypatch):
    (tmp_path / "cats.py").write_text("import imported_before\nFOUND = imported_before\n")
    (tmp_path / "imported_before.py").write_text("A = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("imported_before")
    file = read_user_file(tmp_path / "cats.py")
    assert load_file(file).FOUND is module
    (tmp_path / "imported_before.py").write_text("A = 2\n")
    with pytest.raises(ImportError, match=r"imported_before of .* has the name of another module that is in use"):
        load_file(read_user_file(tmp_path / "cats.py"))


def test_a_failure_names_the_line_of_the_text_that_ran(tmp_path):
    file = UserFile(path=tmp_path / "gone.py", source=b"x = 0\n1 / x\n")
    with pytest.raises(ZeroDivisionError) as caught:
        load_file(file)
    assert (
        describe_failure(file.path, caught.value) == f"{file.path}, line 2, failed: ZeroDivisionError: division by zero"
    )
