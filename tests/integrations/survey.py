"""Every text model of the installed transformers, small, without padding against `eager`: outputs and gradients.

    python -m tests.integrations.survey              all types, held to tested.json; 5 minutes of a core
    python -m tests.integrations.survey --update     writes what was found there: padding_free packs these stacks
    python -m tests.integrations.survey bert llama   only these

A type is *packed* (the stacks that gave eager's numbers and did run packed), *padded* (our attention alone, with the
reason for each stack), *refused* (with the error), or cannot be built small by these rules. A wrong number is an error.
"""

import argparse
import contextlib
import gc
import inspect
import json
import re
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor
from transformers import masking_utils
from transformers.models.auto import configuration_auto, modeling_auto
from transformers.utils import logging

from fastformer import functional
from fastformer.integrations.transformers import entry, padding_free
from fastformer.integrations.transformers.packing import _base_models
from tests.integrations.small_configs import VOCABULARY, NotSmall, batch, build

RECORD = Path(entry.__file__).with_name("tested.json")
SIDES = ("right", "left", "gaps", "empty", "none")
# Two layers with large weights, added up in another order, and a softmax that many models take in fp32.
ROUNDINGS, EPS = 2000.0, torch.finfo(torch.float32).eps
LONGEST = 20  # seconds of CPU

NO_TEXT, KEPT_APART = "NotSmall: takes no text", "kept apart"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "hugging-face-models.md"
GETS = {
    "packed": 'These base models run without padding; attention alone with the name "fastformer".',
    "padded": "Attention leaves the padding out; the other layers work on it.",
    "no attention": "There is no attention of transformers' interface to replace: nothing changes.",
    "refused": "The name raises: use `eager` or `sdpa`.",
    "not built": "Not tried: these cannot be built small by the rules of `tests/integrations/small_configs.py`, or "
    "their base model gives no states of text.",
}

ATTENTIONS = ("packed_attention", "attention", "attention_with_weights")

logging.set_verbosity_error()


def types() -> list[str]:
    """All types of models that transformers has a base model for."""
    return sorted(name for name in modeling_auto.MODEL_MAPPING_NAMES if name in configuration_auto.CONFIG_MAPPING_NAMES)


