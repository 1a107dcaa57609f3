"""`python -m benchmarks.host`."""

import sys

from benchmarks.host.calls import main

sys.exit(main())
