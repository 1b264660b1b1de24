"""Adapters of low rank (LoRA): a matrix W computes as W + scale · B A, where A and B are small.

They are read from folders of Hugging Face's PEFT and from GGUF files as llama.cpp has them, checked against the model
tensor by tensor, and put into the recorded forward pass: an adapted layer is `linear` as before, plus two small ones.
So every engine runs them beside weights in any format, they are traced like everything else, and training moves them:

    model = starscope.load("starcoderbase-1b-q4_k_m.gguf", lora=["docstrings/", ("style.gguf", 0.5)])
"""

from starscope.lora.adapter import Adapter as Adapter
from starscope.lora.adapter import Pair as Pair
from starscope.lora.apply import Given as Given
from starscope.lora.apply import adapt as adapt
from starscope.lora.apply import as_given as as_given
from starscope.lora.apply import read_adapter as read_adapter
