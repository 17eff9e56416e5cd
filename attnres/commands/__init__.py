"""The subcommands of `attnres`: each has a file (a dataclass of its flags and `run(arguments)`) or a row in `short`."""
