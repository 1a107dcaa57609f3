"""`python -m benchmarks.lane`."""

import sys

from benchmarks.lane.command import main

sys.exit(main())
