"""Classifiers of tokens and of sequences, against torch.nn on padded batches, and what must hold of any such model."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastformer
from fastformer.apps.classification.model import (
    ClassifierConfig,
    SequenceClassifier,
    TokenClassifier,
    sequence_classification_loss,
    token_classification_loss,
)
from fastformer.apps.text import LabelledBatch, LabelledBatches, Sequences
from fastformer.packing import Layout, pack
from tests.support.fused_op import DEVICE, assert_model_as_accurate_as_reference, needs_kernels
from tests.support.translation_task import paper_positions

RAGGED = [1, 6, 4, 0, 9, 2]
CLASSES = 5
POOLINGS = ("mean", "first", "max")
LOSSES = {TokenClassifier: token_classification_loss, SequenceClassifier: sequence_classification_loss}
MODELS = list(LOSSES)

VARIANTS: dict[str, dict[str, Any]] = {
    "pre-norm": {},
    "post-norm": {"norm_first": False},
    "no final norm": {"final_norm": False},
    "learned": {"positions": "learned", "max_positions": 12},
    "no biases": {"bias": False},
    "gelu, eps, unscaled": {"activation": "gelu", "norm_eps": 1e-2, "scale_embeddings": False},
}


def config(**changes: Any) -> ClassifierConfig:
    given = {"vocabulary": 17, "classes": CLASSES, "d_model": 12, "heads": 3, "layers": 2, "feed_forward": 20}
    return ClassifierConfig(**{**given, "dropout": 0.0, **changes})


def random_model(kind: type, seed: int = 0, **changes: Any) -> Any:
    """A model whose norms and biases are random too, so that swapped ones show."""
    torch.manual_seed(seed)
    model = kind(config(**changes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def random_batch(kind: type, lengths: list[int], seed: int = 0) -> LabelledBatch:
    """Random ids and labels; about every third label is ignored."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    ids = torch.randint(0, 17, (total,), generator=generator)
    labels = torch.randint(0, CLASSES, (total if kind is TokenClassifier else len(lengths),), generator=generator)
    labels[1::3] = -100
    return LabelledBatch(ids, labels, torch.tensor(lengths, dtype=torch.int64))


def padded_like(batch: LabelledBatch, extra: int = 0, fill: int = 0) -> LabelledBatch:
    """The batch with padding, `extra` columns more than needed; padding's ids and labels are `fill`."""

    def wide(values: Tensor) -> Tensor:
        rows = torch.split(values, batch.lengths.tolist())
        return F.pad(nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill), (0, extra), value=fill)

    per_token = len(batch.labels) == len(batch.ids)
    return LabelledBatch(wide(batch.ids), wide(batch.labels) if per_token else batch.labels, batch.lengths)


