"""`python -m fastformer.cli`."""

from fastformer.cli import main

main()
