"""Pages that `make format` writes: docs/files.md from modules, and a page of settings for each group."""

from pathlib import Path

from ludic.app.cli.docs import files_page, settings_pages

REPOSITORY = Path(__file__).parents[3]


def test_a_module_is_a_row_with_its_first_sentence(tmp_path: Path) -> None:
    (tmp_path / "ludic/root").mkdir(parents=True)
    (tmp_path / "ludic/root/sheep.py").write_text('"""Count sheep | goats in\n{root}/*. And lambs.\n\nMore."""\n')
    (tmp_path / "ludic/root/wolf.py").write_text('"""Eat sheep."""\n')
    (tmp_path / "ludic/root/__init__.py").write_text("")
    door = "from .sheep import Sheep as Sheep\nfrom .sheep import ram as ram\n"
    (tmp_path / "ludic/root/__init__.pyi").write_text(door)
    (tmp_path / "ludic/__init__.pyi").write_text("from .root.sheep import ram as ram\n")
    rows = (
        "| `sheep.py` | Count sheep \\| goats in {root}/\\* | `ludic.root`: `ram`, `Sheep` |\n"
        "| `wolf.py` | Eat sheep |  |\n"
    )
    head = "| file | what it does | names at the door |\n| --- | --- | --- |\n"
    assert files_page(tmp_path).endswith(f"what.\n\n## ludic/root\n\n{head}{rows}")


def test_every_setting_is_on_the_index_and_links_to_a_page_that_is_written() -> None:
    pages = settings_pages()
    written = {f"settings/{path.name}" for path in (REPOSITORY / "docs/settings").glob("*.md")}
    assert {*pages} == {"settings.md", *written}
    index = pages["settings.md"]
    for name in pages:
        assert name == "settings.md" or f"]({name})" in index
    (loss,) = [line for line in index.splitlines() if line.startswith("| [loss](settings/loss.md) |")]
    assert "`kl_weight`" in loss
    assert "| `kl_weight` | a number" in pages["settings/loss.md"]
