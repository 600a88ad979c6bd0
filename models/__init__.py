"""Hybrid Mamba-2/attention models for Megatron-Core (import name: ``nvfp4.models``)."""

if __name__ != "nvfp4.models":
    raise ImportError("import nvfp4.models, not models: the folder is linked as nvfp4/models")
