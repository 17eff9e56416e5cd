"""What a model is worth on text and tasks, and text from it: perplexity, continuations, lm-eval, generation.

`run.evaluate` scores models on tasks, `generate.generate` writes on from a prompt; both load Transformers.
"""

from attnres.evals.config import EvalConfig, GenerateConfig

__all__ = ["EvalConfig", "GenerateConfig"]
