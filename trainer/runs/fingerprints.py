"""Fingerprints: short hashes of the models and data that a run starts with.

On resuming, they show whether files still hold the same, whatever their names (``check_same_run`` in
resume.py).
"""

import hashlib
import json

from trainer.runs.distributed import bit_sum


def short_hash(content):
    """The hash of anything that JSON can hold -> 12 hexadecimal digits."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]


def weights_hash(module):
    """The hash of all parameters with their names -> 12 hexadecimal digits; exact to the last bit of fp32."""
    return short_hash([(name, bit_sum(p)) for name, p in module.named_parameters()])
