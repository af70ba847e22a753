"""What spans a whole run rather than one step: evaluation and checkpoints."""
