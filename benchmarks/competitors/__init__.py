"""Competitors behind common arguments, and comparisons with them that cases share."""
