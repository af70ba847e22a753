"""Floor 6: what a training would take on other machines, predicted from what it takes here."""
