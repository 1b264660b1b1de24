"""Reading and changing every value of the forward pass, under its standard name, while the model runs.

with model.trace("def add(a, b):") as t:
    pattern = model.layers[5].self_attn.attention_probabilities     # [batch num_heads query key]
    model.layers[3].layer_output[:, -1] += direction
    logits = model.logits
"""

from starscope.microscope.edits import Edit
from starscope.microscope.root import Root
from starscope.microscope.scope import Scope
from starscope.microscope.tensors import save
from starscope.microscope.trace import Trace

__all__ = ["Edit", "Root", "Scope", "Trace", "save"]
