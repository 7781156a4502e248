"""The __file__ of a user's file is a path that this user agreed to, whatever a root says."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from ludic.errors import ConsentError
from ludic.root.code import keep_files
from ludic.root.root import Root
from ludic.run.code_snapshots import find_files, gives_consent, prepare_code, trusted_files
from ludic.settings.consent import CodeSettings, CodeUse, give_consent
from ludic.settings.kinds import KINDS
from ludic.settings.user_code import load_file
from ludic.settings.user_files import UserFile, file_of, read_user_file

FORMS = [(kind.role, form.replace("path/to/file", "mine")) for kind in KINDS.values() for form in kind.own]
USES = [CodeUse(role=role, setting=setting) for role, setting in FORMS if file_of(setting)]
EVIL = Path("/shared/evil")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with files of this user, and no consent yet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LUDIC_CONFIG_DIR", str(tmp_path / "config"))
    (tmp_path / "mine.py").write_text("import words_of_mine\n")
    (tmp_path / "words_of_mine.py").write_text("MANY = 3\n")
    (tmp_path / "mine.sql").write_text("select 1")
    return tmp_path


def agreed(use: CodeUse) -> tuple[str, UserFile]:
    """This user's file, which a use names and this user agreed to, by its name in the settings."""
    name = file_of(use.setting)
    assert name is not None
    file = read_user_file(Path(name))
    give_consent(use, {name: file}, root="mine", run_id="r")
    return name, file


def refuse(root: Root, use: CodeUse, path: Path) -> None:
    """Check that neither a root nor a user who names the file makes its text run under a path."""
    with pytest.raises(ConsentError, match=rf"sha256 \w+, run as {path}; read it, and give --trust-code"):
        trusted_files(root, [use])
    for by_root in (True, False):
        each = replace(use, named_by_root=by_root)
        assert not gives_consent(root, [each])
        with pytest.raises(ConsentError, match=f"run as {path}; read it"):
            prepare_code(root, [each], CodeSettings(), lambda files: None)


def with_paths(file: UserFile, path: Path, imports: Path) -> UserFile:
    beside = {name: replace(each, path=imports / each.path.name) for name, each in file.imports.items()}
    return replace(file, path=path / file.path.name, imports=beside)


def test_every_kind_of_users_code_is_looked_at() -> None:
    assert {use.role for use in USES} == {kind.role for kind in KINDS.values() if kind.own}
    assert {file_of(use.setting) for use in USES} == {"mine.py", "mine.sql"}


@pytest.mark.parametrize("use", USES, ids=lambda use: f"{use.role}-{file_of(use.setting)}")
def test_a_text_that_was_agreed_to_runs_under_no_other_path(root: Root, folder: Path, use: CodeUse) -> None:
    name, mine = agreed(use)
    keep_files(root, {name: with_paths(mine, EVIL, EVIL)})
    refuse(root, use, EVIL / name)
    prepare_code(root, [use], CodeSettings(trust_code=True), lambda files: None)
    assert trusted_files(root, [use])[name].path == EVIL / name
    keep_files(root, {name: mine})
    assert trusted_files(root, [use])[name].paths == mine.paths


def test_a_module_beside_a_file_runs_under_no_other_path(root: Root, folder: Path) -> None:
    use = CodeUse(role="environment", setting="mine.py:Mine")
    name, mine = agreed(use)
    keep_files(root, {name: with_paths(mine, folder, EVIL)})
    refuse(root, use, folder / name)


def test_consent_of_an_older_ludic_which_names_no_path_is_asked_for_again(root: Root, folder: Path) -> None:
    use = CodeUse(role="environment", setting="mine.py:Mine")
    files: Mapping[str, UserFile] = {"mine.py": read_user_file(folder / "mine.py")}
    keep_files(root, files)
    (folder / "config" / "trusted_code").mkdir(parents=True)
    (folder / "config" / "trusted_code" / f"{use.key(files)}.json").write_text("{}")
    with pytest.raises(ConsentError, match=r"run as .*mine\.py; read"):
        trusted_files(root, [use])
    # Its file is this user's own: a command that names it needs no flag.
    prepare_code(root, [replace(use, named_by_root=False)], CodeSettings(), lambda files: None)
    assert trusted_files(root, [use])["mine.py"].path == folder / "mine.py"


def test_data_is_found_beside_the_file_that_was_agreed_to(root: Root, folder: Path) -> None:
    (folder / "data.py").write_text(
        "from pathlib import Path\nFOUND = Path(__file__).with_name('data.txt').read_text()\n"
    )
    (folder / "data.txt").write_text("of this user")
    (folder / "theirs").mkdir()
    (folder / "theirs" / "data.txt").write_text("of another user")
    use = CodeUse(role="scorer", setting="data.py:f")
    name, mine = agreed(use)
    keep_files(root, {name: replace(mine, path=folder / "theirs" / "data.py")})
    refuse(root, use, folder / "theirs" / "data.py")
    keep_files(root, {name: mine})
    assert load_file(find_files(root, [use]).files[name]).FOUND == "of this user"
