import pytest

from ludic.environments.environment import Environment
from ludic.environments.registry import environment_names, make_environment
from ludic.errors import ConfigError

USERS_FILE = '''
from dataclasses import dataclass
from ludic.environments.environment import Example, Score, Transition
from ludic.records.rollout import Message


@dataclass(frozen=True)
class Shout:
    """Pays for capitals."""

    mark: str = "!"
    seed: int = 0

    def example(self, index, split):
        message = Message(role="user", content=f"shout {index + self.seed}{self.mark}")
        return Example(example_id=f"{split}-{index}", messages=(message,))

    def score(self, example, answer):
        return Score(reward=sum(letter.isupper() for letter in answer))


class Countdown:
    """Three steps, then the end."""

    def __init__(self, start=3):
        self.left = start

    def example(self, index, split):
        return Example(example_id=str(index), messages=())

    def reset(self, example):
        return example.messages

    def step(self, action):
        self.left -= 1
        return Transition(observation=str(self.left), reward=0.0, terminated=self.left == 0)


class Neither:
    def example(self, index, split): ...


class Moody:
    def __init__(self):
        raise KeyError("mood")


not_callable = 3
'''


@pytest.fixture
def users_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(USERS_FILE)
    return path


def test_a_users_single_turn_class_gets_its_options_and_the_seed(users_file):
    make = make_environment(f"{users_file}:Shout", {"mark": "?"}, seed=40)
    environment = make()
    assert isinstance(environment, Environment)
    assert environment.reset(environment.example(2, "train"))[0].content == "shout 42?"
    assert environment.step("AbC").reward == 2


def test_an_option_named_seed_goes_before_the_seed_of_the_run(users_file):
    environment = make_environment(f"{users_file}:Shout", {"seed": 1}, seed=40)()
    assert environment.example(0, "train").messages[0].content == "shout 1!"


def test_episodes_at_the_same_time_do_not_share_the_state_of_an_environment(users_file):
    make = make_environment(f"{users_file}:Countdown", {"start": 2})
    one, other = make(), make()
    ends = [episode.step("").terminated for episode in (one, other, one, other)]
    assert ends == [False, False, True, True]


def test_episodes_at_the_same_time_do_not_share_a_single_turn():
    make = make_environment("sequential_digits")
    one, other = make(), make()
    for episode, index in ((one, 0), (other, 1)):
        episode.reset(episode.example(index, "train"))
    answers = [make().example(index, "train").data["sequence"] for index in (0, 1)]
    assert answers[0] != answers[1]
    assert [one.step(answers[0]).reward, other.step(answers[1]).reward] == [1, 1]


def test_a_file_is_run_once_for_all_episodes(tmp_path):
    log = tmp_path / "log"
    path = tmp_path / "logged.py"
    path.write_text(f"with open({str(log)!r}, 'a') as log:\n    log.write('x')\n{USERS_FILE}")
    make = make_environment(f"{path}:Countdown")
    make()
    make()
    assert log.read_text() == "x"


def test_a_class_is_found_in_a_module_that_can_be_imported(users_file, monkeypatch):
    monkeypatch.syspath_prepend(users_file.parent)
    assert make_environment("mine:Shout")().example(0, "train").messages[0].content == "shout 0!"


