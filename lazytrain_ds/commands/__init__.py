"""One module per subcommand of `lazytrain`; each has `run(arguments) -> exit status`."""
