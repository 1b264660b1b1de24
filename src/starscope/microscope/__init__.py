"""Reading and changing every value of the forward pass, under its standard name, while the model runs.

with model.trace("def add(a, b):") as t:
    pattern = model.layers[5].self_attn.attention_probabilities     # [batch num_heads query key]
    model.layers[3].layer_output[:, -1] += direction
    logits = model.logits
"""

from starscope.microscope.ablation import mean_ablation, resample_ablation
from starscope.microscope.control_vectors import steering_from_gguf, steering_to_gguf
from starscope.microscope.edit_files import edits_from_json, edits_to_json, read_edits, write_edits
from starscope.microscope.edits import Edit
from starscope.microscope.root import Root
from starscope.microscope.scope import Scope
from starscope.microscope.tensors import save
from starscope.microscope.trace import Trace

__all__ = [
    "Edit",
    "Root",
    "Scope",
    "Trace",
    "edits_from_json",
    "edits_to_json",
    "mean_ablation",
    "read_edits",
    "resample_ablation",
    "save",
    "steering_from_gguf",
    "steering_to_gguf",
    "write_edits",
]
