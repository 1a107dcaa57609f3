from tests.fuzz.harness import explore  # noqa: F401
