"""The tables and figures of each paper: its numbers in one file, what is known of the differences in the other."""
