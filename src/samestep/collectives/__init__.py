"""How values of many ranks become one: in shared memory on one host, or by messages, as a plan that one engine runs."""
