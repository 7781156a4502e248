"""800 random bits of all kinds of files under a root, one at a time: each is named, and none is trained on."""

from pathlib import Path

from bit_flips import covered_files, draw_flips, flipped, is_named, read_as_training_does
from tiny_runs import make_whole_root

NUM_FLIPS = 800


def test_no_flipped_bit_is_trained_on_or_goes_unnamed(tmp_path: Path) -> None:
    root = make_whole_root(tmp_path)
    written = {name: read_as_training_does(root, name) for name in covered_files(root)}
    assert [name for name, value in written.items() if value is None] == []
    assert [name for name in written if is_named(root, name)] == []
    unnamed, trained_on = [], []
    for name, bit in draw_flips(root, NUM_FLIPS, seed=0):
        with flipped(Path(root.at(name)), bit):
            if not is_named(root, name):
                unnamed.append((name, bit))
            if read_as_training_does(root, name) not in (None, written[name]):
                trained_on.append((name, bit))
    assert (unnamed, trained_on) == ([], [])
