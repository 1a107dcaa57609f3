"""The list of deliberate faults stays applicable; whether tests catch them, `make faults` says."""

import pytest

from tests.kernels.mutations import FAULTS
from tests.kernels.mutations.runner import ROOT
from tests.support.python import python


@pytest.mark.parametrize("file", sorted({fault.file for fault in FAULTS}))
def test_each_fault_has_one_place(file):
    text = (ROOT / file).read_text()
    for fault in FAULTS:
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
