import json
from pathlib import Path

import pytest

from ludic.errors import ConfigError
from ludic.settings.consent import CodeUse, give_consent, has_consent
from ludic.settings.user_files import UserFile, file_of


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("LUDIC_CONFIG_DIR", str(tmp_path / "config"))
    return tmp_path / "config"


def use(setting="cats.py:Cats", **options) -> CodeUse:
    return CodeUse(role="environment", setting=setting, options=options)


def files(source=b"class Cats: ...", **imports) -> dict[str, UserFile]:
    modules = {name: UserFile(path=Path(f"/{name}.py"), source=text) for name, text in imports.items()}
    return {"cats.py": UserFile(path=Path("/cats.py"), source=source, imports=modules)}


def agree(use_, files_) -> None:
    give_consent(use_, files_, root="runs/mine", run_id="r")


def test_consent_is_to_the_text_at_its_path_whatever_the_settings_call_it():
    assert not has_consent(use(), files())
    agree(use(), files())
    assert has_consent(use(), files())
    assert has_consent(use("../cats.py:Cats"), {"../cats.py": files()["cats.py"]})
    elsewhere = {"cats.py": UserFile(path=Path("/other/cats.py"), source=b"class Cats: ...")}
    assert not has_consent(use(), elsewhere)


@pytest.mark.parametrize(
    ("use_", "files_"),
    [
        (use(), files(b"class Cats: ... # other")),
        (use("cats.py:Dogs"), files()),
        (use(mark="?"), files()),
        (use(), files(words=b"A = 1")),
    ],
    ids=["text", "class", "options", "imports"],
)
def test_consent_is_to_no_other_text_class_options_or_imports(use_, files_):
    agree(use(), files())
    assert not has_consent(use_, files_)


def test_consent_to_an_installed_module_is_to_its_name_and_options():
    agree(use("subprocess:run", args=["true"]), {})
    assert has_consent(use("subprocess:run", args=["true"]), {})
    assert not has_consent(use("subprocess:run", args=["false"]), {})
    assert not has_consent(use("subprocess:call", args=["true"]), {})


def test_only_what_is_not_ludics_own_wants_consent():
    assert use().is_users
    assert use("package.module:Class").is_users
    assert CodeUse(role="filter", setting="mine.sql").is_users
    assert not use("moar_cats").is_users
    assert not use("reasoning_gym/leg_counting").is_users
    assert not CodeUse(role="advantage", setting="rloo").is_users
    assert CodeUse(role="parser", setting="mine.py:Mine").is_users
    assert CodeUse(role="tool", setting="mcp:server --fast").is_users
    assert CodeUse(role="tool", setting="python").is_users
    assert not CodeUse(role="tool", setting="calculator").is_users


def test_consent_to_a_command_is_not_consent_to_a_file_of_its_name():
    """A root may hold a harmless text under the name mcp:run.py, while the tool runs a command of that name."""
    command = CodeUse(role="tool", setting="mcp:run.py:x")
    assert file_of(command.setting) is None
    assert command.key({}) != CodeUse(role="tool", setting="mcp:run.py:y").key({})


def test_what_is_kept_says_to_people_what_was_agreed_to(folder):
    agree(use(mark="?"), files())
    (path,) = (folder / "trusted_code").iterdir()
    about = json.loads(path.read_text())
    assert (about["name"], about["options"], about["root"]) == ("cats.py:Cats", {"mark": "?"}, "runs/mine")


def test_a_folder_that_can_not_be_written_is_named(folder):
    folder.write_text("no folder")
    with pytest.raises(ConfigError, match=r"can't be kept in .*trusted_code: .*; set LUDIC_CONFIG_DIR to a folder"):
        agree(use(), files())
