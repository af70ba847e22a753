"""From what the ranks have written down to findings: pure functions of journals. No torch here."""
