"""What two processes do in the tests of distributed training; every process leaves what it saw as a JSON file."""

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed
from torch import Tensor, nn

import fastformer
from fastformer.apps.language.model import LanguageModel, language_model_loss
from fastformer.apps.text import EncodedDocuments, LanguageBatches, Sequences
from fastformer.apps.text.batch import share_of
from fastformer.apps.train import ProcessError, Processes, Trainer
from fastformer.apps.train.update import Update
from fastformer.apps.translation.model import TranslationModel, translation_loss
from tests.support import language_task, translation_task
from tests.support.train_task import Rows, Source, network, summed_loss, trainer
from tests.support.train_task import config as train_config

WORLD = 2
# Batches of 1 to 6 rows: one row leaves the second process without any.
DOUBLE = {"steps": 20, "accumulate": 2, "clip_norm": 0.1, "log_every": 1, "validate_every": 4, "batch_tokens": 64}


class SharedRows(Rows):
    def share(self, rank: int, world: int) -> "SharedRows | None":
        rows = share_of(torch.ones(len(self.labels), dtype=torch.int64), rank, world)
        return None if rows.start == rows.stop else SharedRows(self.inputs[rows], self.labels[rows])


class SharedSource(Source):
    def epoch(self, epoch: int, start: int = 0) -> Any:
        for batch in super().epoch(epoch, start):
            yield SharedRows(batch.inputs.double(), batch.labels)


def validate(model: nn.Module) -> dict[str, float]:
    batches = list(SharedSource(2).epoch(1000))
    return {"loss": float(sum(summed_loss(model, b) for b in batches)) / sum(b.tokens for b in batches)}


def summed(model: nn.Module, batch: Rows) -> Tensor:
    return nn.functional.cross_entropy(model(batch.inputs), batch.labels, reduction="sum")


def double_trainer(folder: Path, dropout: float = 0.0, seed: int = 3, **changes: Any) -> Trainer:
    """A run in fp64, where nothing but a mistake makes a difference."""
    given = {"validate": validate, "loss": summed} | {
        key: changes.pop(key) for key in ("validate", "loss", "clock") if key in changes
    }
    source = SharedSource(sizes=(1, 7))
    return trainer(folder, train_config(**(DOUBLE | changes)), source, model=network(seed, dropout).double(), **given)


def resume(made: Trainer) -> Trainer:
    made.resume()
    return made


class Pressing:
    """A loss that presses Ctrl-C at its n-th batch."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __call__(self, model: nn.Module, batch: Rows) -> Tensor:
        self.n -= 1
        if self.n == 0:
            signal.raise_signal(signal.SIGINT)
        return summed(model, batch)


def whole(rank: int, folder: Path) -> Any:
    """Another seed in each process: the parameters of process 0 count. Counts how often gradients are exchanged."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    made, exchanged = double_trainer(folder / "whole", seed=3 + rank), []

    def counting(state: Any, bucket: torch.distributed.GradBucket) -> torch.futures.Future[Tensor]:
        exchanged.append(1)
        return allreduce_hook(state, bucket)

    made._update.module.register_comm_hook(None, counting)
    steps = made.fit().step
    return {"exchanges": len(exchanged), "steps": steps}


def resumed(rank: int, folder: Path) -> Any:
    """The second process looks at the disk late, when the first has marked its last checkpoint as the best."""
    made = resume(double_trainer(folder / "parts", steps=13, seed=50 + rank))
    best_value = made.checkpoints.best_value

    def late() -> float | None:
        time.sleep(0.5 * rank)
        return best_value()

    made.checkpoints.best_value = late
    ended = made.fit()
    return {"reason": ended.reason, "best": ended.best.name}


