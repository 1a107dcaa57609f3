"""`python -m fastformer`, and `torchrun … -m fastformer`."""

from fastformer.cli import main

main()
