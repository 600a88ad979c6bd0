"""Text to Megatron .bin/.idx to batches (import name: ``nvfp4.data``)."""

if __name__ != "nvfp4.data":
    raise ImportError("import nvfp4.data, not data: the top-level folder is linked as nvfp4/data")
