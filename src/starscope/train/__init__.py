"""Training a small model from scratch on plain text or code, through the graph's torch engine.

The pieces, in the order that a run uses them: `data` (files -> documents -> tokens on disk -> batches), `fim`
(fill-in-the-middle), `optim` (initial weights, AdamW, the schedule), `loop` (steps, evaluation, the log) and
`checkpoints` (what is saved, and the GGUF file at the end). A batch is a pure function of (seed, sample number), so
a run that was stopped continues with the very bits that it would have had.
"""