class TorchTwin(nn.Module):
    """The same model written with torch.nn.TransformerEncoder on padded batches and a padding mask."""

    def __init__(self, c: ClassifierConfig, kind: type) -> None:
        super().__init__()
        self.c, self.kind = c, kind
        self.tokens = nn.Embedding(c.vocabulary, c.d_model)
        self.positions = nn.Embedding(c.max_positions, c.d_model) if c.positions == "learned" else None
        layer = nn.TransformerEncoderLayer(
            c.d_model, c.heads, c.feed_forward, c.dropout, c.activation, c.norm_eps, True, c.norm_first, c.bias
        )
        norm = nn.LayerNorm(c.d_model, c.norm_eps, bias=c.bias) if c.final_norm else None
        self.encoder = nn.TransformerEncoder(layer, c.layers, norm, enable_nested_tensor=False)
        self.output = nn.Linear(c.d_model, c.classes)

    @staticmethod
    def name(ours: str) -> str:
        """The name here of a parameter of ours."""
        return ours.removeprefix("embedding.")

    def copy(self, model: nn.Module) -> "TorchTwin":
        """Take the parameters of `model`, every one of them; in training mode, where torch has no fast path."""
        self.load_state_dict({self.name(name): value for name, value in model.state_dict().items()})
        return self.train()

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Logits `[B, L, C]` or `[B, C]` of padded ids; no sequence is empty, which torch would make NaN of."""
        length = ids.shape[1]
        x = self.tokens(ids) * (self.c.d_model**0.5 if self.c.scale_embeddings else 1.0)
        table = paper_positions(length, self.c.d_model).to(torch.float32).to(x.dtype)
        x = x + (table if self.positions is None else self.positions.weight[:length])
        padding = torch.arange(length) >= lengths[:, None]
        hidden = self.encoder(x, src_key_padding_mask=padding)
        if self.kind is TokenClassifier:
            return self.output(hidden)
        rows = [row[:n] for row, n in zip(hidden, lengths.tolist(), strict=True)]
        pool = {"mean": lambda r: r.mean(0), "first": lambda r: r[0], "max": lambda r: r.amax(0)}[self.c.pooling]
        return self.output(torch.stack([pool(row) for row in rows]))

    def loss(self, batch: LabelledBatch, label_smoothing: float = 0.0) -> Tensor:
        logits, labels = self(batch.ids, batch.lengths), batch.labels
        if self.kind is TokenClassifier:
            labels = labels.masked_fill(torch.arange(labels.shape[1]) >= batch.lengths[:, None], -100)
        return F.cross_entropy(
            logits.flatten(0, -2), labels.flatten(), label_smoothing=label_smoothing, reduction="sum"
        )


def loss_and_gradients(model: Any, batch: LabelledBatch, smoothing: float = 0.0) -> tuple[Tensor, dict[str, Tensor]]:
    loss = LOSSES[type(model)](model, batch, smoothing)
    names, parameters = zip(*model.named_parameters(), strict=True)
    return loss, dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


CASES = [
    *((kind, name) for kind in MODELS for name in VARIANTS),
    *((SequenceClassifier, f"pooling {pooling}") for pooling in POOLINGS),
]


@pytest.mark.parametrize(("kind", "variant"), CASES, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_model_is_torchs_encoder_with_a_padding_mask(kind, variant):
    """Packed and padded input give torch's logits, loss and gradient of every parameter on a padded batch."""
    changes = VARIANTS.get(variant) or ({"pooling": variant.split()[1]} if "pooling" in variant else {})
    model = random_model(kind, 1, **changes).double()
    twin = TorchTwin(model.config, kind).copy(model).double()
    packed = random_batch(kind, [n for n in RAGGED if n])
    padded = padded_like(packed)
    expected = twin(padded.ids, padded.lengths)
    if kind is TokenClassifier:
        expected = pack(expected, Layout.from_lengths(packed.lengths))
    loss = twin.loss(padded, 0.1)
    names, parameters = zip(*twin.named_parameters(), strict=True)
    wanted = dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))
    for batch in (packed, padded, padded_like(packed, extra=3, fill=4)):
        logits = model.logits(model(batch.ids, batch.lengths))
        torch.testing.assert_close(logits, expected, atol=1e-10, rtol=1e-10)
        ours, gradients = loss_and_gradients(model, batch, 0.1)
        torch.testing.assert_close(ours, loss, atol=1e-10, rtol=1e-10)
        assert {TorchTwin.name(name) for name in gradients} == set(wanted)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, wanted[TorchTwin.name(name)], atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("pooling", POOLINGS)
def test_padding_and_neighbours_change_nothing(kind, pooling):
    """Bit for bit whatever the padding holds; as alone to the last rounding."""
    model = random_model(kind, 2, pooling=pooling)
    batch = random_batch(kind, RAGGED)
    hidden = model(batch.ids, batch.lengths)
    for fill in (0, 16):
        padded = padded_like(batch, extra=5, fill=fill)
        assert torch.equal(model(padded.ids, padded.lengths), hidden)
    model = model.double()
    alone = [model(ids, torch.tensor([len(ids)])) for ids in torch.split(batch.ids, RAGGED)]
    torch.testing.assert_close(model(batch.ids, batch.lengths), torch.cat(alone), atol=1e-12, rtol=0)


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


def test_pooling_max_of_negative_values_is_not_that_of_padding():
    """Padding's zeros would win over values that are all negative."""
    model = random_model(SequenceClassifier, 5, pooling="max", final_norm=True)
    with torch.no_grad():
        model.encoder.norm.bias.fill_(-100.0)
    pooled = model(torch.tensor([3, 4, 5, 6]), torch.tensor([1, 3]))
    assert (pooled < -50).all()


def test_pooling_mean_holds_what_fp16_could_not_sum():
    model = random_model(SequenceClassifier, 6, positions="learned", max_positions=700).half()
    with torch.no_grad():
        model.encoder.norm.bias.fill_(200.0)
    ids = torch.randint(0, 17, (700,))
    with fastformer.backend("reference"):
        pooled = model(ids, torch.tensor([700]))
    assert pooled.dtype == torch.float16
    torch.testing.assert_close(pooled, torch.full_like(pooled, 200.0), atol=5.0, rtol=0)


