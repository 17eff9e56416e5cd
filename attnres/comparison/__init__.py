"""Train variants side by side, as `attnres compare` does, and time their steps, interleaved."""
