"""The command line `flagos`: one file per subcommand. Looks at the pipeline through the plugin ABI."""
