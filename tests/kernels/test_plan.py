"""What launchers launch and compile, found in processes that have no GPU and no interpreter (`facts`).

A launcher with a memory launches what it launches without. A kernel is compiled once for what a launcher asks for:
nothing about a batch compiles it again in mid-training. No index is multiplied with a stride in 32 bits.
"""

import ast
import json
from typing import Any

import pytest
import torch

from tests.support.python import ROOT, python

pytest.importorskip("triton")
from fastformer_kernels.host import plan

CASES = 2  # a launcher, of benchmarks/codegen/cases, each with dozens of variants
# Chunks of the output loss are matrix products.
UNPLANNED = {"linear_cross_entropy.kernels.forward", "linear_cross_entropy.kernels.backward"}
UNPLANNED |= {"embedding.kernels.backward"}  # sorts the tokens


def facts_of(program: str, *arguments: str) -> Any:
    """Run a program of the folder `facts`; return what it prints."""
    ran = python(f"tests/kernels/facts/{program}.py", *arguments, TRITON_INTERPRET="0", OMP_NUM_THREADS="1")
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout.splitlines()[-1])


# ---- plans


@pytest.fixture(scope="module")
def facts():
    return facts_of("plan_facts", str(CASES))


@pytest.mark.slow
def test_every_way_launches_the_same(facts):
    assert sum(fact["calls"] for fact in facts["launchers"].values()) > 50
    assert not [difference for fact in facts["launchers"].values() for difference in fact["differences"]]


@pytest.mark.slow
def test_most_calls_are_repeated_from_a_plan(facts):
    for name, fact in facts["launchers"].items():
        if name in UNPLANNED:
            assert fact["repeated"] == 0
        else:
            assert fact["repeated"] >= 0.7 * fact["calls"], name


def test_plans_of_sizes_that_never_repeat_do_not_add_up(monkeypatch):
    kept = []

    def watch(launcher, args, plans, key):
        plans[key] = plan._NEVER
        kept.append(len(plans))

    monkeypatch.setattr(plan.knobs.runtime, "interpret", False)
    monkeypatch.setattr(plan, "_record_call", watch)
    monkeypatch.setattr(plan, "_MOST_PLANS", 4)
    run = plan.planned(lambda x: x)
    for size in range(1, 20):
        run(torch.ones(size))
    assert len(kept) == 19
    assert max(kept) == 4


def test_tensor_subclasses_have_no_plan(monkeypatch):
    """They have no description, and as part of a key they would stay alive."""
    marked = type("Marked", (torch.Tensor,), {})
    monkeypatch.setattr(plan.knobs.runtime, "interpret", False)
    monkeypatch.setattr(plan, "_record_call", lambda *_: pytest.fail("watched"))
    run, x = plan.planned(lambda *x: len(x)), torch.ones(2)
    assert run(x.as_subclass(marked)) == 1
    assert run(None, x, 3, x.as_subclass(marked)) == 4


@pytest.mark.slow
@pytest.mark.parametrize("way", ["launched", "repeated"])
def test_launches_go_straight_unless_hooks_want_to_see_them(facts, way):
    actual = facts["hooks"][way]
    for name in ("none", "removed"):
        assert actual[name] == {"straight": [True], "seen": []}, name
    for name in ("enter", "exit"):
        assert actual[name]["straight"] == [False]
        assert len(actual[name]["seen"]) == 1
        assert "kernel" in actual[name]["seen"][0]


def test_everything_is_launched_by_launch():
    """Else a plan would not know of it."""
    for path in (ROOT / "kernels" / "fastformer_kernels").rglob("*.py"):
        if path.name != "launch.py":
            for node in ast.walk(ast.parse(path.read_text())):
                assert not (isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)), (path, node.lineno)


# ---- compilations


@pytest.fixture(scope="module")
def compilations():
    return facts_of("compilation_facts")


@pytest.mark.slow
def test_every_form_is_launched_at_every_length(compilations):
    assert len(compilations["launches"]) == 21
    assert all(launches >= 2 * 29 for launches in compilations["launches"].values()), compilations["launches"]
    assert len(compilations["kernels"]) == 23


@pytest.mark.slow
def test_one_variant_for_all_lengths(compilations):
    """Each of them first met where the configuration was: a dtype, an option, or a tile that lengths decide on."""
    for kernel, configurations in compilations["kernels"].items():
        for configuration, places in configurations.items():
            assert len(places) == 1, (kernel, configuration, places)


@pytest.mark.slow
def test_tiles_by_length_are_few(compilations):
    """So many of one form: tiles of three sizes in 16 bits."""
    for kernel, configurations in compilations["kernels"].items():
        forms = [places[0].split()[0] for places in configurations.values()]
        most = {form: forms.count(form) for form in {"projected", "packed"} & set(forms)}
        assert all(number <= 6 for number in most.values()), (kernel, most)


# ---- offsets


@pytest.mark.slow
def test_offsets_are_of_64_bits():
    """Tensors of more than 2^31 elements: no index is multiplied with a stride in 32 bits; 8 faults show the rule."""
    narrow_offsets = facts_of("kernel_facts")
    faults = {name: broken for name, broken in narrow_offsets.items() if ".bad_" in name}
    assert len(faults) == 8
    assert all(faults.values()), faults
    kernels = narrow_offsets.keys() - faults.keys()
    assert {name.split(".")[0] for name in kernels} >= {"linear_cross_entropy", "feed_forward"}
    assert not {name: narrow_offsets[name] for name in kernels if narrow_offsets[name]}
