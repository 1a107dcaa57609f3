"""`python -m benchmarks.recipes`."""

import sys

from benchmarks.recipes.command import main

sys.exit(main())
