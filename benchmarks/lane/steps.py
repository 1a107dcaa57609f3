"""The steps of `benchmarks.lane` that are no test and no benchmark: the machine's facts, and profiles.

python -m benchmarks.lane.steps facts DIR        # DIR/facts.json
python -m benchmarks.lane.steps profile DIR      # DIR/profile.txt

With --dry-run on a CPU with tiny shapes, of which no figure means anything.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import fastformer
from benchmarks.comparisons.training import training_step
from benchmarks.harness import environment
from benchmarks.harness.clock import Call, Stopwatch
from benchmarks.harness.floors import Ceilings
from benchmarks.harness.lengths import VOCABULARY, typical_batch
from fastformer import functional
from fastformer.apps.translation.model import TranslationConfig, TranslationModel, translation_loss
from fastformer.host import autograd_function

_CALLS = 100
_TINY = TranslationConfig(
    VOCABULARY, VOCABULARY, d_model=32, heads=2, encoder_layers=1, decoder_layers=1, feed_forward=64
)


def write_facts(folder: Path, device: torch.device, tiny: bool) -> None:
    """Write machine and ceilings, each ceiling when it is known."""
    found: dict[str, Any] = {"machine": environment.facts(device), "ceilings": {}}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["multiprocessors"], found["memory_bytes"] = properties.multi_processor_count, properties.total_memory
    ceilings = Ceilings(Stopwatch(device), tiny)
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    measure: list[Call] = [
        lambda: None,
        lambda: ceilings.bandwidth,
        *(partial(ceilings.matmul_rate, d) for d in dtypes),
    ]
    for step in measure:
        step()
        found["ceilings"] = ceilings.measured()
        (folder / "facts.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found))


def write_profiles(folder: Path, device: torch.device, tiny: bool) -> None:
    """Write what a call costs the host, then where a training step's time goes."""
    path = folder / "profile.txt"
    with path.open("w", encoding="utf-8") as out:
        for about, text in (("layer norm", _layer_norm(device)), ("training step", _training_step(device, tiny))):
            out.write(text + "\n\n")
            out.flush()
            print(f"{about}: in {path}")


def _layer_norm(device: torch.device) -> str:
    """Host time of a call that the device is done with sooner than the host."""
    x, w, b = (torch.randn(*shape, device=device) for shape in ((8, 512), (512,), (512,)))
    number = _CALLS if device.type == "cuda" else 2  # in the interpreter a call takes milliseconds

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
                _wait(device)
            lines.append(f"  {backend}, {about}: {seconds / number * 1e6:.1f} us a call")
    with fastformer.backend("triton"):
        return "\n".join([*lines, _profile(device, calls, by_host=True)])


def _training_step(device: torch.device, tiny: bool) -> str:
    """Forward, backward and AdamW of the base model on a random batch of 128 sentences, in bf16 on a GPU."""
    torch.manual_seed(0)
    model = TranslationModel(_TINY if tiny else TranslationConfig(VOCABULARY, VOCABULARY)).to(device)
    batch = typical_batch("random")[0].to(device)
    mixed = torch.autocast(device.type, torch.bfloat16) if device.type == "cuda" else nullcontext()

    def loss() -> torch.Tensor:
        with mixed:
            return translation_loss(model, batch, 0.1)

    step = training_step(model, loss, batch)
    for _ in range(1 if tiny else 3):
        step()
    _wait(device)
    return f"training step, {batch.tokens} target tokens:\n" + _profile(device, step, by_host=device.type != "cuda")


def _profile(device: torch.device, run: Call, *, by_host: bool) -> str:
    """The profiler's table. Our ops look away from it, as they else go through the dispatcher, which nobody trains by:
    their launches are in the table, their names are not.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    unseen = patch.object(autograd_function, "profiling", lambda: False)
    with torch.profiler.profile(activities=activities) as profile, unseen:
        run()
        _wait(device)
    order = "self_cpu_time_total" if by_host else "self_cuda_time_total"
    return str(profile.key_averages().table(sort_by=order, row_limit=40, max_name_column_width=60))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a step; 3 if there is no GPU and it is no dry run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lane.steps")
    parser.add_argument("step", choices=["facts", "profile"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args(arguments)
    if not options.dry_run and not torch.cuda.is_available():
        print("error: no CUDA device here", file=sys.stderr)
        return 3
    device = torch.device("cpu" if options.dry_run else "cuda")
    (write_facts if options.step == "facts" else write_profiles)(options.folder, device, options.dry_run)
    return 0


if __name__ == "__main__":
    sys.exit(main())
