"""What networks look like: graphs of hosts and switches, every one held as arithmetic and none as a table."""
