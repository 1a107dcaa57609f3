"""The packed language model against torch.nn.TransformerEncoder, and what must hold of any such model."""

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fastformer.apps.language.model import LanguageModel, language_model_loss
from fastformer.apps.text import LanguageBatch
from tests.support.fused_op import DEVICE, assert_model_as_accurate_as_reference, needs_kernels
from tests.support.language_task import (
    TorchTwin,
    config,
    random_batch,
    random_model,
)

RAGGED = [1, 6, 4, 9, 2]
LONG = [3, 70, 1, 66]  # beyond the lengths at which attention works on short sequences

VARIANTS: dict[str, dict[str, Any]] = {
    "pre-norm": {},
    "post-norm": {"norm_first": False},
    "pre-norm, no final norm": {"final_norm": False},
    "post-norm, no final norm": {"norm_first": False, "final_norm": False},
    "separate": {"embeddings": "separate"},
    "learned": {"positions": "learned", "max_positions": 12},
    "output bias": {"output_bias": True},
    "no biases": {"bias": False},
    "gelu, eps, unscaled": {"activation": "gelu", "norm_eps": 1e-2, "scale_embeddings": False},
    "long": {"layers": 1},
    "three layers, one head": {"layers": 3, "heads": 1},
}


def variant_batch(variant: str) -> LanguageBatch:
    return random_batch(LONG if variant == "long" else RAGGED)


def padded_like(batch: LanguageBatch, extra: int = 0) -> LanguageBatch:
    """The batch with padding, `extra` columns more than needed."""

    def wide(ids: torch.Tensor) -> torch.Tensor:
        rows = nn.utils.rnn.pad_sequence(torch.split(ids, batch.lengths.tolist()), batch_first=True, padding_value=1)
        return F.pad(rows, (0, extra), value=1)

    return replace(batch, ids_in=wide(batch.ids_in), ids_out=wide(batch.ids_out))


def documents_of(batch: LanguageBatch) -> list[LanguageBatch]:
    """Each document as a batch of its own."""
    lengths = batch.lengths.tolist()
    parts = zip(batch.ids_in.split(lengths), batch.ids_out.split(lengths), batch.lengths.split(1), strict=True)
    return [LanguageBatch(*part) for part in parts]


def loss_and_gradients(
    model: LanguageModel, batch: LanguageBatch, label_smoothing: float = 0.0
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = language_model_loss(model, batch, label_smoothing)
    names, parameters = zip(*model.named_parameters(), strict=True)
    return loss, dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_model_is_torchs_encoder_with_a_causal_and_a_padding_mask(variant, dtype):
    """Packed and padded input give torch's loss on a padded batch, and torch's gradient of every parameter."""
    model = random_model(1, **VARIANTS[variant]).to(dtype)
    twin = TorchTwin(model.config).copy(model).to(dtype)
    packed = variant_batch(variant)
    padded = padded_like(packed)
    tolerance = {torch.float64: 1e-10, torch.float32: 2e-5}[dtype]

    expected = twin.loss(padded, label_smoothing=0.1)
    names, parameters = zip(*twin.named_parameters(), strict=True)
    wanted = dict(zip(names, torch.autograd.grad(expected, parameters), strict=True))
    for batch in (packed, padded, padded_like(packed, extra=3)):
        loss, gradients = loss_and_gradients(model, batch, label_smoothing=0.1)
        torch.testing.assert_close(loss, expected, atol=tolerance, rtol=tolerance)
        assert {TorchTwin.name(name) for name in gradients} == set(wanted)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, wanted[TorchTwin.name(name)], atol=10 * tolerance, rtol=tolerance)


