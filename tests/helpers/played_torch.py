"""A fake PyTorch, as a module's text, with what its process needs; arrays of no size end it."""

TORCH = """
import os
__version__ = "played"
Tensor = memory_format = contiguous_format = channels_last = None
set_num_threads = set_grad_enabled = lambda value: None
class rand:
    def __init__(self, size): os._exit(7) if 0 in size else None
    def contiguous(self, memory_format): return self
class nn:
    class functional:
        conv2d = staticmethod(lambda x, w, bias, stride, pad, dilate, groups: None)
"""