def dropout(rank: int, folder: Path) -> Any:
    made = double_trainer(folder / "dropout", dropout=0.5, steps=9)
    with torch.random.fork_rng(devices=[]):
        first = torch.rand(1).item()
    made.fit()
    ended = double_trainer(folder / "stopped", dropout=0.5, steps=9, loss=Pressing(5 if rank else 10**9)).fit()
    torch.manual_seed(99)
    resume(double_trainer(folder / "stopped", dropout=0.5, steps=9)).fit()
    return {"drawn": first, "reason": ended.reason, "step": ended.step}


def plateau(rank: int, folder: Path) -> Any:
    """Only the first process validates, and its losses set everybody's learning rate; only it writes."""
    called = []

    def noted(model: nn.Module) -> dict[str, float]:
        called.append(1)
        return {"loss": float(len(called))}

    changes = {"schedule": "divide_on_plateau", "plateau_divisor": 2.0, "patience": 3}
    made = double_trainer(folder / "plateau", validate=noted, **changes)
    ended = made.fit()
    rate = made._update.optimizer.param_groups[0]["lr"]
    return {"called": len(called), "reason": ended.reason, "step": ended.step, "rate": rate, "value": ended.best_value}


def failing(rank: int, folder: Path) -> Any:
    """A validation that fails in process 0, a loss that is infinite in process 1, batches that cannot be shared."""

    def broken(model: nn.Module) -> dict[str, float]:
        raise ValueError("no text to validate on")

    def infinite(model: nn.Module, batch: Rows) -> Tensor:
        return summed(model, batch) + (float("inf") if rank else 0.0)  # with a finite gradient

    said = []
    for made in (
        double_trainer(folder / "failing", validate=broken),
        double_trainer(folder / "infinite", loss=infinite),
        trainer(folder / "unshared", train_config()),
    ):
        try:
            made.fit()
        except (ValueError, ProcessError, FloatingPointError, TypeError) as error:
            said.append([type(error).__name__, str(error)])
    return said


def sharded(rank: int, folder: Path) -> Any:
    """FSDP2 from the start, from a checkpoint of one process, and one that another then goes on from."""
    made = double_trainer(folder / "fsdp", parallel="fsdp", seed=3 + rank)
    names = ("reduce_scatter_single", "reduce_scatter_tensor")  # torch 2.13's name, and what it was before
    name = next(name for name in names if hasattr(torch.distributed, name))
    with mock.patch.object(torch.distributed, name, wraps=getattr(torch.distributed, name)) as scatter:
        made.fit()
    resume(double_trainer(folder / "fsdp-parts", parallel="fsdp", steps=13, seed=50 + rank, average=2)).fit()
    resume(double_trainer(folder / "fsdp-sgd", parallel="fsdp", seed=50 + rank, optimizer="sgd")).fit()
    held = sum(p.to_local().numel() for p in made.model.parameters())
    whole = sum(p.numel() for p in made.model.parameters())
    return {"held": held, "all": whole, "exchanges": scatter.call_count}


def language_model() -> LanguageModel:
    torch.manual_seed(1)
    return LanguageModel(language_task.config(vocabulary=11)).double()


def language(rank: int, folder: Path, parallel: str = "fsdp") -> Any:
    """Train a language model with tied embeddings: stacks without padding, weights stored once."""
    model = language_model()
    generator = torch.Generator().manual_seed(0)
    lines = [translation_task.random_ids(3 + i % 10, generator, 11) for i in range(60)]
    batches = LanguageBatches(EncodedDocuments(Sequences.from_lists(lines), translation_task.IDS), context=8, tokens=40)
    settings = train_config(steps=6, log_every=1, validate_every=3, parallel=parallel)
    changes = {"model": model, "validate": None, "loss": language_model_loss}
    trainer(folder / f"language-{parallel}", settings, batches, **changes).fit()
    return {"obstacle": model.decoder.obstacle()}


def translation_model() -> TranslationModel:
    torch.manual_seed(1)
    return TranslationModel(translation_task.config(norm_first=False, embeddings="shared"))


def translation_batches() -> list[Any]:
    """Two batches; of the second, of one sentence, one process has none."""
    return [translation_task.random_batch(sizes, 0) for sizes in ([(2, 3), (5, 2), (3, 4)], [(5, 2)])]


