"""Language models and classifiers against torch.nn on padded batches, and what must hold of any such model.

Adapters, hooks and options on their parts are computed with, in losses, logits and loading.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.nn.utils.parametrize import register_parametrization

from fastformer.apps.classification.model import (
    ClassifierConfig,
    SequenceClassifier,
    TokenClassifier,
    token_classification_loss,
)
from fastformer.apps.language.model import LanguageConfig, LanguageModel, language_model_loss
from fastformer.apps.models.embeddings import Embedding, sinusoidal_positions
from fastformer.apps.text import LabelledBatch, LanguageBatch
from tests.support.closeness import assert_close
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


# Adapters, hooks and options on parts of models


V, D = 11, 8
SIZES: dict[str, Any] = {"d_model": D, "heads": 2, "feed_forward": 12, "dropout": 0.0}
BATCH = torch.tensor([2, 5, 6, 7, 8, 2, 9]), torch.tensor([5, 6, 7, 8, 3, 9, 3]), torch.tensor([5, 2])


class Adapter(nn.Module):
    """A low-rank addition to a module; it shows the weight and bias of the module, as adapter libraries do."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base, self.more = base, nn.Parameter(torch.randn_like(base.weight))

    @property
    def weight(self) -> Tensor:
        return self.base.weight  # type: ignore[no-any-return]

    @property
    def bias(self) -> Tensor | None:
        return getattr(self.base, "bias", None)

    def forward(self, x: Tensor) -> Tensor:
        more = F.embedding if isinstance(self.base, nn.Embedding) else F.linear
        return self.base(x) + more(x, self.more)  # type: ignore[no-any-return]


class Bare(Adapter):
    """An adapter without weight and bias."""

    weight = bias = property()  # type: ignore[assignment]


class Shift(nn.Module):
    """A parametrisation."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1.0


def language_model(**settings: Any) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(LanguageConfig(V, layers=2, **{"embeddings": "separate", **settings}, **SIZES)).double()


def token_classifier() -> TokenClassifier:
    torch.manual_seed(0)
    return TokenClassifier(ClassifierConfig(V, V, layers=1, **SIZES)).double()


def adapted(model: Any) -> None:
    model.output = Adapter(model.output)


def hooked(model: Any) -> None:
    model.output.register_forward_hook(lambda module, given, out: out * 1.5)


def pruned(model: Any) -> None:
    prune.l1_unstructured(model.output, "weight", 0.5)
    with torch.no_grad():
        model.output.weight_orig.mul_(2)  # an optimiser's step: the weight follows in the next call only


@pytest.mark.parametrize("change", [adapted, hooked, pruned])
@pytest.mark.parametrize("make", [language_model, token_classifier])
def test_the_loss_is_that_of_the_logits(make: Callable[[], Any], change: Callable[[Any], None]) -> None:
    model, (ids, targets, lengths) = make().eval(), BATCH
    change(model)
    if make is language_model:
        actual = language_model_loss(model, LanguageBatch(*BATCH), label_smoothing=0.1)
    else:
        actual = token_classification_loss(model, LabelledBatch(*BATCH), label_smoothing=0.1)
    logits = model.logits(model(ids, lengths))
    expected = F.cross_entropy(logits, targets, label_smoothing=0.1, reduction="sum")
    assert_close(actual, expected)
    parameters = list(model.output.parameters())
    for gradient, wanted in zip(*(torch.autograd.grad(x, parameters) for x in (actual, expected)), strict=True):
        assert_close(gradient, wanted)


OPTIONS: dict[str, dict[str, Any]] = {
    "padding_idx": {"padding_idx": 5},
    "max_norm": {"max_norm": 0.5},
    "scale_grad_by_freq": {"scale_grad_by_freq": True},
}


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
@pytest.mark.parametrize("change", [*OPTIONS, "adapter", "hook", "sparse"])
def test_a_changed_embedding_is_called(change: str, positions: Any) -> None:
    torch.manual_seed(0)
    embedding = Embedding(V, D, positions, 6, dropout=0.0)
    if change == "adapter":
        embedding.tokens = Adapter(embedding.tokens)  # type: ignore[assignment]
        if embedding.positions is not None:
            embedding.positions = Adapter(embedding.positions)  # type: ignore[assignment]
    elif change == "hook":
        embedding.tokens.register_forward_hook(lambda module, given, out: out * 1.5)
    else:
        embedding.tokens = nn.Embedding(V, D, **OPTIONS.get(change, {"sparse": True}))
    ids, places = torch.tensor([5, 5, 1, 5]), torch.tensor([0, 1, 2, 3])
    out = embedding(ids, places, 4)
    out.square().sum().backward()
    actual = [p.grad for p in embedding.parameters()]
    embedding.zero_grad()
    encoded = sinusoidal_positions(6, D)[places] if embedding.positions is None else embedding.positions(places)
    expected = embedding.tokens(ids) * math.sqrt(D) + encoded
    expected.square().sum().backward()
    assert_close(out, expected)
    for gradient, parameter in zip(actual, embedding.parameters(), strict=True):
        assert gradient is not None
        assert parameter.grad is not None
        assert gradient.layout == parameter.grad.layout
        assert_close(gradient.to_dense(), parameter.grad.to_dense())


CHANGES: dict[str, Callable[[Any, str], Any]] = {
    "adapter": lambda parent, name: setattr(parent, name, Adapter(getattr(parent, name))),
    "bare adapter": lambda parent, name: setattr(parent, name, Bare(getattr(parent, name))),
    "parametrised": lambda parent, name: register_parametrization(getattr(parent, name), "weight", Shift()),
    "pruned": lambda parent, name: prune.l1_unstructured(getattr(parent, name), "weight", 0.5),
}


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("place", ["output", "embedding.tokens"])
@pytest.mark.parametrize("change", CHANGES)
def test_changed_parts_that_are_tied_load_what_they_saved(change: str, place: str, assign: bool) -> None:
    models = []
    for _ in range(2):
        model = language_model(embeddings="tied").eval()
        parent, _, name = place.rpartition(".")
        CHANGES[change](model.get_submodule(parent), name)
        models.append(model)
    saved, loaded = models
    with torch.no_grad():
        for parameter in saved.parameters():
            parameter.add_(0.25)
    ids, _, lengths = BATCH
    expected = saved.logits(saved(ids, lengths))
    loaded.load_state_dict({name: x.clone() for name, x in saved.state_dict().items()}, assign=assign)
    for _ in range(2):  # a pruned weight is made anew by each call
        assert_close(loaded.logits(loaded(ids, lengths)), expected)
