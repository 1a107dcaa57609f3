"""The name "fastformer" in transformers, and who may not have it."""

import inspect
import re
import sys
from functools import wraps
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from fastformer.integrations.transformers.attention import attention_forward
from fastformer.integrations.transformers.entry import install
from fastformer.integrations.transformers.masks import mask_rules

NAME = "fastformer"


def calls_the_interface(model: PreTrainedModel) -> bool:
    """Whether a model's attention goes through transformers' interface; by its source, as transformers tells.

    Of classes outside of transformers nobody knows: they count as those that do.
    """
    theirs = (cls for cls in type(model).__mro__ if cls.__module__.startswith("transformers.models."))
    cls: Any = next(theirs, None)
    if cls is None:
        return True
    if re.search(r"\w+_CLASSES\[\w*config\._attn_implementation\]", inspect.getsource(sys.modules[cls.__module__])):
        return False  # a table of its own, by the names that it knows
    return bool(cls._can_set_attn_implementation())


def register() -> None:
    """Make `attn_implementation="fastformer"` known to transformers; done on import, and harmless to repeat.

    transformers gives any model any name that is registered. Where a model computes attention by itself, such as
    DeBERTa, the name would change nothing: `PreTrainedModel.get_correct_attn_implementation` raises for it then.
    """
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, mask_rules)
    theirs = PreTrainedModel.get_correct_attn_implementation
    if getattr(theirs, "asks_fastformer", False):
        return

    @wraps(theirs)
    def correct(self: PreTrainedModel, requested_attention: str | None, *args: Any, **kwargs: Any) -> str:
        if requested_attention == NAME and not calls_the_interface(self):
            raise ValueError(
                f'attn_implementation="{NAME}" does not reach the attention of {type(self).__name__}, which computes '
                'it by itself, outside of transformers\' attention interface; use "eager" or "sdpa" for it'
            )
        if requested_attention == NAME:
            for model in self.modules():  # parts that share its configuration are not asked
                if isinstance(model, PreTrainedModel):
                    install(model)
        return theirs(self, requested_attention, *args, **kwargs)  # type: ignore[no-any-return]

    correct.asks_fastformer = True  # type: ignore[attr-defined]
    PreTrainedModel.get_correct_attn_implementation = correct
