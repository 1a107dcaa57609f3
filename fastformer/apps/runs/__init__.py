"""Runs and run folders: create, open, train, describe and compare them."""
