"""Floor 6: whether N processes train as one. A run is recorded, judged, and compared with the script run alone."""
