"""What two processes do in the tests of layers that are sharded one by one; each leaves what it saw as a JSON file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from fastformer.apps.classification.model import ClassifierConfig, SequenceClassifier, sequence_classification_loss
from fastformer.apps.language.model import LanguageModel, language_model_loss
from fastformer.apps.text import LabelledBatch
from fastformer.apps.train import Processes
from fastformer.apps.train.update import Update
from fastformer.apps.translation.model import TranslationModel, translation_loss
from tests.support import language_task, translation_task
from tests.support.train_task import config as train_config

WORLD, LAYERS = 2, 3
COUNTS = [3, 1, 2, 1, 4]  # sentences of batches; of one, a process has none


def language_model(**changes: Any) -> LanguageModel:
    torch.manual_seed(1)
    return LanguageModel(language_task.config(layers=LAYERS, **changes))


def modern_model() -> LanguageModel:
    """With parameters of its own in attention: grouped heads, norms, sinks and a bias of distances."""
    options = {"norm": "rms", "activation": "swiglu", "d_model": 16, "heads": 4, "kv_heads": 2, "qk_norm": True}
    return language_model(positions="relative", sinks=True, **options)


def translation_model() -> TranslationModel:
    torch.manual_seed(1)
    return TranslationModel(translation_task.config(norm_first=False, embeddings="shared"))


def classifier() -> SequenceClassifier:
    torch.manual_seed(1)
    return SequenceClassifier(ClassifierConfig(17, 3, d_model=12, heads=3, layers=2, feed_forward=20, dropout=0.0))


def lengths(index: int) -> list[int]:
    return [2 + (3 * index + i) % 5 for i in range(COUNTS[index % len(COUNTS)])]


def language_batch(index: int) -> Any:
    return language_task.random_batch(lengths(index), index)


def translation_batch(index: int) -> Any:
    return translation_task.random_batch([(n, n % 4 + 1) for n in lengths(index)], index)


def labelled_batch(index: int) -> LabelledBatch:
    read = language_batch(index)
    return LabelledBatch(read.ids_in, torch.arange(len(read.lengths)) % 3, read.lengths)


FAMILIES: dict[str, tuple[Callable[[], Any], Callable[..., Tensor], Callable[[int], Any]]] = {
    "language": (language_model, language_model_loss, language_batch),
    "modern language": (modern_model, language_model_loss, language_batch),
    "translation": (translation_model, translation_loss, translation_batch),
    "classification": (classifier, sequence_classification_loss, labelled_batch),
}


@torch.no_grad()
def decoded(model: LanguageModel) -> float:
    """What a decoder says, token by token."""
    cache, total = model.decoder.new_cache(rows=1), 0.0
    for position in range(3):
        ids = torch.full((1, 1), 5 + position)
        x = model.embedding(ids, torch.full_like(ids, position), position + 1)
        total += float(model.decoder.step(x, cache).abs().sum())
    return total


def precise(rank: int, folder: Path) -> Any:
    """Gradients of a step in bf16, for the test to compare."""
    for name, (make, loss, batch) in FAMILIES.items():
        model = make()
        update = Update(model, loss, train_config(precision="bf16", parallel="fsdp"), Processes.current())
        total, norm, _ = update.gradients([batch(0), batch(1)])
        grads = {key: p.grad.full_tensor() for key, p in model.named_parameters()}
        dtypes = {str(p.dtype) for p in model.parameters()} | {str(p.grad.dtype) for p in model.parameters()}
        if rank == 0:
            torch.save({"loss": total, "norm": norm, "grads": grads, "dtypes": dtypes}, folder / f"{name}.pt")
    return None


def caches(rank: int, folder: Path) -> Any:
    """Decoding with a cache needs gathered layers."""
    from torch.distributed.fsdp import fully_shard

    model = language_model().double()
    plain = decoded(model)
    layers: Any = model.decoder.layers
    for layer in layers:
        fully_shard(layer)
    said = None
    try:
        decoded(model)
    except RuntimeError as error:
        said = str(error)
    for layer in layers:
        layer.unshard()
    return {"plain": plain, "found": decoded(model), "said": said}


def work(rank: int, folder: str, *names: str) -> None:
    """What a process of `processes.start_processes` does."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    seen = {}
    for scenario in (precise, caches):
        if scenario.__name__ in names:
            seen[scenario.__name__] = scenario(rank, Path(folder))
            torch.distributed.barrier()
    (Path(folder) / f"seen-{rank}.json").write_text(json.dumps(seen))
    torch.distributed.destroy_process_group()