@pytest.mark.parametrize("lengths", [RAGGED, LONG], ids=["short", "long"])
def test_a_batch_is_its_documents_one_by_one(lengths):
    """Hidden states, loss and every gradient: each document alone, added up."""
    model = random_model(3).double()
    batch = random_batch(lengths)
    alone = documents_of(batch)
    hidden = torch.cat([model(one.ids_in, one.lengths) for one in alone])
    torch.testing.assert_close(model(batch.ids_in, batch.lengths), hidden, atol=1e-12, rtol=0)
    loss, gradients = loss_and_gradients(model, batch)
    parts = [loss_and_gradients(model, one) for one in alone]
    torch.testing.assert_close(loss, torch.stack([part for part, _ in parts]).sum(), atol=1e-10, rtol=0)
    for name, gradient in gradients.items():
        expected = torch.stack([part[name] for _, part in parts]).sum(0)
        torch.testing.assert_close(gradient, expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("lengths", [RAGGED, LONG], ids=["short", "long"])
def test_gradients_stay_within_the_document_and_its_past(lengths):
    """The loss of one position reaches the embeddings of its own document up to itself, and those alone."""
    model = random_model(5).double()
    batch = random_batch(lengths)
    embedded: list[torch.Tensor] = []
    model.embedding.register_forward_hook(lambda module, args, output: embedded.append(output))
    hidden = model(batch.ids_in, batch.lengths)
    losses = F.cross_entropy(model.logits(hidden), batch.ids_out, reduction="none")
    ends = batch.lengths.cumsum(0).tolist()
    for start, end in zip([0, *ends], ends, strict=False):
        for position in {start, (start + end) // 2, end - 1}:
            (gradient,) = torch.autograd.grad(losses[position], embedded[0], retain_graph=True)
            reached = gradient.abs().amax(1) > 0
            assert reached.nonzero().flatten().tolist() == list(range(start, position + 1))


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]], ids=str)
@pytest.mark.parametrize("padded", [False, True])
def test_a_batch_of_no_tokens_has_loss_and_gradients_zero(lengths, padded):
    model = random_model(9, output_bias=True)
    shape = (len(lengths), 3) if padded else (0,)
    ids = torch.full(shape, 1)
    batch = LanguageBatch(ids, ids, torch.tensor(lengths, dtype=torch.int64))
    assert model(ids, batch.lengths).shape == (0, 12)
    loss, gradients = loss_and_gradients(model, batch, label_smoothing=0.1)
    assert loss.item() == 0
    assert all((gradient == 0).all() for gradient in gradients.values())


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_gets_a_gradient(variant):
    batch = random_batch(LONG if variant == "long" else [12, 12, 12])
    _, gradients = loss_and_gradients(random_model(13, **VARIANTS[variant]).train(), batch)
    for name, gradient in gradients.items():
        assert gradient.abs().sum() > 0, name


@pytest.mark.parametrize("embeddings", ["separate", "tied"])
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "state_dict"])
def test_tied_weights_stay_tied(how, embeddings):
    model = random_model(14, embeddings=embeddings)
    if how == "deepcopy":
        twin = copy.deepcopy(model)
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        twin = random_model(15, embeddings=embeddings)
        twin.load_state_dict(model.state_dict())
    tokens = twin.embedding.tokens.weight
    assert (twin.output.weight is tokens) == (embeddings == "tied")
    assert tokens is not model.embedding.tokens.weight
    matrices = 1 if embeddings == "tied" else 2
    stack = sum(p.numel() for p in twin.decoder.parameters())
    assert sum(p.numel() for p in twin.parameters()) == stack + matrices * 17 * 12
    batch = random_batch(RAGGED)
    assert torch.equal(twin(batch.ids_in, batch.lengths), model(batch.ids_in, batch.lengths))
    # Still tied after a step.
    language_model_loss(twin.train(), batch).backward()
    torch.optim.SGD(twin.parameters(), 0.1).step()
    assert torch.equal(twin.output.weight, tokens) == (embeddings == "tied")


def test_tables_of_positions_are_not_in_the_checkpoint():
    long = LanguageModel(config(max_positions=64))
    long.load_state_dict(LanguageModel(config(max_positions=8)).state_dict())


def test_input_errors():
    model = random_model(positions="learned", max_positions=5)
    ids, lengths = torch.tensor([4, 5, 6]), torch.tensor([2, 1])
    with pytest.raises(ValueError, match=r"^ids must be packed \[3\] or padded \[2, length\], not \[2\]$"):
        model(ids[:2], lengths)
    with pytest.raises(ValueError, match="has 1 rows, lengths has 2"):
        model(ids[None], lengths)
    with pytest.raises(ValueError, match="a length of 2 is beyond the row of 1"):
        model(ids[:2, None], lengths)
    with pytest.raises(ValueError, match=r"^lengths must not be negative: -1$"):
        model(ids, torch.tensor([4, -1]))
    with pytest.raises(TypeError, match=r"^lengths must be integers, not torch\.float32$"):
        model(ids, torch.tensor([2.0, 1.0]))
    with pytest.raises(ValueError, match=r"^a sequence of 6 is longer than max_length, 5$"):
        model(torch.full((6,), 4), torch.tensor([6]))
    with pytest.raises(TypeError, match=r"^ids must be int64, not torch\.float32$"):
        model(ids.float(), lengths)
    for wrong in (17, -1):
        with pytest.raises(IndexError, match=f"^ids must lie between 0 and 16, the last row of weight, not {wrong}$"):
            model(torch.tensor([4, 5, wrong]), lengths)
    with pytest.raises(IndexError, match=r"^target must lie between 0 and 16 or be -100, not 17$"):
        language_model_loss(model, LanguageBatch(ids, torch.tensor([4, 17, 4]), lengths))


@needs_kernels
@pytest.mark.parametrize("norm_first", [True, False])
def test_the_fused_kernels_compute_the_same(norm_first):
    """By the rule of fused_op.py."""
    model = random_model(17, norm_first=norm_first, d_model=16, heads=2, layers=1).to(DEVICE)
    batch = random_batch([3, 0, 5, 1]).to(DEVICE)

    def results(model):
        loss, gradients = loss_and_gradients(model, batch)
        return [loss, *gradients.values()]

    assert_model_as_accurate_as_reference(model, results)
