"""Distributed training: pipeline stages, sharded and split parameters, and checkpoints that fit any layout."""
