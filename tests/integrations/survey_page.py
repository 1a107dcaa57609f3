"""The page of the documentation with the results of the survey of transformers' models."""

from collections import Counter
from pathlib import Path
from typing import Any

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


def page(record: dict[str, Any]) -> str:
    """The page of the documentation: what each type of model gets."""
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
