"""Outrider trains DFlash drafters: block-diffusion models that draft a block of tokens for a large model to verify."""

__version__ = "0.1.0"
