"""What makes a framework's program a flagos.Program and gives it to a host client."""
