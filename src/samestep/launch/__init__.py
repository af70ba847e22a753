"""Starts processes, watches them, and says which one failed and why. Never imports torch at module level."""
