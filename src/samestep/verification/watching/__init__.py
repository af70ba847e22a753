"""Inside a rank: torch's own functions, changed so that they tell a listener what the script does with them."""
