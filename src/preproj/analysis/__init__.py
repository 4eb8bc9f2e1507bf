"""What the layers learned."""

from preproj.analysis.layers import Analysis, analyze

__all__ = ["Analysis", "analyze"]
