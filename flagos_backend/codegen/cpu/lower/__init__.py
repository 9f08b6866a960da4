"""Instructions that the host has a native step for, one family a file: what the step needs to know."""
