"""A kernel is compiled once for what a launcher asks for: nothing about a batch compiles it again in mid-training."""

import json

import pytest

from tests.support.python import python

pytest.importorskip("triton")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def facts():
    ran = python("tests/kernels/facts/compilation_facts.py", TRITON_INTERPRET="0", OMP_NUM_THREADS="1")
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout)


def test_every_form_is_launched_at_every_length(facts):
    assert len(facts["launches"]) == 21
    assert all(launches >= 2 * 38 for launches in facts["launches"].values()), facts["launches"]
    assert len(facts["kernels"]) == 26


def test_one_variant_for_all_lengths(facts):
    """Each of them first met where the configuration was: a dtype, an option, or a tile that lengths decide on."""
    for kernel, configurations in facts["kernels"].items():
        for configuration, places in configurations.items():
            assert len(places) == 1, (kernel, configuration, places)


def test_tiles_by_length_are_few(facts):
    """So many of one form: tiles of three sizes in 16 bits."""
    for kernel, configurations in facts["kernels"].items():
        forms = [places[0].split()[0] for places in configurations.values()]
        most = {form: forms.count(form) for form in {"projected", "packed"} & set(forms)}
        assert all(number <= 6 for number in most.values()), (kernel, most)
