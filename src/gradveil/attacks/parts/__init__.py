"""What attacks are made of: labels, priors, objectives, searches, and the matching that puts them together."""
