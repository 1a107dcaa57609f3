"""Profile a small op, whose cost is the host's, and a training step: `python -m benchmarks.profiles FILE`.

A step of `benchmarks.lane`. With --dry-run on a CPU, where no figure means anything.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import torch

import fastformer
from benchmarks.comparisons.training import training_step
from benchmarks.harness.clock import Call
from benchmarks.harness.lengths import VOCABULARY, typical_batch
from fastformer import functional
from fastformer.apps.translation.model import TranslationConfig, TranslationModel, translation_loss
from fastformer.host import autograd_function

_TINY = TranslationConfig(VOCABULARY, VOCABULARY, d_model=32, heads=2, feed_forward=64)


def profile_layer_norm(device: torch.device) -> str:
    """Return the host time of `layer_norm` at [8, 512], fused and reference, and a profile of the fused calls."""
    x, w, b = (torch.randn(*shape, device=device) for shape in ((8, 512), (512,), (512,)))
    number = 100 if device.type == "cuda" else 2  # in the interpreter a call takes milliseconds

    def calls(x: torch.Tensor = x, times: int = number) -> None:
        for _ in range(times):
            functional.layer_norm(x, 512, w, b, eps=1e-5)

    lines = [f"host time of functional.layer_norm at [8, 512], {number} calls:"]
    for backend in ("triton", "reference"):
        for about, leaf in (("no gradient", x), ("kept for backward", x.clone().requires_grad_())):
            with fastformer.backend(backend):
                calls(leaf, 3)
                _wait(device)
                begin = time.perf_counter()
                calls(leaf)
                seconds = time.perf_counter() - begin
            lines.append(f"  {backend}, {about}: {seconds / number * 1e6:.1f} us a call")
    with fastformer.backend("triton"):
        return "\n".join([*lines, _profile(device, calls, by_host=True)])


def profile_training_step(device: torch.device, tiny: bool) -> str:
    """Return a profile of forward, backward and AdamW on a random batch of 128 sentences, in bf16 on a GPU."""
    torch.manual_seed(0)
    model = TranslationModel(_TINY if tiny else TranslationConfig(VOCABULARY, VOCABULARY)).to(device)
    batch = typical_batch("random")[0].to(device)
    autocast = torch.autocast(device.type, torch.bfloat16) if device.type == "cuda" else nullcontext()

    def loss() -> torch.Tensor:
        with autocast:
            return translation_loss(model, batch, 0.1)

    step = training_step(model, loss, batch)
    for _ in range(1 if tiny else 3):
        step()
    return f"training step, {batch.tokens} target tokens:\n" + _profile(device, step, by_host=device.type != "cuda")


def _profile(device: torch.device, run: Call, *, by_host: bool) -> str:
    """Return the profiler's table, with fused ops that take their fast path as in training.

    Under a profiler they would go through the dispatcher. Their launches are in the table, their names are not.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if device.type == "cuda" else []
    unseen = patch.object(autograd_function, "profiling", lambda: False)
    with torch.profiler.profile(activities=activities) as profile, unseen:
        run()
        _wait(device)
    order = "self_cpu_time_total" if by_host else "self_cuda_time_total"
    return str(profile.key_averages().table(sort_by=order, row_limit=40, max_name_column_width=60))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write both profiles to a file."""
    parser = argparse.ArgumentParser("python -m benchmarks.profiles")
    parser.add_argument("file", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args(arguments)
    if not options.dry_run and not torch.cuda.is_available():
        sys.exit("error: no CUDA device here")
    device = torch.device("cpu" if options.dry_run else "cuda")
    with options.file.open("w", encoding="utf-8") as file:
        print(profile_layer_norm(device), profile_training_step(device, options.dry_run), sep="\n\n", file=file)


if __name__ == "__main__":
    main()
