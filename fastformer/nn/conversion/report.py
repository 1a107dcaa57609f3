"""What `convert` and `revert` tell: a line a module."""

from dataclasses import dataclass, field

ZEROED = (
    "where a key padding mask is given, the padded rows of its output are 0 now, in training too, where torch computes "
    "them; what reads them, such as a mean over all positions, changes: padding_free=False keeps torch's"
)

FROM_OUTSIDE = (
    "a model of Hugging Face transformers: fastformer.integrations.transformers.padding_free(model) has its layers run "
    "without padding"
)


@dataclass(frozen=True)
class Entry:
    """One module of a model: its name there, its class before, and its class after or what is to be known of it."""

    name: str
    before: str
    outcome: str


@dataclass
class Conversion:
    """What `convert` or `revert` did; printed, one line a module.

    Attributes:
        changed: modules that have another class now.
        left: modules that look like ours to change, or to change back, and were not, with the reason: also attention
            and feed-forward networks that a model has written itself.
        zeroed: changed stacks whose outputs are 0 at padding now, where torch computes something.
        padded: stacks that are ours and still work on padding, with the reason; and models of Hugging Face's, with
            what to do about them.
    """

    changed: list[Entry] = field(default_factory=list)
    left: list[Entry] = field(default_factory=list)
    zeroed: list[Entry] = field(default_factory=list)
    padded: list[Entry] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{len(self.changed)} modules changed, {len(self.left)} left as they were"]
        groups = (
            ("changed", self.changed, "->"),
            ("left", self.left, ":"),
            ("zeros at padding", self.zeroed, ":"),
            ("works on padding", self.padded, ":"),
        )
        for title, entries, sign in groups:
            lines += [f"  {title}  {x.name or '(the model)'}  {x.before} {sign} {x.outcome}" for x in entries]
        return "\n".join(lines)


def name_of(cls: type) -> str:
    """A class as reports call it: `torch.nn.LayerNorm`, and others by their package."""
    package = cls.__module__.split(".")[0]
    return f"torch.nn.{cls.__name__}" if cls.__module__.startswith("torch.nn.") else f"{package}.{cls.__name__}"
