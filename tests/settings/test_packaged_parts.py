"""Parts that installed packages bring by entry points: found by name, with consent, and never instead of ludic's."""

import json
import re
import textwrap
import tomllib
from pathlib import Path

import pytest
from packages import PARTS, install

from ludic.environments.registry import make_environment
from ludic.errors import ConfigError
from ludic.root.catalogue import WORKERS
from ludic.root.root import Root
from ludic.settings.consent import CodeUse, give_consent, has_consent
from ludic.settings.kinds import ENVIRONMENT, FILTER, KINDS, LAUNCHER, Kind, check, find

OF_PACKAGES = [kind for kind in KINDS.values() if kind.entry_points]
EACH_KIND = pytest.mark.parametrize("kind", OF_PACKAGES, ids=lambda kind: kind.role)
ROOMS = {"ludic.environments": {"rooms": "acme_rl:Rooms"}}
TRACKERS = {"ludic.trackers": {"acme": "acme_rl:tracker"}}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of packages, and the consents of a user who has given none."""
    monkeypatch.setenv("LUDIC_CONFIG_DIR", str(tmp_path / "config"))
    return tmp_path / "site"


def test_the_guide_names_the_groups() -> None:
    guide = (Path(__file__).parents[2] / "docs/environments.md").read_text(encoding="utf-8")
    of_packages = guide.partition("## Bring parts in a package\n")[2]
    assert {*re.findall(r"^\| `(ludic\.\w+)`", of_packages, re.MULTILINE)} == {
        kind.entry_points for kind in OF_PACKAGES
    }
    metadata = tomllib.loads(textwrap.dedent("".join(re.findall(r"^ {4}.*\n|^\n", of_packages, re.MULTILINE))))
    assert metadata["project"]["entry-points"].keys() == {"ludic.environments", "ludic.scorers"}


@EACH_KIND
def test_a_part_of_a_package_is_found_needs_consent_and_is_listed(kind: Kind, site: Path, monkeypatch) -> None:
    attribute = "system" if kind.role == "cluster system" else "part"
    install(site, monkeypatch, {kind.entry_points: {"acme": f"acme_rl:{attribute}"}})
    check(kind, "acme")
    assert type(find(kind, "acme")).__name__ == {"part": "function", "system": "System"}[attribute]
    assert CodeUse(role=kind.role, setting="acme").is_users
    with pytest.raises(ConfigError, match=r"'acmee' is unknown; did you mean 'acme'\?"):
        check(kind, "acmee")
    with pytest.raises(ConfigError, match=r"'zzzzzz' is unknown; there are .*acme"):
        check(kind, "zzzzzz")


@EACH_KIND
def test_no_package_takes_a_name_of_ludic(kind: Kind, site: Path, monkeypatch) -> None:
    taken = kind.names()[-1].partition(":")[0]
    install(site, monkeypatch, {kind.entry_points: {taken: "acme_rl:part", "acme": "acme_rl:part"}})
    if taken in kind.built_in:
        check(kind, taken)
        assert not kind.is_users(taken)
    with pytest.raises(ConfigError, match=rf"^{kind.role} '{taken}' is of ludic-rl .*, and acme-rl 1\.0 brings one of"):
        check(kind, "acme")


@pytest.mark.parametrize("name", ["recorded", "qa", "verifiers", "a/b", "mine.py", "a:b", "mine.sql"])
def test_no_package_takes_a_name_that_means_something_else(name: str, site: Path, monkeypatch) -> None:
    install(site, monkeypatch, {"ludic.environments": {name: "acme_rl:Rooms", "rooms": "acme_rl:Rooms"}})
    with pytest.raises(ConfigError, match=rf"^environment '{name}' .*acme-rl 1\.0"):
        check(ENVIRONMENT, "rooms")


def test_two_packages_with_one_name_are_refused_with_both(site: Path, monkeypatch) -> None:
    install(site, monkeypatch, ROOMS)
    install(site, monkeypatch, ROOMS, name="other-rooms", version="2.1")
    with pytest.raises(ConfigError, match=r"'rooms' is brought by acme-rl 1\.0 and other-rooms 2\.1; uninstall one"):
        check(ENVIRONMENT, "rooms")


@pytest.mark.parametrize(
    ("entry", "text", "message"),
    [
        ("acme_rl:Rooms", "raise OSError('no display')", r"can't be imported \(acme_rl:Rooms\): OSError: no display; "),
        ("acme_rl:Rooms", "raise SystemExit(0)", r"can't be imported \(acme_rl:Rooms\): .*sys\.exit\(0\)"),
        ("acme_rl:Absent", PARTS, r"can't be imported \(acme_rl:Absent\): AttributeError: .*'Absent'; repair"),
        ("acme_rl:number", PARTS, r"is 7, wanted a class$"),
    ],
)
def test_a_package_that_fails_is_named(entry: str, text: str, message: str, site: Path, monkeypatch) -> None:
    install(site, monkeypatch, {"ludic.environments": {"rooms": entry}}, name="acme-rl", text=text)
    with pytest.raises(ConfigError, match=rf"^environment 'rooms' of acme-rl 1\.0 {message}"):
        make_environment("rooms")


def test_only_a_name_that_ludic_does_not_have_looks_at_packages(ludic, started: Root, monkeypatch) -> None:
    def looked(**_: str) -> None:
        raise AssertionError("entry points were looked at")

    monkeypatch.setattr("ludic.base.installed.entry_points", looked)
    for args in (["--help"], ["train", "--help"], ["verify", started.url]):
        assert ludic(*args).code == 0
    for kind in KINDS.values():
        for name in kind.names():
            kind.is_users(name)
    find(LAUNCHER, "local"), check(FILTER, "drop_truncated"), make_environment("moar_cats")
    with pytest.raises(AssertionError, match="were looked at"):
        check(ENVIRONMENT, "rooms")


def test_consent_is_to_a_name_of_a_package_with_options_in_any_version(site: Path, monkeypatch, tmp_path: Path) -> None:
    install(site, monkeypatch, {**ROOMS, "ludic.scorers": {"rooms": "acme_rl:near"}})
    use = CodeUse(role="environment", setting="rooms", options={"size": 2})
    give_consent(use, {}, root="runs/mine", run_id="r")
    (file,) = (tmp_path / "config" / "trusted_code").iterdir()
    told = json.loads(file.read_text())
    assert (told["name"], told["distribution"], told["version"]) == ("rooms", "acme-rl", "1.0")
    assert (told["options"], told["sha256"]) == ({"size": 2}, None)
    assert has_consent(use, {})
    assert not has_consent(CodeUse(role="environment", setting="rooms", options={"size": 3}), {})
    assert not has_consent(CodeUse(role="scorer", setting="rooms", options={"size": 2}), {})
    install(site, monkeypatch, ROOMS, version="1.1")
    assert has_consent(use, {})
    install(site, monkeypatch, {})
    install(site, monkeypatch, ROOMS, name="other-rooms")
    assert not has_consent(use, {})


@pytest.mark.slow
def test_a_run_of_processes_uses_parts_of_a_package_and_others_may_not_without_consent(
    ludic, site: Path, model_folder: str, tmp_path: Path, monkeypatch
) -> None:
    """The environment scores in processes of its own; a scorer is an option of questions, a tracker of the trainer."""
    install(site, monkeypatch, {**ROOMS, "ludic.scorers": {"near": "acme_rl:near"}, **TRACKERS})
    (tmp_path / "rows.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    questions, url = f"qa/{tmp_path}/rows.jsonl", str(tmp_path / "run")
    options = {"rooms": {"size": 3, "run_in": "process"}, questions: {"scorer": "near", "heldout_share": 0}}
    flags = ["--model", model_folder, "--env", "rooms", questions, "--env-options", json.dumps(options)]
    flags += [
        "--accept-incomplete",
        "--log-to",
        "acme",
        "--device",
        "cpu",
        "--num-workers",
        "1",
        "--group-size",
        "2",
        "--max-tokens",
        "4",
    ]
    assert ludic("run", url, *flags, "--groups-per-batch", "2", "--num-steps", "1").code == 0
    sampled = ludic("sql", url, "select distinct env_name, episode_reward from rollouts order by 2", "--format", "csv")
    assert sampled.out.splitlines()[1:] == [f'"{questions}",0.25', '"rooms",3.0']
    told = Path(url, "told.txt")
    assert told.read_text() == "1 True\n"
    claim = WORKERS.read(Root.open(url), 0, 1)
    records = {record["name"]: record["package"] for record in claim.code if record["name"] in ("rooms", "near")}
    assert records == {"rooms": "acme-rl 1.0", "near": "acme-rl 1.0"}

    monkeypatch.setenv("LUDIC_CONFIG_DIR", str(tmp_path / "other"))  # of a user who got the run
    worker, trainer = ludic("worker", url, "--num-groups", "1"), ludic("train", url, "--num-steps", "2")
    assert "environment 'rooms' with options {" in worker.err
    assert worker.err.count("of acme-rl 1.0, which is installed here") == 2
    assert "scorer 'near' of acme-rl 1.0" in worker.err
    assert "tracker 'acme' of acme-rl 1.0, which is installed here" in trainer.err
    assert (worker.code, trainer.code, told.read_text()) == (1, 1, "1 True\n")

    install(site, monkeypatch, {})
    gone = ludic("run", url, "--num-steps", "2", "--log-to", "none")
    assert "names environment 'rooms' of acme-rl 1.0, which is not installed here or no longer brings it" in gone.err
    assert "pip install 'acme-rl==1.0'" in gone.err