@pytest.mark.parametrize(
    ("tail", "options", "message"),
    [
        ("mine.py:Shuot", {}, r"mine\.py has no class 'Shuot'; it has Shout, Countdown, Neither, Moody"),
        ("mine.py:not_callable", {}, "has no class 'not_callable'"),
        ("mine.py:Neither", {}, r"Neither fits neither protocol .* wanted example\(index, split\), and either score"),
        ("mine.py:Moody", {}, "could not be built: KeyError: 'mood'"),
        ("mine.py:Shout", {"sign": 1}, r"unexpected keyword argument 'sign'; it takes \(mark: str = '!', seed"),
        ("mine.py:Countdown", {"seed": 1}, "unexpected keyword argument 'seed'"),
        ("yours.py:Shout", {}, r"there is no file .*yours\.py"),
        ("broken.py:Shout", {}, r"broken\.py, line 2, failed: ZeroDivisionError"),
        ("syntax.py:Shout", {}, r"failed: SyntaxError: .*line 1"),
    ],
)
def test_what_cannot_be_loaded_is_explained(users_file, tail, options, message):
    (users_file.parent / "broken.py").write_text("x = 0\n1 / x\n")
    (users_file.parent / "syntax.py").write_text("class Shout(:\n")
    with pytest.raises(ConfigError, match=message):
        make_environment(f"{users_file.parent}/{tail}", options)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("moarcats", r"'moarcats' is unknown; did you mean 'moar_cats'\? There are .*; your own is [^,]*$"),
        ("leg_counting", r"did you mean 'reasoning_gym/leg_counting"),
        ("reasoning_gym/leg_countin", r"did you mean 'reasoning_gym/leg_counting"),
        ("zzzzzz", r"is unknown; there are .* moar_cats, .* qa/FILE, reasoning_gym/NAME, .* path/to/file.py:ClassName"),
        ("reasoning_gym/zzzzzz", r"there are .* reasoning_gym/leg_counting"),
        ("no_such_module:Thing", "module 'no_such_module' can't be imported: ModuleNotFoundError.* named by its path"),
        (":Thing", "module '' can't be imported"),
    ],
)
def test_an_unknown_name_comes_with_close_matches(name, message):
    with pytest.raises(ConfigError, match=message):
        make_environment(name)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "addition",
            {"max_digit": 2},
            r"environment addition: .*'max_digit'; it takes \(\*, max_digits: int = 3, seed",
        ),
        ("addition", {"max_digits": 0}, "environment addition: max_digits is 0"),
        ("moar_cats", {"cats": 2}, "environment moar_cats: .*'cats'"),
        ("reasoning_gym/leg_counting", {"legs": 2}, "environment reasoning_gym/leg_counting: .*'legs'"),
        (
            "reasoning_gym/leg_counting",
            {"generator": "acre"},
            "reasoning_gym/leg_counting could not be built: TypeError",
        ),
    ],
)
def test_wrong_options_are_refused_before_the_first_episode(name, options, message):
    with pytest.raises(ConfigError, match=message):
        make_environment(name, options)


@pytest.mark.parametrize(
    ("name", "package"),
    [("textarena/Sudoku-v0", "textarena"), ("gymnasium/a:B-v0", "gymnasium"), ("verifiers/gsm8k", "verifiers")],
)
def test_a_package_that_is_missing_is_named_with_the_extra_that_installs_it(name, package, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    message = rf"environment {name}: the package {package} is not installed; pip install 'ludic-rl\[{package}\]'"
    with pytest.raises(ConfigError, match=message):
        make_environment(name)
    assert not [each for each in environment_names() if each.startswith(f"{package}/")]


def test_options_are_a_mapping():
    with pytest.raises(ConfigError, match=r"its options are \[\['max_digits', 2\]\], wanted a mapping"):
        make_environment("addition", [["max_digits", 2]])


def test_the_list_of_names_has_the_built_in_ones_first():
    names = environment_names()
    assert names[:3] == ("addition", "errands", "guess_number")
    assert "reasoning_gym/leg_counting" in names
    assert len(set(names)) == len(names) > 100


@pytest.mark.parametrize("raised", ["SystemExit(3)", "GeneratorExit()", "BaseException('no')"])
@pytest.mark.parametrize("where", ["file", "class"])
def test_whatever_a_file_raises_is_explained(tmp_path, raised, where):
    body = f"raise {raised}" if where == "file" else f"class Cats:\n    def __init__(self):\n        raise {raised}"
    (tmp_path / "cats.py").write_text(f"{body}\n")
    with pytest.raises(ConfigError, match="RuntimeError: "):
        make_environment(f"{tmp_path}/cats.py:Cats")
