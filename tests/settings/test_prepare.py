"""--update-code consents to the user's own files only, and no consent is stored for code that does not load."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_runs import create_root

from ludic.errors import ConfigError, ConsentError
from ludic.root.code import keep_files
from ludic.root.root import Root
from ludic.run.code_snapshots import find_files, prepare_code
from ludic.settings.consent import CodeSettings, CodeUse, has_consent
from ludic.settings.user_files import Files

FILE = "def f(rollouts): ...\ndef g(rollouts): ...\n"
F = CodeUse(role="advantage", setting="adv.py:f", named_by_root=False)
G = replace(F, setting="adv.py:g")
PLAIN, UPDATE = CodeSettings(), CodeSettings(update_code=True)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LUDIC_CONFIG_DIR", str(tmp_path / "config"))
    (tmp_path / "adv.py").write_text(FILE)
    return tmp_path


@pytest.fixture
def root(folder, model_folder) -> Root:
    return create_root(str(folder / "run"), model_folder)


def prepare(root: Root, use: CodeUse, settings: CodeSettings = PLAIN, check=lambda files: None) -> None:
    prepare_code(root, [use], settings, check)


def name_file(root: Root, name: str, path: str) -> None:
    """Have the root say where a file of it was read, as a foreign root might."""
    keep_files(root, find_files(root, [F]).files)
    entry = json.loads(root.read("code/1.json"))["files"]["adv.py"]
    root.put("code/2.json", json.dumps({"files": {name: {**entry, "path": path}}}).encode())


def test_update_code_does_not_consent_to_an_installed_callable_of_a_foreign_root(
    ludic, folder, model_folder, monkeypatch
):
    name, marker = "subprocess:Popen", folder / "marker"
    options = {name: {"args": ["touch", str(marker)]}}
    root = create_root(str(folder / "run"), model_folder, env=(name,), env_options=options)
    monkeypatch.setenv("LUDIC_CONFIG_DIR", str(folder / "other"))
    result = ludic("worker", root.url, "--update-code", "--num-groups", "1")
    assert (result.code, marker.exists()) == (1, False)
    assert "names code that this user has not agreed to run: environment 'subprocess:Popen'" in result.err


@pytest.mark.parametrize("settings", [UPDATE, CodeSettings(update_code=True, trust_code=True)])
@pytest.mark.parametrize("named_by_root", [True, False])
def test_update_code_reads_no_file_at_a_path_that_a_foreign_root_gives(root, folder, settings, named_by_root) -> None:
    (folder / "private.py").write_text("def f(rollouts): return 'secret'")
    name_file(root, "theirs.py", str(folder / "private.py"))
    checked: list[Files] = []
    with pytest.raises(ConsentError, match=rf"there is no file {folder}/theirs\.py; .*'theirs\.py' is .*private\.py"):
        prepare(root, replace(F, setting="theirs.py:f", named_by_root=named_by_root), settings, checked.append)
    assert checked == []
    assert "code/3.json" not in root.list("code")


def test_update_code_follows_the_path_of_a_copy_that_the_user_agreed_to(root, folder, monkeypatch) -> None:
    prepare(root, F)
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    (folder / "adv.py").write_text(f"{FILE}# edited")
    prepare(root, replace(F, named_by_root=True), UPDATE)
    assert find_files(root, [F]).files["adv.py"].source.endswith(b"# edited")


def test_update_code_does_not_consent_to_a_file_that_lies_in_the_root(root, folder) -> None:
    (folder / "run/evil.py").write_text(FILE)
    with pytest.raises(ConsentError, match=r"advantage 'run/evil\.py:f'"):
        prepare(root, replace(F, setting="run/evil.py:f", named_by_root=True), UPDATE)


def test_code_that_does_not_load_gets_no_consent_and_is_not_kept(root) -> None:
    def fail(files: Files) -> None:
        raise ConfigError("it does not load")

    for settings in (CodeSettings(), UPDATE, CodeSettings(trust_code=True)):
        with pytest.raises(ConfigError, match="it does not load"):
            prepare(root, F, settings, fail)
    assert not has_consent(F, find_files(root, [F]).files)
    assert root.list("code") == []


def test_another_function_of_ones_own_unchanged_file_needs_no_more_consent(root, folder) -> None:
    prepare(root, F)
    prepare(root, G)
    assert has_consent(G, find_files(root, [G]).files)


def test_another_function_of_a_file_that_differs_from_the_copy_is_refused(root, folder) -> None:
    prepare(root, F)
    (folder / "adv.py").write_text("def g(rollouts): return None")
    with pytest.raises(ConsentError, match=r"advantage 'adv\.py:g'"):
        prepare(root, G)


@pytest.mark.slow
def test_train_takes_another_function_of_ones_own_file(ludic, root, folder) -> None:
    column = "append_column('advantage', rollouts['episode_reward'])"
    body = f"(rollouts):\n    return rollouts.select(['rollout_id']).{column}\n"
    (folder / "adv.py").write_text(f"def f{body}def g{body}")
    for name in ("f", "g"):
        flags = ["--advantage", f"adv.py:{name}", "--num-steps", "1", "--rollout-timeout-s", "1", "--device", "cpu"]
        result = ludic("train", root.url, *flags)
        assert "without new rollouts" in result.err
