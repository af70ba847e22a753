"""What runs inside every rank."""
