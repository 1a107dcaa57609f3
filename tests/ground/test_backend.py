"""The choice of an implementation: precedence, threads, torch.compile, and requests that cannot be met."""

import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import fastformer
from fastformer import functional
from fastformer.functional import choice
from tests.support.fused_calls import CALLS, leaves
from tests.support.python import python

X = torch.randn(2, 3)
DOUBLE = X.double()  # no kernel takes fp64, on a GPU or in Triton's interpreter


@pytest.fixture(autouse=True)
def _restore():
    before = fastformer.get_backend()
    yield
    fastformer.set_backend(before)


def in_fresh_python(code: str, backend: str | None) -> subprocess.CompletedProcess:
    return python("-c", code, FASTFORMER_BACKEND=backend)


def test_the_environment_is_the_default():
    code = "import fastformer; print(fastformer.get_backend())"
    assert in_fresh_python(code, None).stdout.strip() == "auto"
    assert in_fresh_python(code, "reference").stdout.strip() == "reference"


def test_a_misspelt_environment_raises_with_the_choices():
    run = in_fresh_python("import fastformer; fastformer.get_backend()", "tritn")
    assert run.returncode != 0
    assert "FASTFORMER_BACKEND is 'tritn'; it must be one of auto, triton, reference" in run.stderr


def test_the_function_is_not_hidden_by_its_module():
    code = "import fastformer.functional\nwith fastformer.backend('reference'): print(fastformer.get_backend())"
    assert in_fresh_python(code, None).stdout.strip() == "reference"


def test_context_beats_set_backend_and_nests():
    fastformer.set_backend("reference")
    with fastformer.backend("auto"):
        assert fastformer.get_backend() == "auto"
        with fastformer.backend("triton"):
            assert fastformer.get_backend() == "triton"
        assert fastformer.get_backend() == "auto"
    assert fastformer.get_backend() == "reference"


def test_the_context_belongs_to_one_thread_and_the_setting_to_all():
    seen = []
    with fastformer.backend("triton"):
        thread = threading.Thread(target=lambda: seen.append(fastformer.get_backend()))
        thread.start()
        thread.join()
    fastformer.set_backend("reference")
    thread = threading.Thread(target=lambda: seen.append(fastformer.get_backend()))
    thread.start()
    thread.join()
    assert seen == ["auto", "reference"]


@pytest.mark.parametrize("choose", [fastformer.set_backend, lambda name: fastformer.backend(name).__enter__()])
def test_an_unknown_backend_raises_and_changes_nothing(choose):
    with pytest.raises(ValueError, match="backend is 'cuda'; it must be one of auto, triton, reference"):
        choose("cuda")
    assert fastformer.get_backend() == "auto"


def run(op: str) -> None:
    CALLS[op].call(CALLS[op].extra(3, "cpu"), 0.0, *leaves(op, 3, "cpu"))


@pytest.mark.parametrize("op", functional.OPS)
def test_triton_raises_with_the_reason_where_it_cannot_run(op, monkeypatch):
    monkeypatch.setattr(choice, "unsupported", lambda op, x: f"{op} is not for {x.device.type}")
    with (
        fastformer.backend("triton"),
        pytest.raises(RuntimeError, match=f"'triton' was asked for, but {op} is not for"),
    ):
        run(op)
    with fastformer.backend("reference"):
        run(op)
    with fastformer.backend("auto"):
        run(op)


@pytest.mark.parametrize(
    ("triton", "numpy", "runs"),
    [("3.6.0", "2.3.5", True), ("3.6.0", "2.4.0", False), ("3.6.0", "2.5.2", False), ("3.7.1", "2.5.2", True)],
)
def test_an_interpreter_that_numpy_is_too_new_for_is_named(triton, numpy, runs, monkeypatch):
    monkeypatch.setattr(choice.metadata, "version", {"triton": triton, "numpy": numpy}.__getitem__)
    fault = choice._fault_of_interpreter()
    assert (fault is None) == runs
    monkeypatch.setattr(choice, "_TRITON", True)
    monkeypatch.setattr(choice, "_INTERPRETED", True)
    monkeypatch.setattr(choice, "_FAULT_OF_INTERPRETER", fault)
    with fastformer.backend("triton"):
        assert choice.unsupported("rotary", X) == (None if runs else f"rotary {fault}")


def test_modules_use_the_chosen_backend():
    module = fastformer.TransformerEncoderLayer(4, 2, 8).double()
    with fastformer.backend("triton"), pytest.raises(RuntimeError, match="triton"):
        module(torch.randn(3, 2, 4).double())


def test_explain_says_what_would_run():
    for subject in (X, nn.Linear(2, 2), nn.ReLU()):
        lines = fastformer.explain(subject).splitlines()
        assert [line.split(":")[0] for line in lines] == list(functional.OPS)
        assert all(": reference (" in line for line in lines)
    with fastformer.backend("triton"):
        assert "layer_norm: raises (" in fastformer.explain(DOUBLE)
    with fastformer.backend("reference"):
        assert "layer_norm: reference (chosen)" in fastformer.explain(X)
    with pytest.raises(TypeError, match="subject must be a module or a tensor, not str"):
        fastformer.explain("x")


def test_compiled_code_follows_a_switch():
    def run():
        compiled = torch.compile(lambda x: functional.layer_norm(x, 3), backend="eager")
        compiled(DOUBLE)
        with fastformer.backend("triton"), pytest.raises(RuntimeError, match="'triton' was asked for"):
            compiled(DOUBLE)
        compiled(DOUBLE)
        fastformer.set_backend("triton")
        with pytest.raises(RuntimeError, match="'triton' was asked for"):
            compiled(DOUBLE)

    # In a new thread: where a context was used before, the switch would be seen in any case.
    with ThreadPoolExecutor(1) as pool:
        pool.submit(run).result()


def test_a_context_inside_compiled_code():
    def norm(x):
        with fastformer.backend("reference"):
            return functional.layer_norm(x, 3)

    compiled = torch.compile(norm, backend="eager", fullgraph=True)
    assert torch.equal(compiled(X), norm(X))
