"""Training with a compiled model and with recomputed activations: the runs of neither, and less memory."""

from pathlib import Path

import pytest
import torch

from fastformer.apps.language.model import LanguageModel, language_model_loss
from fastformer.apps.train import TrainConfig, Trainer, read_metrics
from fastformer.apps.train.config import check_machine
from fastformer.apps.translation.model import TranslationModel, translation_loss
from fastformer.apps.translation.run import DataConfig, TranslationRun
from tests.support import language_task, train_task, translation_task

pytestmark = pytest.mark.usefixtures("compilations")
STEPS = {"steps": 6, "lr": 0.01, "warmup_steps": 2, "log_every": 1, "validate_every": 3, "batch_tokens": 64}
LENGTHS = [[7, 5], [4, 9, 3], [6, 2, 8, 2], [11, 5], [3, 4, 5], [10, 12], [9]]
KINDS = {
    "language": (LanguageModel, language_task, language_model_loss, language_task.random_batch),
    "translation": (
        TranslationModel,
        translation_task,
        translation_loss,
        lambda lengths, seed=0: translation_task.random_batch([(n, n + 1) for n in lengths], seed),
    ),
}


class Batches:
    """Batches of other sizes at each step."""

    def __init__(self, kind: str) -> None:
        self.batch = KINDS[kind][3]

    def batches_in(self, epoch: int) -> int:
        return len(LENGTHS)

    def epoch(self, epoch: int, start: int = 0):
        return (self.batch(LENGTHS[i], i) for i in range(start, len(LENGTHS)))


def trainer(kind: str, folder: Path, dropout: float = 0.0, double: bool = False, **changes) -> Trainer:
    network, task, loss, _ = KINDS[kind]
    torch.manual_seed(0)
    model = network(task.config(dropout=dropout))
    settings = TrainConfig(**{**STEPS, **changes})
    return Trainer(model.double() if double else model, loss, Batches(kind), settings, folder, show=False)


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(folder)]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_recomputed_activations_give_the_same_bits(kind, precision, tmp_path):
    """With dropout: what is computed again draws the same numbers again."""
    runs = {}
    for again in (False, True):
        runs[again] = trainer(kind, tmp_path / str(again), 0.3, checkpoint_activations=again, precision=precision)
        runs[again].fit()
    assert losses(tmp_path / "True") == losses(tmp_path / "False")
    for name, tensor in runs[False].model.state_dict().items():
        assert torch.equal(runs[True].model.state_dict()[name], tensor), name


@pytest.mark.parametrize(
    ("kind", "backend", "again"),
    [("translation", "eager", True), pytest.param("language", "aot_eager", False, marks=pytest.mark.long)],
)
@pytest.mark.slow
def test_a_compiled_run_is_the_run(kind, backend, again, tmp_path, compilations):
    """Without dropout, since a compiler may draw other numbers; one compilation for batches of all sizes."""
    plain = trainer(kind, tmp_path / "plain", double=True, optimizer="sgd")
    changes = {"compile": backend, "checkpoint_activations": again}
    compiled = trainer(kind, tmp_path / backend, double=True, optimizer="sgd", **changes)
    plain.fit()
    compiled.fit()
    assert len(compilations()) == 1, compilations()
    # The same operators in another order: in fp64, 6 steps with sums of some thousand numbers of about 1.
    for name, tensor in plain.model.state_dict().items():
        error = 6e3 * torch.finfo(tensor.dtype).eps
        torch.testing.assert_close(compiled.model.state_dict()[name], tensor, rtol=0, atol=error)
    assert losses(tmp_path / backend) == pytest.approx(losses(tmp_path / "plain"), abs=1e-11)


@pytest.mark.slow
def test_a_compiled_run_resumes_without_the_compiler(tmp_path):
    """Without dropout, for which the compiler draws other numbers."""
    changes = {"double": True, "optimizer": "sgd"}
    trainer("language", tmp_path / "whole", **changes).fit()
    trainer("language", tmp_path / "parts", compile="eager", steps=3, **changes).fit()
    rest = trainer("language", tmp_path / "parts", **changes)
    rest.resume()
    rest.fit()
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), abs=1e-11)


def test_what_does_not_go_together_is_refused_by_name(tmp_path, monkeypatch):
    graphs = "cuda_graphs=True does not go together with"
    for settings, message in (
        ({"cuda_graphs": True, "compile": "eager"}, f"{graphs} compile='eager'"),
        ({"cuda_graphs": True, "checkpoint_activations": True}, f"{graphs} checkpoint_activations=True"),
        ({"compile": "gcc"}, "compile must be one of inductor, aot_eager, eager, not 'gcc'"),
    ):
        with pytest.raises(ValueError, match=message):
            TrainConfig(steps=1, **settings)
    with pytest.raises(ValueError, match=r"checkpoint_activations=True is for models with .*Sequential has"):
        train_task.trainer(tmp_path, train_task.config(checkpoint_activations=True))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ValueError, match=r"compile='inductor' needs a C.. compiler on a CPU, and 'no-such-compiler'"):
        trainer("language", tmp_path, compile="inductor")
    missing = DataConfig(train_source=tmp_path / "none", train_target=tmp_path / "none")
    with pytest.raises(ValueError, match=r"'no-such-compiler' is not found"):  # before any data is looked for
        TranslationRun.create(tmp_path / "run", missing, {}, TrainConfig(steps=1, compile="inductor"))
    check_machine(TrainConfig(steps=1, compile="inductor"), "cuda", world=1)
    assert not list(tmp_path.iterdir())
