"""Pre-projection and content skip as a PEFT method."""

from preproj.adapter.config import PreProjConfig
from preproj.adapter.layer import PreProjLayer
from preproj.adapter.model import PreProjModel
from preproj.adapter.register import register

register(PreProjConfig, PreProjModel)

__all__ = ["PreProjConfig", "PreProjLayer", "PreProjModel"]