def results(model: Any, side: str) -> dict[str, Tensor]:
    """Hidden states at real positions, and the gradient of every parameter."""
    inputs = batch(model, side)
    model.zero_grad(set_to_none=True)
    out = model(**inputs, use_cache=False) if "use_cache" in model.config.to_dict() else model(**inputs)
    hidden = out[0]
    real = inputs.get("decoder_attention_mask", inputs["attention_mask"]).bool()
    if hidden.shape[:2] != real.shape:
        raise NotSmall(f"gives {list(hidden.shape)} for {list(real.shape)}")
    chosen = hidden[real]
    direction = torch.randn(chosen.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    (chosen * direction.to(chosen.dtype)).sum().backward()
    gradients = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    pooled = getattr(out, "pooler_output", None) if side in ("right", "none") else None  # elsewhere it reads padding
    pooled = {} if pooled is None else {"outputs pooled": pooled.detach()}
    return {"outputs": chosen.detach(), **pooled, **gradients}


def difference(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> str | None:
    """In what results differ by more than another order of adding, or None."""
    if actual.keys() != expected.keys():
        return f"gradients of {sorted(actual.keys() ^ expected.keys())[:3]} in one of the two only"
    largest = max((float(x.abs().max()) for name, x in expected.items() if not name.startswith("outputs")), default=0.0)
    for name, x in expected.items():
        largest_value = float(x.abs().max())
        error = float((actual[name].double() - x.double()).abs().max())
        scale = largest_value if name.startswith("outputs") else max(largest_value, 0.01 * largest)
        if not error <= ROUNDINGS * EPS * scale:
            return f"{name} differs by {error:.2g} of {largest_value:.2g}"
    return None


@contextlib.contextmanager
def counted(ran: set[str] | None = None) -> Iterator[Counter[str]]:
    """How often our attention runs packed and padded; ran, if given, gets the classes of models that run packed."""
    calls: Counter[str] = Counter()
    run_packed = entry._run

    def counting(name: str, function: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return function(*args, **kwargs)

        return run

    def noting(model: Any, *args: Any) -> Any:
        output = run_packed(model, *args)
        if ran is not None:
            ran.add(entry.identity(model))
        return output

    with contextlib.ExitStack() as stack:
        for name in ATTENTIONS:
            stack.enter_context(mock.patch.object(functional, name, counting(name, getattr(functional, name))))
        stack.enter_context(mock.patch.object(entry, "_run", noting))
        yield calls


def _eager_mask(*args: Any, **options: Any) -> Tensor:
    """Return eager's mask with fp32's lowest number: many models take the softmax in fp32, where fp64's is -inf."""
    additive: Tensor = masking_utils.eager_mask(*args, **{**options, "dtype": torch.float32})
    return additive


def eager_results(name: str) -> tuple[torch.dtype, dict[str, Any]]:
    """Return a dtype, and eager's finite numbers for each kind of padding: in fp64, or in fp32 if more are finite.

    In fp32, two right results differ by the rounding of both: by 3e-4 in gradients of EmbeddingGemma 2.
    """
    most: tuple[torch.dtype, dict[str, Any]] = (torch.float64, {})
    for dtype in (torch.float64, torch.float32):
        try:
            model = build(name, "eager", dtype)
            by_side = {side: results(model, side) for side in SIDES}
        except RuntimeError:  # a dtype of its own
            if dtype == torch.float32 and not most[1]:
                raise
            continue
        finite = {
            side: tensors
            for side, tensors in by_side.items()
            if all(bool(x.isfinite().all()) for x in tensors.values())
        }
        most = (dtype, finite) if len(finite) > len(most[1]) else most
        if len(finite) == len(SIDES):
            break
    return most


def outcome(name: str) -> dict[str, Any]:
    """Return the entry of `tested.json` for one type of model; raise AssertionError for a wrong number."""
    record = of_padded_batches(name)
    if record["outcome"] == "not built":
        return record
    return record | of_flattened_batches(name, entry.tested_classes() | record.get("packed", {}))


def of_padded_batches(name: str) -> dict[str, Any]:
    eagers = mock.patch.dict(masking_utils.AttentionMaskInterface._global_mapping, eager=_eager_mask)
    with warnings.catch_warnings(), eagers:
        warnings.simplefilter("ignore")
        try:
            dtype, expected = eager_results(name)
        except Exception as error:
            return {"outcome": "not built", "reason": _first_line(error)}
        if not expected:
            return {"outcome": "not built", "reason": "eager's numbers are not finite"}
        by_side, refused = {}, ""
        with counted() as calls:
            try:
                named = build(name, "fastformer", dtype)
                by_side = {side: results(named, side) for side in expected}
            except Exception as error:  # parts of it may have models of their own, which padding_free takes
                by_side, refused = {}, _first_line(error)
        calls_by_name = calls.total()
        for side, tensors in by_side.items():
            assert (wrong := difference(tensors, expected[side])) is None, f"{name}, attention alone, {side}: {wrong}"
        record = packed(name, dtype, expected)
        if record["outcome"] == "packed":
            reasons = (record.get("reason"), refused and f"the name alone raises {refused}")
            return {**record, "reason": "; ".join(filter(None, reasons))} if any(reasons) else record
        if refused:
            return {"outcome": "refused", "reason": refused}
        return record if calls_by_name else {**record, "outcome": "no attention"}


RULES = ("columns", "tokens", "words")


def packed(name: str, dtype: torch.dtype, expected: dict[str, Any]) -> dict[str, Any]:
    """What becomes of a model with `padding_free`: each base model inside it alone, then all that are right."""
    right: dict[str, str] = {}
    reasons = set()
    for identity in dict.fromkeys(entry.identity(base) for _, base in _base_models(build(name, "eager", dtype))):
        errors = [_wrong_with(name, dtype, expected, {identity: rule}) for rule in RULES[:1]]
        while errors[-1] is not None and errors[-1].startswith("outputs") and len(errors) < len(RULES):
            errors.append(_wrong_with(name, dtype, expected, {identity: RULES[len(errors)]}))
        if errors[-1] is None:
            right[identity] = RULES[len(errors) - 1]
        else:
            reasons.add(f"{identity.rpartition('.')[2]}: {errors[0]}")
    reason = {"reason": "; ".join(sorted(reasons))} if reasons else {}
    if not right:
        return {"outcome": "padded", "reason": "no model that takes a padding mask", **reason}
    wrong = _wrong_with(name, dtype, expected, right)
    assert wrong is None, f"{name}, packed: {wrong}"
    return {"outcome": "packed", "packed": right, **reason}


def _wrong_with(name: str, dtype: torch.dtype, expected: dict[str, Any], classes: dict[str, str]) -> str | None:
    """Why some classes of base models may not run packed, by a rule of positions each, or None."""
    model, ran = build(name, "eager", dtype), set[str]()
    with mock.patch.object(entry, "tested_classes", return_value=classes):
        report = padding_free(model)
        for side in expected:
            with counted(ran) as calls:
                try:
                    wrong = difference(results(model, side), expected[side])
                except Exception as error:
                    wrong = _first_line(error)
            if wrong is not None:
                return f"{wrong} ({side} padding)"
            assert calls["packed_attention"] == 0 or side != "none", f"{name} packed a batch without padding"
    missing = classes.keys() - ran
    reasons = {entry.outcome for entry in report.padded if "not among the classes" not in entry.outcome}
    return "; ".join(sorted(reasons)) or "its calls ran padded" if missing else None


def of_flattened_batches(name: str, classes: dict[str, str]) -> dict[str, Any]:
    """Return whether several sequences in a row are kept apart by position ids.

    The first sequence is changed, and the others must not move: by name and with `padding_free`, with caches and
    without, in training and evaluation. In evaluation each has the numbers that `eager` gives it alone.
    """
    if "position_ids" not in inspect.signature(type(build(name, "eager", torch.float32)).forward).parameters:
        return {}
    try:
        with mock.patch.object(entry, "tested_classes", return_value=classes):
            for pack in (False, True):
                eager, model = (
                    build(name, each, torch.float64) for each in ("eager", "eager" if pack else "fastformer")
                )
                if not pack or padding_free(model).packed:
                    for caches in ({}, {"use_cache": False}):
                        _keeps_apart(model, eager, caches)
    except AssertionError as error:
        raise AssertionError(f"{name}, flattened: {error}") from error
    except Exception as error:
        return {"flattened": _first_line(error)}
    return {"flattened": KEPT_APART}


def _keeps_apart(model: Any, eager: Any, caches: dict[str, Any]) -> None:
    lengths = [4, 3, 2]
    generator = torch.Generator().manual_seed(3)
    ids, other = torch.randint(5, VOCABULARY, (2, 1, sum(lengths)), generator=generator)
    other[:, lengths[0] :] = ids[:, lengths[0] :]
    first = 2 if hasattr(getattr(model, "embeddings", None), "padding_idx") else 0
    positions = torch.cat([torch.arange(first, first + length) for length in lengths])[None]
    for training in (False, True):
        model.train(training)
        outputs = []
        for inputs in (ids, other):
            torch.manual_seed(5)
            target = {"decoder_input_ids": inputs, "decoder_position_ids": positions}
            target = target if model.config.is_encoder_decoder else {}
            outputs.append(model(input_ids=inputs, position_ids=positions, **target, **caches)[0].detach())
        later, later_after_change = (x[:, lengths[0] :] for x in outputs)
        wrong = difference({"outputs": later}, {"outputs": later_after_change})
        assert wrong is None, f"a sequence sees another: {wrong}"
        if not training:
            pieces = zip(ids.split(lengths, 1), positions.split(lengths, 1), strict=True)
            each_alone = torch.cat([eager(input_ids=x, position_ids=at)[0].detach() for x, at in pieces], 1)
            wrong = difference({"outputs": outputs[0]}, {"outputs": each_alone})
            assert wrong is None, f"a sequence has other numbers than alone: {wrong}"


def _first_line(error: Exception) -> str:
    message = re.sub(r" from '/[^']*'", "", str(error).strip())  # where a module lies here
    return f"{type(error).__name__}: {message.splitlines()[0][:160] if message else ''}"


def _late(*_: object) -> None:
    raise NotSmall("takes too long")


def page(record: dict[str, Any]) -> str:
    """Return the page of the documentation: what each type of model gets."""
    text_types = {name: result for name, result in record["types"].items() if result.get("reason") != NO_TEXT}
    count = Counter(result["outcome"] for result in text_types.values())
    lines = [
        "# Hugging Face's types of models",
        "",
        f'What `padding_free` and `attn_implementation="fastformer"` do with each type of text model of transformers '
        f"{record['transformers']}: small, with random weights, outputs and gradients against `eager`, under padding "
        "on the right, on the left, with gaps, with an empty row, and without. `make survey` does it again; this page "
        "is written by `python -m tests.integrations.survey --update`. How to use it: [](hugging-face.md).",
        "",
        "| | types | |",
        "|---|---:|---|",
        *(f"| {outcome} | {count[outcome]} | {meaning} |" for outcome, meaning in GETS.items()),
    ]
    names = ", ".join(name for name, result in text_types.items() if result.get("flattened") == KEPT_APART)
    lines += ["", "## Flattened batches", "", f"Sequences are kept apart by position ids in: {names}. Others raise."]
    for outcome in GETS:
        lines += ["", f"## {outcome.capitalize()}", "", "| type | |", "|---|---|"]
        for name, result in text_types.items():
            if result["outcome"] == outcome:
                classes = ", ".join(f"`{cls.rpartition('.')[2]}`" for cls in result.get("packed", ()))
                meaning = "; ".join(filter(None, (classes, result.get("reason", "").replace("|", "/"))))
                lines.append(f"| {name} | {meaning} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*")
    parser.add_argument("--update", action="store_true")
    options = parser.parse_args()
    results_by_type: dict[str, Any] = {}
    torch.set_num_threads(1)  # threads that wait for each other would count as CPU time
    signal.signal(signal.SIGPROF, _late)
    for name in options.types or types():
        began = time.process_time()
        try:
            signal.setitimer(signal.ITIMER_PROF, LONGEST)
            results_by_type[name] = outcome(name)
            signal.setitimer(signal.ITIMER_PROF, 0)
        except AssertionError as error:
            results_by_type[name] = {"outcome": "WRONG", "reason": _first_line(error)}
        except Exception as error:
            results_by_type[name] = {"outcome": "ERROR", "reason": _first_line(error)}
        signal.setitimer(signal.ITIMER_PROF, 0)
        result = results_by_type[name]
        text = f"{result['outcome']:10} {result.get('packed', '')} {result.get('reason', '')}"
        print(f"{time.process_time() - began:5.1f} s  {name:28} {text}", flush=True)
        gc.collect()
    print(Counter(result["outcome"] for result in results_by_type.values()))
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))["types"]
    changed = [name for name, result in results_by_type.items() if result != recorded.get(name)]
    if options.update:
        kept_types = recorded if options.types else {}
        record = {
            "transformers": transformers.__version__,
            "types": dict(sorted((kept_types | results_by_type).items())),
        }
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        PAGE.write_text(page(record), encoding="utf-8")
    elif changed:
        sys.exit(f"not as {RECORD.name} has it: {', '.join(changed)}")


if __name__ == "__main__":
    main()
