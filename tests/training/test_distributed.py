import pytest

from ludic.base.distributed import (
    broadcast_bytes,
    bytes_from_main,
    init_distributed,
    is_main,
    num_ranks,
    rank,
    run_on_all,
    run_on_main,
)
from ludic.errors import StalledError
from ludic.root.json_records import LatestPolicy


def test_one_process_is_a_group_of_one_without_torchrun(mesh):
    assert (rank(), num_ranks(), is_main(), mesh.size()) == (0, 1, True, 1)


def test_a_second_call_joins_nothing(mesh):
    assert init_distributed("cpu").size() == mesh.size()


@pytest.mark.parametrize("data", [b"", b"plan", bytes(range(256)) * 100])
def test_bytes_arrive_as_they_were_sent(mesh, data):
    assert broadcast_bytes(data) == data
    assert bytes_from_main(lambda: data) == data


@pytest.mark.parametrize("value", [None, 3, "ä", [1.5, {"a": [None, True]}]])
def test_json_values_arrive_as_they_were_sent(mesh, value):
    assert run_on_main(lambda: value) == value


def test_a_record_arrives_as_a_record(mesh):
    latest = LatestPolicy(version=1, budget=2)
    assert run_on_main(lambda: (latest, None), tuple[LatestPolicy, int | None]) == (latest, None)


def test_an_error_of_rank_0_is_raised_as_it_is(mesh):
    with pytest.raises(StalledError, match="nothing arrived"):
        run_on_main(stall)


def test_each_rank_gets_its_own_answer_or_the_error(mesh):
    assert run_on_all(lambda: {"rank": rank()}) == {"rank": 0}
    assert run_on_all(lambda: None) is None
    with pytest.raises(StalledError, match="nothing arrived"):
        run_on_all(stall)


def stall():
    raise StalledError("nothing arrived")
