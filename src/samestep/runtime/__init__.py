"""Inside one rank: its place in the world, its device, its random streams. Floor 3."""
