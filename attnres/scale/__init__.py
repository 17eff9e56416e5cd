"""More processes than one: stages of a pipeline, shares of every parameter, and checkpoints that fit any of them."""
