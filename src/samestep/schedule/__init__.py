"""Pipeline schedules: which rank does what and in which order, and how long a step takes by simulation."""
