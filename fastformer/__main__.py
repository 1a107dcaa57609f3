"""`python -m fastformer`, and `torchrun … -m fastformer`."""

from fastformer.apps.cli import main

main()
