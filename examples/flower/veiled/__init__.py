"""A Flower app whose clients train under a defense."""
