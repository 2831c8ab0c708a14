"""Products with a few directions, subtracted from rows and added to them again."""
