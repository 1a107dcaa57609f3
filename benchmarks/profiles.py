"""Profile a training step: `python -m benchmarks.profiles FILE`. With --dry-run on a CPU, a tiny model."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import torch

from benchmarks.comparisons.training import training_step
from benchmarks.harness.lengths import VOCABULARY, random_pairs, typical_batch
from fastformer.apps.text import collate
from fastformer.apps.translation.model import TranslationConfig, TranslationModel, translation_loss
from fastformer.host import autograd_function

_TINY = TranslationConfig(
    VOCABULARY, VOCABULARY, d_model=32, heads=2, encoder_layers=1, decoder_layers=1, feed_forward=64
)


def profile_training_step(device: torch.device, tiny: bool) -> str:
    """Return a profile of forward, backward and AdamW on a random batch of 128 sentences, in bf16 on a GPU.

    Fused ops take their fast path as in training: under a profiler they would go through the dispatcher. Their launches
    are in the table, their names are not.
    """
    torch.manual_seed(0)
    gpu = device.type == "cuda"
    model = TranslationModel(_TINY if tiny else TranslationConfig(VOCABULARY, VOCABULARY)).to(device)
    batch = (collate(random_pairs(4)) if tiny else typical_batch("random")[0]).to(device)

    def loss() -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=gpu):
            return translation_loss(model, batch, 0.1)

    step = training_step(model, loss, batch)
    for _ in range(1 if tiny else 3):
        step()
    kinds = torch.profiler.ProfilerActivity
    unseen = patch.object(autograd_function, "profiling", lambda: False)
    with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA] if gpu else [kinds.CPU]) as profile, unseen:
        step()
        if gpu:
            torch.cuda.synchronize(device)
    order = "self_cuda_time_total" if gpu else "self_cpu_time_total"
    table = profile.key_averages().table(sort_by=order, row_limit=40, max_name_column_width=60)
    return f"training step, {batch.tokens} target tokens:\n{table}\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the profile to a file."""
    parser = argparse.ArgumentParser("python -m benchmarks.profiles")
    parser.add_argument("file", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args(arguments)
    if not options.dry_run and not torch.cuda.is_available():
        sys.exit("error: no CUDA device here")
    device = torch.device("cpu" if options.dry_run else "cuda")
    options.file.write_text(profile_training_step(device, options.dry_run), encoding="utf-8")


if __name__ == "__main__":
    main()
