"""`python -m fastformer.apps.cli`."""

from fastformer.apps.cli import main

main()
