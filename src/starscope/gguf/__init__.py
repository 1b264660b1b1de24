"""GGUF files: one file with a model's metadata, vocabulary and weights, read mapped and written atomically.

The bytes of a file are believed nowhere and its weights are looked at only when asked for:

    with read_gguf("model.gguf") as file:
        file.get("general.architecture"), file.array("token_embd.weight")
"""

from starscope.gguf.format import Value as Value
from starscope.gguf.format import ValueType as ValueType
from starscope.gguf.format import array as array
from starscope.gguf.format import boolean as boolean
from starscope.gguf.format import f32 as f32
from starscope.gguf.format import i32 as i32
from starscope.gguf.format import scalar as scalar
from starscope.gguf.format import string as string
from starscope.gguf.format import strings as strings
from starscope.gguf.format import u32 as u32
from starscope.gguf.format import u64 as u64
from starscope.gguf.reader import GGUFFile as GGUFFile
from starscope.gguf.reader import TensorInfo as TensorInfo
from starscope.gguf.reader import read_gguf as read_gguf
from starscope.gguf.writer import OutputTensor as OutputTensor
from starscope.gguf.writer import write_gguf as write_gguf
