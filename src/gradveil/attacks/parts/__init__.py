"""What attacks are made of: labels, priors, objectives, searches, channels of defenses, and their matching."""
