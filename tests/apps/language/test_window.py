"""The cache of a language model equals torch.nn's model without a cache, at every step and slide of the window."""

import pytest
import torch

from fastformer.apps.language.sampling import LanguageState
from tests.support.fused_op import DEVICE, needs_kernels
from tests.support.language_task import random_model
from tests.support.single_stack import TorchTwin

PROMPTS = [[2, 5, 6, 7], [2], [2, 9, 10, 11, 12, 13, 14, 15, 16, 4, 5, 5, 8], [2, 8]]
EQUAL = [[2, 5, 9], [2, 8, 8], [2, 4, 4]]

VARIANTS = {
    "pre-norm": {},
    "post-norm, no final norm": {"norm_first": False, "final_norm": False},
    "learned": {"positions": "learned", "max_positions": 12},
    "separate, output bias": {"embeddings": "separate", "output_bias": True},
    "gelu, no biases": {"activation": "gelu", "bias": False},
    "three layers, one head": {"layers": 3, "heads": 1},
}


class Uncached:
    """The window rule in plain Python: which tokens a row reads; all of them are read again for each new one."""

    def __init__(self, model, prompts, context):
        self.twin = TorchTwin(model.config).copy(model).to(model.output.weight)
        self.context, self.windows = context, [ids[-context:] for ids in prompts]

    def step(self, ids):
        for row, token in enumerate(ids):
            if len(self.windows[row]) == self.context:
                self.windows[row] = self.windows[row][self.context - self.context // 2 :]
            self.windows[row] = [*self.windows[row], token]
        return self.logits()

    @torch.no_grad()
    def logits(self):
        device = self.twin.output.weight.device
        rows = [torch.tensor([window], device=device) for window in self.windows]
        return torch.cat([self.twin(row, torch.tensor([row.shape[1]], device=device))[:, -1] for row in rows])


def random_tokens(rows, steps):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, 17, (steps, rows), generator=generator)


@torch.no_grad()
def compare(model, prompts, context, steps, tolerance):
    state, reference = LanguageState(model, prompts, context), Uncached(model, prompts, context)
    torch.testing.assert_close(state.logits, reference.logits(), atol=tolerance, rtol=tolerance)
    for ids in random_tokens(len(prompts), steps).to(state.logits.device):
        actual = state.step(ids)
        torch.testing.assert_close(actual, reference.step(ids.tolist()), atol=tolerance, rtol=tolerance)
        lengths = [len(window) for window in reference.windows]
        assert state.cache.lengths.tolist() == lengths
        assert max(lengths) <= context


@pytest.mark.parametrize("variant", VARIANTS)
def test_cached_is_uncached_at_every_step(variant):
    model = random_model(1, **VARIANTS[variant])
    compare(model, PROMPTS, 8, 25, 2e-5)
    compare(model.double(), PROMPTS, 7, 25, 1e-10)


@pytest.mark.parametrize("context", [1, 3, 70])  # 70: beyond the first capacity of 32
@pytest.mark.parametrize("prompts", [PROMPTS, EQUAL], ids=["ragged", "equal"])
def test_any_context(context, prompts):
    compare(random_model(2).double(), prompts, context, 35 if context == 70 else 12, 1e-10)


@needs_kernels
@pytest.mark.usefixtures("triton_backend")
def test_with_the_kernels():
    compare(random_model(1, layers=1).to(DEVICE), PROMPTS[:2], 5, 5, 2e-5)


@pytest.mark.parametrize(("context", "capacity"), [(40, 40), (2**62, 128)])
@torch.no_grad()
def test_memory_grows_with_the_text_to_at_most_the_context(context, capacity):
    """The context is in config.toml, which is untrusted."""
    state = LanguageState(random_model(2).double(), PROMPTS, context)
    sizes = []
    for ids in random_tokens(4, 100):
        state.step(ids)
        [shape] = {tuple(kept.shape) for cache in state.cache.layers for kept in (cache.keys, cache.values)}
        sizes.append(shape[2])
    assert (sizes[0], max(sizes)) == (32, capacity)


@torch.no_grad()
def test_the_work_of_a_token_is_bounded(monkeypatch):
    """Tokens read again for 300 new ones: no more than 300, in less than one pass for every half context."""
    passes = []
    read = LanguageState._read

    def counting(self, rows):
        passes.append(sum(map(len, rows)))
        return read(self, rows)

    monkeypatch.setattr(LanguageState, "_read", counting)
    state = LanguageState(random_model(2), [[2]], 20)
    for ids in random_tokens(1, 300):
        state.step(ids)
    assert sum(passes[1:]) <= 300
    assert len(passes) - 1 <= 300 / 10


def test_empty_prompts_are_refused():
    for prompts in ([], [[2], []]):
        with pytest.raises(ValueError, match="prompts must hold at least one prompt, and each at least one id"):
            LanguageState(random_model(1), prompts, 8)
