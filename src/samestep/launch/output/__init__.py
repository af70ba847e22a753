"""The output of ranks on a terminal and in files."""
