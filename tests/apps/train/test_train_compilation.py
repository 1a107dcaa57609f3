"""Training with a compiled model and with recomputed activations: the runs of neither, and less memory."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.utils import clear_compilation_metrics, get_compilation_metrics

from fastformer.apps.language.model import LanguageModel, language_model_loss
from fastformer.apps.train import TrainConfig, Trainer, read_metrics
from fastformer.apps.train.compilation import check_compiler
from fastformer.apps.translation.model import TranslationModel, translation_loss
from fastformer.apps.translation.run import DataConfig, TranslationRun
from fastformer.nn.stacks import TransformerDecoder, TransformerEncoder
from tests.support import language_task, train_task, translation_task

STEPS = {"steps": 6, "lr": 0.01, "warmup_steps": 2, "log_every": 1, "validate_every": 3, "batch_tokens": 64}
LENGTHS = [[7, 5], [4, 9, 3], [6, 2, 8, 2], [11, 5], [3, 4, 5], [10, 12], [9]]


class Batches:
    """Batches of other sizes at each step."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def batches_in(self, epoch: int) -> int:
        return len(LENGTHS)

    def epoch(self, epoch: int, start: int = 0):
        for seed, lengths in enumerate(LENGTHS[start:], start):
            if self.kind == "language":
                yield language_task.random_batch(lengths, seed)
            else:
                yield translation_task.random_batch([(n, n + 1) for n in lengths], seed)


def trainer(kind: str, folder: Path, dropout: float = 0.0, double: bool = False, layers: int = 2, **changes) -> Trainer:
    torch.manual_seed(0)
    if kind == "language":
        model, loss = LanguageModel(language_task.config(dropout=dropout, layers=layers)), language_model_loss
    else:
        model, loss = TranslationModel(translation_task.config(dropout=dropout)), translation_loss

    def validate(model):
        batches = list(Batches(kind).epoch(0))
        return {"loss": float(sum(loss(model, b) for b in batches)) / sum(b.tokens for b in batches)}

    settings = TrainConfig(**{**STEPS, **changes})
    model = model.double() if double else model
    return Trainer(model, loss, Batches(kind), settings, folder, validate=validate, show=False)


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(folder)]


def weights(made: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in made.model.state_dict().items()}


@pytest.fixture(autouse=True)
def _anew():
    torch._dynamo.reset()
    clear_compilation_metrics()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["language", "translation"])
def test_recomputed_activations_give_the_same_bits(kind, precision, tmp_path):
    """With dropout: what is computed again draws the same numbers again."""
    runs = {}
    for again in (False, True):
        made = trainer(kind, tmp_path / str(again), 0.3, checkpoint_activations=again, precision=precision)
        made.fit()
        runs[again] = weights(made), losses(tmp_path / str(again))
    assert runs[True][1] == runs[False][1]
    for name, tensor in runs[False][0].items():
        assert torch.equal(runs[True][0][name], tensor), name


def kept_for_backward(model: nn.Module, loss, batch) -> int:
    """Numbers in the storages that autograd keeps, parameters left out."""
    known, kept = {p.data_ptr() for p in model.parameters()}, {}

    def pack(x):
        if x.data_ptr() not in known:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes() // 4, x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        total = loss(model, batch)
    total.backward()
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("kind", ["language", "translation"])
def test_each_layer_keeps_its_input_and_no_more(kind, tmp_path):
    counts = {}
    for again in (False, True):
        for layers in (2, 6):
            if kind == "language":
                model = LanguageModel(language_task.config(layers=layers, dropout=0.1))
                batch, loss = language_task.random_batch([40, 24]), language_model_loss
            else:
                changes = {"encoder_layers": layers, "decoder_layers": 2, "dropout": 0.1}
                model = TranslationModel(translation_task.config(**changes))
                batch, loss = translation_task.random_batch([(40, 24), (24, 9)]), translation_loss
            for stack in model.modules():
                if isinstance(stack, TransformerEncoder | TransformerDecoder):
                    stack.checkpoint_activations = again
            counts[again, layers] = kept_for_backward(model, loss, batch)
    tokens = 64 if kind == "language" else 64 + 2  # 2 of eos
    assert counts[True, 6] - counts[True, 2] == 4 * tokens * 12
    assert counts[False, 6] - counts[False, 2] > 8 * (counts[True, 6] - counts[True, 2])


