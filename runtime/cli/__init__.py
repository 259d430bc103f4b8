"""The command `flashnext`: one module per subcommand, each thin over the library that does the work."""
