"""Models looked at: what `attnres inspect`, `attnres search` and `attnres figures` do."""
