"""Which tests run, and in what order: slow ones first; with --quick one case of the others, with --compiled kernels."""

from types import SimpleNamespace

import pytest

from tests.conftest import pytest_collection_modifyitems
from tests.support.fused_op import needs_compiled, needs_kernels


class Item:
    def __init__(self, nodeid: str, slow: bool = False, needs: pytest.MarkDecorator | None = None) -> None:
        self.nodeid, self.slow, self.needs = nodeid, slow, needs

    def get_closest_marker(self, name: str) -> bool | None:
        return True if self.slow and name == "slow" else None

    def iter_markers(self, name: str) -> list[pytest.Mark]:
        return [self.needs.mark] if self.needs and name == "skipif" else []


def items() -> list[Item]:
    skipped = pytest.mark.skipif(True, reason="another")
    return [
        Item("a::x[0]", needs=needs_kernels),
        Item("a::x[1]", needs=needs_kernels),
        Item("b::slow[0]", True),
        Item("b::slow[1]", True, needs=needs_compiled),
        Item("b::x", needs=skipped),
    ]


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ((), ["b::slow[0]", "b::slow[1]", "a::x[0]", "a::x[1]", "b::x"]),
        (("--quick",), ["a::x[0]", "b::x"]),
        (("--compiled",), ["b::slow[1]", "a::x[0]", "a::x[1]"]),
        (("--compiled", "--quick"), ["a::x[0]"]),
    ],
)
def test_what_is_chosen(options, kept):
    chosen, dropped = items(), set()
    every = set(chosen)
    hook = SimpleNamespace(pytest_deselected=lambda items: dropped.update(items))
    pytest_collection_modifyitems(SimpleNamespace(getoption=lambda name: name in options, hook=hook), chosen)
    assert [item.nodeid for item in chosen] == kept
    assert set(chosen) | dropped == every
    assert not set(chosen) & dropped
