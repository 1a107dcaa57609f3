"""Checks of one stage of a compilation each: TTGIR, PTX or SASS. Their code is in every fingerprint."""