def in_bf16(rank: int, folder: Path) -> Any:
    """Compute the gradients of a step in bf16, for the test to compare."""
    model = translation_model()
    update = Update(model, translation_loss, train_config(precision="bf16", parallel="fsdp"), Processes.current())
    total, norm, _ = update.gradients(translation_batches())
    dtypes = {str(x.dtype) for p in model.parameters() for x in (p, p.grad)}
    grads = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    if rank == 0:
        torch.save({"loss": total, "norm": norm, "grads": grads, "dtypes": dtypes}, folder / "bf16.pt")
    return None


@torch.no_grad()
def decoded(model: LanguageModel) -> float:
    """What a decoder says, token by token."""
    cache, total = model.decoder.new_cache(rows=1), 0.0
    for position in range(3):
        ids = torch.full((1, 1), 5 + position)
        x = model.embedding(ids, torch.full_like(ids, position), position + 1)
        total += float(model.decoder.step(x, cache).abs().sum())
    return total


def caches(rank: int, folder: Path) -> Any:
    """Decoding with a cache needs gathered layers."""
    from torch.distributed.fsdp import fully_shard

    model = language_model()
    plain = decoded(model)
    layers: Any = model.decoder.layers
    for layer in layers:
        fully_shard(layer)
    message = None
    try:
        decoded(model)
    except RuntimeError as error:
        message = str(error)
    for layer in layers:
        layer.unshard()
    return {"plain": plain, "gathered": decoded(model), "message": message}


# Sentences of both processes; in the first step the second process has nothing but padding.
LENGTHS = [([[5, 2, 0], [0, 0, 0]], [[1, 4, 3], [0, 0, 0]]), ([[1, 1, 2], [5, 5, 5]], [[2, 0, 4], [4, 4, 3]])]


def transformer_loss(model: nn.Module, step: int, rank: int) -> Tensor:
    torch.manual_seed(10 * step + rank)
    sides = [(5, LENGTHS[step][0][rank]), (4, LENGTHS[step][1][rank])]
    padding = [torch.arange(size) >= torch.tensor(lengths)[:, None] for size, lengths in sides]
    source, target = (torch.randn(3, size, 8, dtype=torch.float64) for size, _ in sides)
    masks = {"src_key_padding_mask": padding[0], "tgt_key_padding_mask": padding[1]}
    return model(source, target, memory_key_padding_mask=padding[0], **masks).pow(3).sum()


def transformer_steps(wrapper: Any, loss: Callable[[nn.Module, int], Tensor]) -> dict[str, Tensor]:
    """Return the parameters of a converted Transformer after two steps."""
    torch.manual_seed(0)
    model = nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=True, dtype=torch.float64)
    fastformer.convert(model)
    wrapped, optimizer = wrapper(model), torch.optim.SGD(model.parameters(), 0.01)
    for step in range(2):
        optimizer.zero_grad()
        loss(wrapped, step).backward()
        optimizer.step()
    return model.state_dict()


def padding_alone(rank: int, folder: Path) -> Any:
    loss = lambda model, step: transformer_loss(model, step, rank)  # noqa: E731
    weights = transformer_steps(nn.parallel.DistributedDataParallel, loss)
    torch.save(weights, folder / f"transformer-{rank}.pt")


SCENARIOS: dict[str, tuple[Callable[[int, Path], Any], ...]] = {
    "ddp": (whole, resumed, dropout, plateau, failing, padding_alone),
    "fsdp": (sharded, language, in_bf16, caches),
}


def work(rank: int, folder: str, name: str) -> None:
    """What a process of `processes.start_processes` does."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    seen = {}
    for scenario in SCENARIOS[name]:
        seen[scenario.__name__] = scenario(rank, Path(folder))
        torch.distributed.barrier()
    (Path(folder) / f"seen-{rank}.json").write_text(json.dumps(seen))
    torch.distributed.destroy_process_group()
