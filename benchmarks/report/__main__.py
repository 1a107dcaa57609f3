"""`python -m benchmarks.report`."""

import sys

from benchmarks.report.pages import main

sys.exit(main())
