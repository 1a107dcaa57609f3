"""Language models and classifiers against torch.nn on padded batches, and what must hold of any such model."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastformer.apps.classification.model import SequenceClassifier, TokenClassifier
from fastformer.apps.language.model import LanguageModel, language_model_loss
from fastformer.apps.text import LabelledBatch, LanguageBatch
from tests.support.fused_op import DEVICE, assert_model_as_accurate_as_reference, needs_kernels
from tests.support.single_stack import (
    CLASSES,
    LOSSES,
    TorchTwin,
    loss_and_gradients,
    padded_like,
    parts,
    random_batch,
    random_model,
)

RAGGED = [1, 6, 4, 9, 2]
LONG = [3, 70, 1, 66]  # beyond the lengths at which attention works on short sequences
KINDS = list(LOSSES)
POOLINGS = ("mean", "first", "max")
VARIANTS: dict[str, dict[str, Any]] = {
    "pre-norm": {},
    "post-norm": {"norm_first": False},
    "no final norm": {"final_norm": False},
    "post-norm, no final norm": {"norm_first": False, "final_norm": False},
    "learned": {"positions": "learned", "max_positions": 12},
    "no biases": {"bias": False},
    "gelu, eps, unscaled": {"activation": "gelu", "norm_eps": 1e-2, "scale_embeddings": False},
    "long": {"layers": 1},
    "three layers, one head": {"layers": 3, "heads": 1},
}
CASES = [
    *((kind, changes) for kind in KINDS for changes in VARIANTS.values()),
    *((LanguageModel, changes) for changes in ({"embeddings": "separate"}, {"output_bias": True})),
    *((SequenceClassifier, {"pooling": pooling}) for pooling in POOLINGS),
]


def hidden_states(model: Any, batch: Any) -> Tensor:
    return model(parts(batch)[0], batch.lengths)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize(("kind", "changes"), CASES, ids=lambda x: getattr(x, "__name__", str(x)))
def test_model_is_torchs_encoder_with_masks(kind, changes, dtype):
    """Packed and padded input give torch's loss on a padded batch, and torch's gradient of every parameter, not 0."""
    model = random_model(kind, 1, **changes).to(dtype)
    twin = TorchTwin(model.config, kind).copy(model).to(dtype)
    packed = random_batch(kind, LONG if changes == VARIANTS["long"] else RAGGED)
    padded = padded_like(packed)
    tolerance = {torch.float64: 1e-10, torch.float32: 2e-5}[dtype]

    expected = twin.loss(padded, label_smoothing=0.1)
    names, parameters = zip(*twin.named_parameters(), strict=True)
    wanted = dict(zip(names, torch.autograd.grad(expected, parameters), strict=True))
    for batch in (packed, padded, padded_like(packed, extra=3, fill=4)):
        loss, gradients = loss_and_gradients(model, batch, label_smoothing=0.1)
        torch.testing.assert_close(loss, expected, atol=tolerance, rtol=tolerance)
        assert {TorchTwin.name(name) for name in gradients} == set(wanted)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, wanted[TorchTwin.name(name)], atol=10 * tolerance, rtol=tolerance)
            assert gradient.abs().sum() > 0, name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [[0, *RAGGED], LONG], ids=["short", "long"])
def test_a_batch_is_its_sequences_one_by_one(kind, lengths):
    """Hidden states are bitwise the same whatever padding holds; each sequence alone gives them, and loss, too."""
    model = random_model(kind, 3)
    batch = random_batch(kind, lengths)
    hidden = hidden_states(model, batch)
    for fill in (0, 16):
        assert torch.equal(hidden_states(model, padded_like(batch, extra=5, fill=fill)), hidden)
    model = model.double()
    ids, targets = parts(batch)
    per_token = len(targets) == len(ids)
    alone = [
        type(batch)(*three)
        for three in zip(
            ids.split(lengths), targets.split(lengths) if per_token else targets.split(1), batch.lengths.split(1),
            strict=True,
        )
    ]  # fmt: skip
    each = torch.cat([hidden_states(model, one) for one in alone])
    torch.testing.assert_close(hidden_states(model, batch), each, atol=1e-12, rtol=0)
    loss, gradients = loss_and_gradients(model, batch)
    results = [loss_and_gradients(model, one) for one in alone]
    torch.testing.assert_close(loss, torch.stack([one for one, _ in results]).sum(), atol=1e-10, rtol=0)
    for name, gradient in gradients.items():
        expected = torch.stack([one[name] for _, one in results]).sum(0)
        torch.testing.assert_close(gradient, expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("lengths", [RAGGED, LONG], ids=["short", "long"])
def test_gradients_stay_within_the_document_and_its_past(lengths):
    """The loss of one position reaches the embeddings of its own document up to itself, and those alone."""
    model = random_model(LanguageModel, 5).double()
    batch = random_batch(LanguageModel, lengths)
    embedded: list[torch.Tensor] = []
    model.embedding.register_forward_hook(lambda module, args, output: embedded.append(output))
    losses = F.cross_entropy(model.logits(hidden_states(model, batch)), batch.ids_out, reduction="none")
    ends = batch.lengths.cumsum(0).tolist()
    for start, end in zip([0, *ends], ends, strict=False):
        for position in {start, (start + end) // 2, end - 1}:
            (gradient,) = torch.autograd.grad(losses[position], embedded[0], retain_graph=True)
            reached = gradient.abs().amax(1) > 0
            assert reached.nonzero().flatten().tolist() == list(range(start, position + 1))


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]], ids=str)
@pytest.mark.parametrize("padded", [False, True])
def test_a_batch_of_no_tokens_has_loss_and_gradients_zero(lengths, padded):
    model = random_model(LanguageModel, 9, output_bias=True)
    ids = torch.full((len(lengths), 3) if padded else (0,), 1)
    batch = LanguageBatch(ids, ids, torch.tensor(lengths, dtype=torch.int64))
    assert model(ids, batch.lengths).shape == (0, 12)
    loss, gradients = loss_and_gradients(model, batch, label_smoothing=0.1)
    assert loss.item() == 0
    assert all((gradient == 0).all() for gradient in gradients.values())


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("lengths", [[0], [0, 0], [0, 3, 0], []], ids=str)
def test_an_empty_sequence_has_the_bias_as_its_logits_and_no_nan_anywhere(pooling, lengths):
    model = random_model(SequenceClassifier, 3, pooling=pooling)
    batch = random_batch(SequenceClassifier, lengths)
    logits = model.logits(model(batch.ids, batch.lengths))
    assert logits.shape == (len(lengths), CLASSES)
    empty = batch.lengths == 0
    assert torch.equal(logits[empty], model.output.bias.expand(int(empty.sum()), -1))
    assert (logits[~empty] != model.output.bias).any() or empty.all()
    loss, gradients = loss_and_gradients(model, batch, 0.1)
    assert loss.isfinite()
    assert all(gradient.isfinite().all() for gradient in gradients.values())


def test_pooling_max_ignores_the_zeros_of_padding():
    model = random_model(SequenceClassifier, 5, pooling="max", final_norm=True)
    with torch.no_grad():
        model.encoder.norm.bias.fill_(-100.0)
    pooled = model(torch.tensor([3, 4, 5, 6]), torch.tensor([1, 3]))
    assert (pooled < -50).all()


@pytest.mark.parametrize("kind", [TokenClassifier, SequenceClassifier])
def test_dropout_is_also_before_the_output_layer_and_in_training_only(kind):
    batch, model = random_batch(kind, RAGGED), random_model(kind, 9, dropout=0.5)
    assert torch.equal(hidden_states(model, batch), hidden_states(model, batch))
    assert 0.2 < hidden_states(model.train(), batch).eq(0).float().mean() < 0.8


def test_inputs_that_do_not_fit_are_refused():
    model = random_model(LanguageModel, positions="learned", max_positions=5)
    ids, lengths = torch.tensor([4, 5, 6]), torch.tensor([2, 1])
    for wrong, counts, error, message in (
        (ids[:2], lengths, ValueError, r"^ids must be packed \[3\] or padded \[2, length\], not \[2\]$"),
        (ids[None], lengths, ValueError, "has 1 rows, lengths has 2"),
        (ids[:2, None], lengths, ValueError, "a length of 2 is beyond the row of 1"),
        (ids, torch.tensor([4, -1]), ValueError, r"^lengths must not be negative: -1$"),
        (ids, torch.tensor([2.0, 1.0]), TypeError, r"^lengths must be integers, not torch\.float32$"),
        (torch.full((6,), 4), torch.tensor([6]), ValueError, r"^a sequence of 6 is longer than max_length, 5$"),
        (ids.float(), lengths, TypeError, r"^ids must be int64, not torch\.float32$"),
        (torch.tensor([4, 5, -1]), lengths, IndexError, "^ids must lie between 0 and 16, the last row of weight, not"),
    ):
        with pytest.raises(error, match=message):
            model(wrong, counts)
    with pytest.raises(IndexError, match=r"^target must lie between 0 and 16 or be -100, not 17$"):
        language_model_loss(model, LanguageBatch(ids, torch.tensor([4, 17, 4]), lengths))
    tokens, sequences = random_model(TokenClassifier), random_model(SequenceClassifier)
    for each, labels, error, message in (
        (tokens, ids[:2], ValueError, r"target must be of shape \[3\], not \[2\]"),
        (tokens, torch.tensor([0, 5, 0]), IndexError, "must lie between 0 and 4 or be -100, not 5"),
        (sequences, ids[None], ValueError, r"labels must be \[2\], one a sequence, not \[1, 3\]"),
    ):
        with pytest.raises(error, match=message):
            LOSSES[type(each)](each, LabelledBatch(ids, labels, lengths))


@needs_kernels
@pytest.mark.parametrize(
    ("kind", "norm_first"),
    [(LanguageModel, True), (LanguageModel, False), (TokenClassifier, True), (SequenceClassifier, True)],
)
def test_the_fused_kernels_compute_the_same(kind, norm_first):
    """By the rule of fused_op.py."""
    model = random_model(kind, 17, norm_first=norm_first, d_model=16, heads=2, layers=1).to(DEVICE)
    batch = random_batch(kind, [3, 0, 5, 1]).to(DEVICE)

    def results(model):
        loss, gradients = loss_and_gradients(model, batch)
        return [loss, *gradients.values()]

    assert_model_as_accurate_as_reference(model, results)
