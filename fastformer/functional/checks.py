"""What the checks of the ops share: each names the argument, what it was and what is allowed, before anything runs."""


def check_probability(name: str, p: float) -> None:
    """Raise unless 0 <= p <= 1."""
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"{name} must be between 0 and 1, not {p}")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise unless value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}")
