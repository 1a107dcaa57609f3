"""Run folders: what they are and hold, how a run goes, and runs side by side."""
