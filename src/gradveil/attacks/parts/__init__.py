"""What attacks are made of: the channel of a defense, counter-moves, ways to rank candidates."""
