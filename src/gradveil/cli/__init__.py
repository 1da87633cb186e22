"""The command line."""

ARGUMENTS = "gradveil.arguments"
"""Under what a context of click holds the arguments as they were typed."""
