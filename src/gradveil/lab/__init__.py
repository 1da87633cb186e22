"""What is made with the library and is not part of it: nothing of the library imports it."""
