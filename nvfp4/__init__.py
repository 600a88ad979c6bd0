"""NVFP4 pretraining of hybrid Mamba-2/attention language models."""

__version__ = "0.1.0"
