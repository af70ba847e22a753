"""Who sees which sample, and when: one global order, cut among the ranks. Floor 4."""
