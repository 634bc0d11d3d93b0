"""Fingerprints: short hashes of the models and data that a run starts with.

On resuming, they show whether files still hold the same, whatever their names (``check_same_run`` in
resume.py).
"""

import hashlib
import json

import torch


def short_hash(content):
    """The hash of anything that JSON can hold -> 12 hexadecimal digits."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]


def weights_hash(module):
    """The hash of all parameters with their names -> 12 hexadecimal digits; exact to the last bit of fp32.

    Without the order of the numbers inside a parameter: run folders of older versions hold such hashes.
    """
    return short_hash([(name, bit_sum(p)) for name, p in module.named_parameters()])


def bit_sum(tensor):
    """The sum of a tensor's fp32 bit patterns, as an int: it depends on every bit, and not on their order."""
    return int(tensor.detach().float().view(torch.int32).sum(dtype=torch.int64))
