"""The subcommands of `attnres`, a file each (a dataclass of its flags and `run(arguments)`), or a row of `short`."""
