"""`python -m benchmarks.tuning`."""

import sys

from benchmarks.tuning.sweep import main

sys.exit(main())
