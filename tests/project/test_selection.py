"""Which tests run, and in what order: slow ones first, and with --quick the first case of all others."""

from types import SimpleNamespace

import pytest

from tests.conftest import pytest_collection_modifyitems


class Item:
    def __init__(self, nodeid: str, slow: bool = False) -> None:
        self.nodeid, self.slow = nodeid, slow

    def get_closest_marker(self, name: str) -> bool | None:
        return True if self.slow and name == "slow" else None


@pytest.mark.parametrize(
    ("quick", "kept"),
    [(False, ["b::slow[0]", "b::slow[1]", "a::x[0]", "a::x[1]", "b::x"]), (True, ["a::x[0]", "b::x"])],
)
def test_slow_tests_begin_first_and_quick_takes_one_case_of_the_others(quick, kept):
    items = [Item("a::x[0]"), Item("a::x[1]"), Item("b::slow[0]", True), Item("b::slow[1]", True), Item("b::x")]
    every, dropped = set(items), set()
    hook = SimpleNamespace(pytest_deselected=lambda items: dropped.update(items))
    pytest_collection_modifyitems(SimpleNamespace(getoption=lambda name: quick, hook=hook), items)
    assert [item.nodeid for item in items] == kept
    assert set(items) | dropped == every
    assert not set(items) & dropped
