"""Floor 1: what messages between ranks cost, in plain numbers. Never imports torch."""
