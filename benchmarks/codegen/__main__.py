"""`python -m benchmarks.codegen`."""

import sys

from benchmarks.codegen.command import main

sys.exit(main())
