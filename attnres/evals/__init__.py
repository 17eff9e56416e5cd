"""Evaluate models on text and tasks, and generate text: perplexity, continuations, lm-eval, generation.

`run.evaluate` scores models on tasks, `generate.generate` continues a prompt; both load Transformers.
"""

from attnres.evals.config import EvalConfig, GenerateConfig

__all__ = ["EvalConfig", "GenerateConfig"]
