"""`warm_up` compiles what a step launches, and nothing else happens.

The tests run this file in a process of its own, where kernels are compiled for an H200 that is not there, and read the
facts that it prints as JSON.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor

import fastformer
from fastformer.apps.translation.model import translation_loss
from fastformer.apps.translation.search import SearchOptions, greedy_search
from tests.support.python import python
from tests.support.translation_task import random_batch, random_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    pytest.importorskip("triton")
    cache = tmp_path_factory.mktemp("cache")
    ran = python("-m", "tests.functional.test_warm_up", TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(cache))
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran, json.loads(ran.stdout), len([*cache.glob("*/*.cubin")])


@pytest.mark.parametrize("step", ["training", "search"])
def test_a_step_compiles_nothing_after_it(step, ran):
    found = ran[1][step]
    assert found["kernels"] == found["compiled"] == found["compiled in all"] > 5
    assert found["again"] == 0
    assert found["launched by the step"] > 5


@pytest.mark.parametrize("step", ["training", "search"])
def test_kernels_are_not_started_and_the_model_is_restored(step, ran):
    facts = ran[1]
    assert facts[step]["launched"] == 0
    assert facts[step]["restored"]
    assert facts["training"]["gradients"] == 0
    assert facts["training"]["loss"] == 0.0  # what kernels would write is 0


def test_kernels_are_in_tritons_cache_and_progress_is_written(ran):
    done, facts, cubins = ran
    kernels = facts["training"]["kernels"]
    assert cubins == kernels + facts["search"]["kernels"]
    assert f"{kernels} of {kernels} kernels compiled\n" in done.stderr


def facts_of_steps() -> dict[str, Any]:
    """Warm up a training step and a search twice each, then run it."""
    import triton

    from benchmarks.host import null_driver

    null_driver.install()
    fastformer.set_backend("triton")
    compiled: list[str] = []
    losses: list[float] = []
    triton.knobs.runtime.jit_post_compile_hook = lambda **facts: compiled.append(facts["repr"])
    model = random_model(d_model=16, heads=2, feed_forward=32, encoder_layers=1, decoder_layers=1, dropout=0.1).train()
    model.register_buffer("calls", torch.zeros(()))
    batch = random_batch([(5, 7), (9, 3)])

    def training_loss() -> Tensor:
        model.calls += 1
        loss = translation_loss(model, batch, 0.1)
        losses.append(loss.item())
        return loss

    def search() -> Any:
        return greedy_search(model.eval(), batch.source, batch.source_lengths, SearchOptions(beam=1, max_length=4))

    def facts(step: Callable[[], Any], differentiate: Callable[[Any], None]) -> dict[str, Any]:
        compiled.clear()
        launched, random, calls = null_driver.launched(), torch.get_rng_state(), model.calls.item()
        found: dict[str, Any] = {"kernels": fastformer.warm_up(model, step=step, workers=2), "compiled": len(compiled)}
        found["again"] = fastformer.warm_up(model, step=step, progress=False)
        found["launched"] = null_driver.launched() - launched
        found["gradients"] = sum(parameter.grad is not None for parameter in model.parameters())
        found["restored"] = torch.equal(random, torch.get_rng_state()) and model.calls.item() == calls
        with suppress(FloatingPointError):  # without a GPU, results are whatever was in memory
            differentiate(step())
        found["launched by the step"] = null_driver.launched() - launched
        return found | {"compiled in all": len(compiled)}

    return {
        "training": facts(training_loss, lambda loss: loss.backward()) | {"loss": losses[0]},
        "search": facts(search, lambda _: None),
    }


if __name__ == "__main__":
    print(json.dumps(facts_of_steps()))
