"""Variants trained side by side: what `attnres compare` does, and step times taken in turn."""
