"""The lab's commands: parse, call, print."""
