"""A Hugging Face folder: its config, and its weights in safetensors or PyTorch files, whole or in shards.

Only headers are read when a folder is opened. Bytes are read with pread into the caller's buffers, never mapped, so
that a model of any size passes through a few megabytes of memory:

    with open_checkpoint("starcoderbase-1b") as checkpoint:
        rows = checkpoint.tensors["transformer.wte.weight"].read_rows(0, 1024)   # float32 [1024 hidden_size]
"""

from starscope.checkpoint.files import WeightFile as WeightFile
from starscope.checkpoint.files import read_json as read_json
from starscope.checkpoint.folder import KINDS as KINDS
from starscope.checkpoint.folder import Checkpoint as Checkpoint
from starscope.checkpoint.folder import open_checkpoint as open_checkpoint
from starscope.checkpoint.folder import parse_front_matter as parse_front_matter
from starscope.checkpoint.safetensors import HEADER_LIMIT as HEADER_LIMIT
from starscope.checkpoint.safetensors import read_safetensors as read_safetensors
from starscope.checkpoint.tensor import CheckpointTensor as CheckpointTensor
from starscope.checkpoint.tensor import ComputedTensor as ComputedTensor
from starscope.checkpoint.tensor import JoinedTensor as JoinedTensor
from starscope.checkpoint.tensor import StoredTensor as StoredTensor
from starscope.checkpoint.tensor import join as join
from starscope.checkpoint.torch_bin import read_torch_bin as read_torch_bin
