"""Several hosts: reached, connected, compared."""
