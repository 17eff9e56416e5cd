"""Kimi K3's text model, whose layers Transformers' `kimi_linear` lacks: `model_type: kimi_k3`."""

from attnres.models.kimi.config import KimiK3Config
from attnres.models.kimi.model import KimiK3ForCausalLM, KimiK3Model

__all__ = ["KimiK3Config", "KimiK3ForCausalLM", "KimiK3Model"]