@pytest.mark.parametrize("kind", MODELS)
def test_dropout_stands_before_the_output_layer_too_and_is_active_in_training_only(kind):
    batch = random_batch(kind, RAGGED)
    model = random_model(kind, 9, dropout=0.5)
    rates = [m.p if isinstance(m, nn.Dropout) else getattr(m, "dropout", None) for m in model.modules()]
    assert {rate for rate in rates if isinstance(rate, float)} == {0.5}
    assert torch.equal(model(batch.ids, batch.lengths), model(batch.ids, batch.lengths))
    hidden = model.train()(batch.ids, batch.lengths)
    assert 0.2 < (hidden[batch.lengths > 0] if len(hidden) == len(RAGGED) else hidden).eq(0).float().mean() < 0.8
    every = random_batch(kind, [12, 12, 12])
    _, gradients = loss_and_gradients(random_model(kind, 13).train(), every)
    assert all(gradient.abs().sum() > 0 for gradient in gradients.values())


def test_inputs_that_do_not_fit_are_refused():
    model = random_model(TokenClassifier, 11, positions="learned", max_positions=4)
    ids, lengths = torch.zeros(4, dtype=torch.int64), torch.tensor([1, 3])
    with pytest.raises(ValueError, match=r"ids must be packed \[4\] or padded \[2, length\], not \[3\]"):
        model(ids[:3], lengths)
    with pytest.raises(ValueError, match="a sequence of 5 is longer than max_length, 4"):
        model(torch.zeros(5, dtype=torch.int64), torch.tensor([5]))
    with pytest.raises(ValueError, match=r"target must be of shape \[4\], not \[2\]"):
        token_classification_loss(model, LabelledBatch(ids, ids[:2], lengths))
    with pytest.raises(IndexError, match="must lie between 0 and 4 or be -100, not 5"):
        token_classification_loss(model, LabelledBatch(ids, torch.tensor([0, 5, 0, 0]), lengths))
    model = random_model(SequenceClassifier, 12)
    with pytest.raises(ValueError, match=r"labels must be \[2\], one a sequence, not \[2, 2\]"):
        sequence_classification_loss(model, LabelledBatch(ids, ids.view(2, 2), lengths))


@needs_kernels
@pytest.mark.parametrize("kind", MODELS)
def test_the_fused_kernels_compute_the_same(kind):
    """By the rule of fused_op.py."""
    model = random_model(kind, 14, d_model=16, heads=2, layers=1).to(DEVICE)
    batch = random_batch(kind, [3, 0, 5, 1]).to(DEVICE)

    def results(model):
        loss, gradients = loss_and_gradients(model, batch)
        return [loss, *gradients.values()]

    assert_model_as_accurate_as_reference(model, results)


def numbered(lengths: list[int]) -> tuple[Sequences, Sequences]:
    """Sequences whose ids tell where they come from, and labels that are the ids plus 100."""
    ids = [[10 * i + j for j in range(n)] for i, n in enumerate(lengths)]
    return Sequences.from_lists(ids), Sequences.from_lists([[i + 100 for i in row] for row in ids])


def test_batches_keep_labels_with_their_tokens_and_every_sequence_comes_once():
    sequences, labels = numbered([3, 1, 0, 2, 4])
    batches = LabelledBatches(sequences, labels, size=2, seed=3)
    epoch = list(batches.epoch(0))
    assert [len(batch) for batch in epoch] == [2, 2, 1] == [2] * (batches.batches_in(0) - 1) + [1]
    assert all(torch.equal(batch.labels, batch.ids + 100) for batch in epoch)
    assert sorted(torch.cat([batch.ids for batch in epoch]).tolist()) == sorted(sequences.ids.tolist())
    assert sum(batch.tokens for batch in epoch) == 10
    again = [batch.ids.tolist() for batch in LabelledBatches(sequences, labels, size=2, seed=3).epoch(0, start=1)]
    assert again == [batch.ids.tolist() for batch in epoch[1:]]
    assert [b.ids.tolist() for b in batches.epoch(1)] != [b.ids.tolist() for b in epoch]
    ordered = LabelledBatches(sequences, np.arange(5), size=3, shuffle=False)
    assert [batch.labels.tolist() for batch in ordered.epoch(0)] == [[0, 1, 2], [3, 4]]
    assert next(ordered.epoch(0)).lengths.tolist() == [3, 1, 0]
