"""`warm_up` compiles what a step launches, and nothing else happens; found in a process where kernels are compiled."""

import json

import pytest

from tests.support.python import python

pytest.importorskip("triton")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    ran = python("tests/functional/warm_up_facts.py", TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(cache))
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran, len([*cache.glob("*/*.cubin")])


@pytest.fixture(scope="module")
def facts(ran):
    return json.loads(ran[0].stdout)


@pytest.mark.parametrize("step", ["training", "search"])
def test_a_step_compiles_nothing_after_it(step, facts):
    found = facts[step]
    assert found["kernels"] == found["compiled"] == found["compiled in all"] > 5
    assert found["again"] == 0
    assert found["launched by the step"] > 5


@pytest.mark.parametrize("step", ["training", "search"])
def test_kernels_are_not_started_and_the_model_is_restored(step, facts):
    assert facts[step]["launched"] == 0
    assert facts[step]["restored"]
    assert facts["training"]["gradients"] == 0
    assert facts["training"]["loss"] == 0.0  # what kernels would write is 0


def test_kernels_are_in_tritons_cache_and_progress_is_written(ran, facts):
    done, cubins = ran
    kernels = facts["training"]["kernels"]
    assert cubins == kernels + facts["search"]["kernels"]
    assert f"{kernels} of {kernels} kernels compiled\n" in done.stderr
