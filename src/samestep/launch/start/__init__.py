"""How agents and ranks are started."""
