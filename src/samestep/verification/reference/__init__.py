"""The script itself, alone, on what the ranks together have used."""
