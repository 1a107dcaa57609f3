"""Files, locks of run folders, terminal output and OpenMP threads."""
