"""The cache of a language model against torch's model without one, at every step, across every slide of the window."""

import re

import pytest
import torch

from fastformer.apps.language.sampling import LanguageState
from tests.support.fused_op import needs_kernels
from tests.support.language_task import random_model
from tests.support.single_stack import TorchTwin

PROMPTS = [[2, 5, 6, 7], [2], [2, 9, 10, 11, 12, 13, 14, 15, 16, 4, 5, 5, 8], [2, 8]]

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
        self.twin = TorchTwin(model.config).copy(model).to(model.output.weight.dtype)
        self.context, self.windows = context, [ids[-context:] for ids in prompts]

    def step(self, ids):
        for row, token in enumerate(ids):
            if len(self.windows[row]) == self.context:
                self.windows[row] = self.windows[row][self.context - self.context // 2 :]
            self.windows[row] = [*self.windows[row], token]
        return self.logits()

    @torch.no_grad()
    def logits(self):
        return torch.cat([self.twin(torch.tensor([w]), torch.tensor([len(w)]))[:, -1] for w in self.windows])


def random_tokens(rows, steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 17, (steps, rows), generator=generator)


def follow(state, reference, steps, tolerance):
    torch.testing.assert_close(state.logits, reference.logits(), atol=tolerance, rtol=tolerance)
    for ids in random_tokens(len(reference.windows), steps):
        found = state.step(ids)
        torch.testing.assert_close(found, reference.step(ids.tolist()), atol=tolerance, rtol=tolerance)
        assert state.cache.lengths.tolist() == [len(window) for window in reference.windows]
        assert max(len(window) for window in reference.windows) <= reference.context


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_cached_is_uncached_at_every_step(variant):
    model = random_model(1, **VARIANTS[variant])
    follow(LanguageState(model, PROMPTS, 8), Uncached(model, PROMPTS, 8), 25, 2e-5)
    model = model.double()
    follow(LanguageState(model, PROMPTS, 7), Uncached(model, PROMPTS, 7), 25, 1e-10)


@pytest.mark.parametrize("context", [1, 3, 70])
@pytest.mark.parametrize("prompts", [PROMPTS, [[2, 5, 9], [2, 8, 8], [2, 4, 4]]], ids=["ragged", "equal"])
@torch.no_grad()
def test_any_context(context, prompts):
    """Contexts of one token and of more than the first capacity of the cache; rows that are all equally long."""
    model = random_model(2).double()
    steps = 35 if context == 70 else 12  # 70: beyond the first capacity of 32
    follow(LanguageState(model, prompts, context), Uncached(model, prompts, context), steps, 1e-10)


@torch.no_grad()
def test_a_long_text_needs_no_more_memory_than_its_context():
    model = random_model(2).double()
    state = LanguageState(model, PROMPTS, 40)
    sizes = []
    for ids in random_tokens(4, 100):
        state.step(ids)
        [shape] = {tuple(kept.shape) for cache in state.cache.layers for kept in (cache.keys, cache.values)}
        sizes.append(shape[2])
    assert sizes[0] == 32
    assert max(sizes) == 40


@torch.no_grad()
def test_a_long_context_takes_no_memory_before_there_is_a_text():
    """The context is in config.toml, which is untrusted."""
    state = LanguageState(random_model(1).eval(), PROMPTS, 2**62)
    for ids in random_tokens(len(PROMPTS), 20):
        state.step(ids)
    state.keep(torch.tensor([0, 2]))
    assert all(kept.shape[2] < 100 for cache in state.cache.layers for kept in (cache.keys, cache.values))


@torch.no_grad()
def test_the_work_of_a_token_is_bounded(monkeypatch):
    """Tokens read again for 300 new ones: no more than 300, in less than one pass for every half context."""
    model = random_model(2)
    passes = []
    read = LanguageState._read

    def counting(self, rows):
        passes.append(sum(map(len, rows)))
        return read(self, rows)

    monkeypatch.setattr(LanguageState, "_read", counting)
    state = LanguageState(model, [[2]], 20)
    for ids in random_tokens(1, 300):
        state.step(ids)
    assert sum(passes[1:]) <= 300
    assert len(passes) - 1 <= 300 / 10


@torch.no_grad()
def test_a_row_does_not_know_the_others():
    """Alone, in another order, and after others have left the batch; rows slide at different times."""
    model = random_model(5).double()
    tokens = random_tokens(4, 30)
    together = LanguageState(model, PROMPTS, 8)
    expected = [together.logits, *(together.step(ids) for ids in tokens)]
    for row, prompt in enumerate(PROMPTS):
        alone = LanguageState(model, [prompt], 8)
        found = [alone.logits, *(alone.step(ids) for ids in tokens[:, row : row + 1])]
        torch.testing.assert_close(torch.cat(found), torch.stack(expected)[:, row], atol=1e-10, rtol=0)
    state = LanguageState(model, PROMPTS, 8)
    rows = torch.arange(4)
    for t, ids in enumerate(tokens):
        if t in (3, 11, 17):
            left = torch.tensor({3: [0, 2, 3], 11: [1, 2], 17: [1]}[t])
            state.keep(left)
            rows = rows[left]
        torch.testing.assert_close(state.step(ids[rows]), expected[t + 1][rows], atol=1e-10, rtol=0)
    assert rows.tolist() == [3]


@needs_kernels
@pytest.mark.usefixtures("triton_backend")
@torch.no_grad()
def test_with_the_kernels():
    model = random_model(1, layers=1)
    state, prompts = LanguageState(model, PROMPTS[:2], 5), PROMPTS[:2]
    reference = Uncached(model, prompts, 5)
    follow(state, reference, 5, 2e-5)


def test_errors():
    model = random_model(1)
    for prompts in ([], [[2], []]):
        with pytest.raises(ValueError, match="prompts must hold at least one prompt, and each at least one id"):
            LanguageState(model, prompts, 8)
    with pytest.raises(ValueError, match=r"^context must be at least 1, not 0$"):
        LanguageState(model, [[2]], 0)
    learned = random_model(1, positions="learned", max_positions=12)
    message = "context must be at least 1 and at most max_positions (12), not 13"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        LanguageState(learned, [[2]], 13)