@pytest.mark.parametrize(
    ("kind", "backend", "again"),
    [
        pytest.param("language", "eager", False, marks=pytest.mark.long),
        ("translation", "eager", True),
        pytest.param("language", "aot_eager", True, marks=pytest.mark.long),
    ],
)
@pytest.mark.slow
def test_a_compiled_run_is_the_run(kind, backend, again, tmp_path):
    """Without dropout, since a compiler may draw other numbers; one compilation for batches of all sizes."""
    plain, compiled = (
        trainer(kind, tmp_path / str(backend), double=True, optimizer="sgd", compile=backend, checkpoint_activations=on)
        for backend, on in ((None, False), (backend, again))
    )
    plain.fit()
    compiled.fit()
    recorded = [metric for metric in get_compilation_metrics() if metric.is_forward]
    assert len(recorded) == 1, [metric.recompile_reason for metric in recorded]
    # The same operators in another order: in fp64, 6 steps with sums of some thousand numbers of about 1.
    for name, tensor in weights(plain).items():
        torch.testing.assert_close(weights(compiled)[name], tensor, rtol=0, atol=6e3 * torch.finfo(tensor.dtype).eps)
    assert losses(tmp_path / backend) == pytest.approx(losses(tmp_path / "None"), abs=1e-11)


@pytest.mark.parametrize(("after", "dropout"), [("eager", 0.3), (None, 0.0)])
@pytest.mark.slow
def test_a_compiled_run_resumes_with_and_without_the_compiler(after, dropout, tmp_path):
    """With the bits of a whole run where both are compiled; without, dropout would draw other numbers."""
    changes = {"dropout": dropout, "double": True, "optimizer": "sgd"}
    whole = trainer("language", tmp_path / "whole", compile=after, **changes)
    whole.fit()
    trainer("language", tmp_path / "parts", compile="eager", steps=3, **changes).fit()
    rest = trainer("language", tmp_path / "parts", compile=after, **changes)
    rest.resume()
    rest.fit()
    expected = losses(tmp_path / "whole")
    assert losses(tmp_path / "parts") == (pytest.approx(expected, abs=1e-11) if after is None else expected)


@pytest.mark.long
def test_inductor_trains(tmp_path):
    """The compiler itself, on C++."""
    try:
        check_compiler("inductor", "cpu")
    except ValueError as error:
        pytest.skip(str(error))
    small = {"layers": 1, "steps": 3, "validate_every": None}
    trainer("language", tmp_path / "plain", **small).fit()
    trainer("language", tmp_path / "compiled", compile="inductor", **small).fit()
    for a, b in zip(losses(tmp_path / "compiled"), losses(tmp_path / "plain"), strict=True):
        assert a == pytest.approx(b, abs=1e-4)


def test_what_does_not_go_together_is_refused_by_name(tmp_path, monkeypatch):
    for settings, message in (
        ({"compile": "eager"}, "cuda_graphs=True does not go together with compile='eager'"),
        ({"checkpoint_activations": True}, "cuda_graphs=True does not go together with checkpoint_activations=True"),
    ):
        with pytest.raises(ValueError, match=message):
            TrainConfig(steps=1, cuda_graphs=True, **settings)
    with pytest.raises(ValueError, match="compile must be one of inductor, aot_eager, eager, not 'gcc'"):
        TrainConfig(steps=1, compile="gcc")
    with pytest.raises(
        ValueError, match=r"checkpoint_activations=True is for models with fastformer's.*Sequential has"
    ):
        train_task.trainer(tmp_path, train_task.config(checkpoint_activations=True))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ValueError, match=r"compile='inductor' needs a C.. compiler on a CPU, and 'no-such-compiler'"):
        trainer("language", tmp_path, compile="inductor")
    missing = DataConfig(train_source=tmp_path / "none", train_target=tmp_path / "none")
    with pytest.raises(ValueError, match=r"'no-such-compiler' is not found"):  # before any data is looked for
        TranslationRun.create(tmp_path / "run", missing, {}, TrainConfig(steps=1, compile="inductor"))
    check_compiler("aot_eager", "cpu")
    check_compiler("inductor", "cuda")
    assert not list(tmp_path.iterdir())
