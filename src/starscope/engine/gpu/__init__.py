"""What the torch engine does on a GPU and nowhere else: weights that stay as they are stored, products with them, keys
and values that never move, decoding steps recorded as CUDA graphs, and what a device has and lacks.

    stored          a GGUF tensor on a device, its bytes sorted into fields; decoded by torch where Triton is not
    products        x @ W.T with such a tensor, by Triton or by torch
    triton_kernels  the kernels; nothing imports it before a product needs it
    static          caches at fixed addresses and the steps recorded over them
    devices         which there are, what is free there, and errors that say so

Nothing here knows a family; all of it but the kernels runs on the CPU too, which is how it is tested.
"""
