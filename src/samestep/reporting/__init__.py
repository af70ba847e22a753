"""Floor 6: what a run's files say, for people: a page, a live view, a trace."""
