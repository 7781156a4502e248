"""`ludic train` on what is stored: a run is made from its source, goes on, and is repeated; mistakes get one line."""

import shutil

import pytest
from command_settings import parsed
from tiny_runs import create_root, fill, final_weights, query

from ludic.app.cli.main import main
from ludic.app.launch.train import train_args
from ludic.app.operations.start import train
from ludic.root.root import Root
from ludic.run.run_json import run_of
from ludic.training.config import TrainConfig

OFFLINE = ("--offline", "--epochs", "1", "--device", "cpu", "--learning-rate", "1e-3")


@pytest.fixture(scope="module")
def source(tmp_path_factory, model_folder):
    """Four groups, in batches of two; not to be changed."""
    root = create_root(str(tmp_path_factory.mktemp("source") / "source"), model_folder)
    fill(root, num_files=1)
    return root


@pytest.fixture(scope="module")
def offline(tmp_path_factory, source):
    """The URL of a run that was trained on the source for two steps; not to be changed."""
    url = str(tmp_path_factory.mktemp("offline") / "offline")
    with pytest.raises(SystemExit):
        main(["train", url, *OFFLINE, "--sources", source.url])
    return url


@pytest.fixture
def url(offline, tmp_path):
    """That of a copy that a test may change."""
    return str(shutil.copytree(offline, tmp_path / "offline"))


@pytest.mark.slow
def test_a_run_is_made_like_its_first_source_and_is_left_as_it_is_when_done(ludic, source, tmp_path):
    url = str(tmp_path / "offline")
    result = ludic("train", url, *OFFLINE, "--sources", source.url)
    assert (result.code, result.out) == (0, f"trained to step 2 in {url}\n")
    assert run_of(Root.open(url)) == run_of(source)
    # The settings are those of the trainer before, so no flag is needed.
    assert ludic("train", url).out == f"trained to step 2 in {url}\n"
    assert ludic("train", url, "--epochs", "2").out == f"trained to step 4 in {url}\n"
    assert query(Root.open(url), "select step, max(num_uses) from batches group by all order by all") == [
        (1, 1),
        (2, 1),
        (3, 2),
        (4, 2),
    ]


@pytest.mark.slow
def test_resume_wants_a_complete_checkpoint_and_goes_on_from_the_newest(ludic, url, tmp_path):
    assert ludic("train", url, "--resume", "--epochs", "2").out == f"trained to step 4 in {url}\n"
    assert query(Root.open(url), "select attempt_id, parent_step from attempts order by all") == [(1, None), (2, 2)]
    for marker in (tmp_path / "offline").rglob("checkpoint.json"):
        marker.unlink()
    result = ludic("train", url, "--resume", "--epochs", "3")
    assert (result.code, result.out) == (1, "")
    assert result.err == (
        f"ludic: {url} has no complete checkpoint to resume from; without --resume it starts from the first weights\n"
    )


@pytest.mark.slow
def test_resume_names_the_only_checkpoint_when_it_is_damaged(ludic, url, tmp_path):
    name = "checkpoints/attempt=1/step=2"
    (tmp_path / "offline" / name / "optimizer.safetensors").write_bytes(b"damaged")
    result = ludic("train", url, "--resume", "--epochs", "2")
    assert (result.code, result.out) == (1, "")
    said = "is damaged, and there is no sound checkpoint to resume from; put a sound copy in its place, or leave out"
    assert result.err.splitlines()[-1].startswith(f"ludic: {url}/{name} {said} --resume")
    assert len(query(Root.open(url), "select * from attempts")) == 1


def test_ranks_are_told_to_resume():
    for resume in (True, False):
        *_, flag, path = train_args("root", TrainConfig(), 2, resume=resume)
        settings = parsed(train, "root", flag, path)
        assert (settings.train, settings.ranks, settings.resume) == (TrainConfig(), 2, resume)


@pytest.mark.slow
def test_a_replay_takes_the_settings_of_the_run(ludic, url, tmp_path):
    again = str(tmp_path / "again")
    assert ludic("train", again, "--replay-batches", url).out == f"trained to step 2 in {again}\n"
    weights = final_weights(Root.open(url))
    assert all((tensor == weights[name]).all() for name, tensor in final_weights(Root.open(again)).items())


@pytest.mark.slow
def test_a_file_alone_says_what_to_replay(ludic, url, tmp_path):
    again, path = str(tmp_path / "again"), tmp_path / "again.toml"
    path.write_text(f'replay_batches = "{url}"\n')
    # The learning rate of the run, 1e-3, is no default: it is taken over wherever ROOT stands.
    assert ludic("train", "--config", path, again).out == f"trained to step 2 in {again}\n"


@pytest.mark.slow
def test_fewer_steps_than_are_done_are_answered_with_the_truth(ludic, url):
    result = ludic("train", url, "--no-offline", "--sources", "--epochs", "None", "--num-steps", "1")
    assert result.out == f"{url} is at step 2 already, which is past num_steps 1; nothing to train\n"
    result = ludic("run", url, "--num-steps", "1")
    assert result.out.startswith(f"{url} is at step 2 already, which is past num_steps 1; nothing to train; ")


@pytest.mark.slow
def test_a_replay_with_another_setting_is_refused_in_a_line(ludic, url, tmp_path):
    again = str(tmp_path / "again")
    result = ludic("train", again, "--replay-batches", url, "--learning-rate", "0.5")
    assert result.code == 1
    assert result.err.startswith(f"ludic: {url} was trained with other settings, so a replay would not repeat it: ")
    assert "learning_rate is 0.001 there and 0.5 here" in result.err
    assert result.err.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--offline", "--sources", "{tmp}/nowhere"], "nowhere holds no run"),
        (["--offline", "--sources", "{source}", "--where", "episode_rewrad > 0"], "where (episode_rewrad > 0)"),
        (["--offline", "--sources", "{source}", "--where", "episode_reward > 99"], "nothing to train on where"),
        (["--replay-batches", "{source}"], "has no complete checkpoint, so there is nothing to replay"),
        (["--replay-batches", "{tmp}/nowhere"], "nowhere holds no run"),
        ([], "offline holds no run"),
        (["--resume"], "offline holds no run"),
        (["--resume", "--offline", "--sources", "{source}"], "offline holds no run"),
        (["--epochs", "2"], "epochs is 2"),
    ],
)
def test_a_mistake_gets_one_line(ludic, source, tmp_path, flags, message):
    flags = [flag.format(tmp=tmp_path, source=source.url) for flag in flags]
    result = ludic("train", str(tmp_path / "offline"), *flags)
    assert result.code in (1, 2)
    assert message in result.err
    assert "Traceback" not in result.err
