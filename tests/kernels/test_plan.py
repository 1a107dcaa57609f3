"""Launchers with a memory launch what they launch without, by Triton's own door and by ours; nothing is compiled."""

import ast
import json

import pytest
import torch

from tests.support.python import ROOT, python

CASES = 2  # a launcher, of benchmarks/codegen/cases, each with dozens of variants
# Their chunks are matrix products.
UNPLANNED = {"linear_cross_entropy.kernels.forward", "linear_cross_entropy.kernels.backward"}

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def facts():
    ran = python("tests/kernels/facts/plan_facts.py", str(CASES), TRITON_INTERPRET="0")
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout)


@pytest.fixture(scope="module")
def launchers(facts):
    return facts["launchers"]


@pytest.mark.slow
def test_every_way_launches_the_same(launchers):
    assert sum(fact["calls"] for fact in launchers.values()) > 50
    assert not [difference for fact in launchers.values() for difference in fact["differences"]]


@pytest.mark.slow
def test_most_calls_are_repeated_from_a_plan(launchers):
    for name, fact in launchers.items():
        if name in UNPLANNED:
            assert fact["repeated"] == 0
        else:
            assert fact["repeated"] >= 0.7 * fact["calls"], name


def test_what_is_forgotten_is_watched_anew(monkeypatch):
    """Else a part of a launcher that a test replaces would not be asked, where an earlier test made the same call."""
    plan = pytest.importorskip("fastformer_kernels.host.plan")
    seen = []

    def watch(launcher, args, plans, key):
        seen.append(key)
        plans[key] = plan._NEVER

    monkeypatch.setattr(plan.knobs.runtime, "interpret", False)
    monkeypatch.setattr(plan, "_record_call", watch)
    run, x = plan.planned(lambda x: x), torch.ones(2)
    for calls in (1, 2):
        run(x)
        run(x)
        assert len(seen) == calls
        plan.forget()


def test_plans_of_sizes_that_never_repeat_do_not_add_up(monkeypatch):
    plan = pytest.importorskip("fastformer_kernels.host.plan")
    kept = []

    def watch(launcher, args, plans, key):
        plans[key] = plan._NEVER
        kept.append(len(plans))

    monkeypatch.setattr(plan.knobs.runtime, "interpret", False)
    monkeypatch.setattr(plan, "_record_call", watch)
    monkeypatch.setattr(plan, "_MOST", 4)
    run = plan.planned(lambda x: x)
    for size in range(1, 20):
        run(torch.ones(size))
    assert len(kept) == 19
    assert max(kept) == 4


def test_tensor_subclasses_have_no_plan(monkeypatch):
    """They have no description, and as part of a key they would stay alive."""
    plan = pytest.importorskip("fastformer_kernels.host.plan")
    marked = type("Marked", (torch.Tensor,), {})
    monkeypatch.setattr(plan.knobs.runtime, "interpret", False)
    monkeypatch.setattr(plan, "_record_call", lambda *_: pytest.fail("watched"))
    run, x = plan.planned(lambda *x: len(x)), torch.ones(2)
    assert run(x.as_subclass(marked)) == 1
    assert run(None, x, 3, x.as_subclass(marked)) == 4


@pytest.mark.slow
@pytest.mark.parametrize("way", ["launched", "repeated"])
def test_launches_go_straight_unless_hooks_want_to_see_them(facts, way):
    found = facts["hooks"][way]
    for name in ("none", "removed"):
        assert found[name] == {"straight": [True], "seen": []}, name
    for name in ("enter", "exit"):
        assert found[name]["straight"] == [False]
        assert len(found[name]["seen"]) == 1
        assert "kernel" in found[name]["seen"][0]


def test_everything_is_launched_by_launch():
    """Else a plan would not know of it."""
    for path in (ROOT / "kernels" / "fastformer_kernels").rglob("*.py"):
        if path.name != "launch.py":
            for node in ast.walk(ast.parse(path.read_text())):
                assert not (isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)), (path, node.lineno)
