"""What every rank of a verified run writes down about itself."""
