"""Position-agnostic pre-projection and content skip for transformer attention (arXiv 2604.10791).

Importing this package registers the method with PEFT, so that ``get_peft_model(base, PreProjConfig())`` and
``PeftModel.from_pretrained(base, folder)`` work.
"""

from preproj.adapter import PreProjConfig, PreProjModel
from preproj.adapter.hotswap import hotswap_adapter
from preproj.adapter.sites import sites
from preproj.cost import params
from preproj.modules import ContentSkip, PreProjection
from preproj.optimizer import create_optimizer

__version__ = "0.1.0"
__all__ = [
    "ContentSkip",
    "PreProjConfig",
    "PreProjModel",
    "PreProjection",
    "__version__",
    "create_optimizer",
    "hotswap_adapter",
    "params",
    "sites",
]
