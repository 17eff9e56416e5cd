"""Depth streams inside any PyTorch module: a hidden state that norms read and additions write. Needs only torch."""
