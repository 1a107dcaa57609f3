"""The lists of deliberate faults stay applicable; `make faults` and `make core-faults` say whether tests catch them."""

import pytest

from tests import core_faults
from tests.kernels.mutations import FAULTS
from tests.support.python import ROOT, python

BOTH = [*FAULTS, *core_faults.FAULTS]


@pytest.mark.parametrize("file", sorted({fault.file for fault in BOTH}))
def test_each_fault_has_one_place(file):
    text = (ROOT / file).read_text()
    for fault in BOTH:
        if fault.file == file:
            assert text.count(fault.old) == 1, fault.name
            assert fault.new != fault.old
            compile(text.replace(fault.old, fault.new), file, "exec")


def test_names_are_unique():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


@pytest.mark.slow
def test_each_fault_has_a_test():
    """Pytest says which of the tests it does not find."""
    tests = list(dict.fromkeys(fault.test for fault in FAULTS))
    ran = python("-m", "pytest", "-o", "addopts=", "-q", "--collect-only", "-p", "no:cacheprovider", *tests)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert set(tests) <= set(ran.stdout.splitlines())
