"""The `tilewise` command: one file per subcommand, `app` that joins them, `options` and `output` that they share."""
