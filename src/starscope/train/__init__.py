"""Training a small model from scratch on plain text or code, through the graph's torch engine.

`job` is a run as a whole. Its pieces in their order: `documents` (files -> text), `split` (what is held out),
`vocabularies`, `data` (tokens on disk -> batches) and `prepare`, which makes all of these once; `examine` and `leakage`
(what they would be, told beforehand); `fim` (fill-in-the-middle); `optim`, `schedules`, `loop` (steps, evaluation, the
log), `checkpoints`; `output` and `export` (the finished model), `report`. A batch is a pure function of (seed, sample
number), so a run that was stopped continues with the very bits that it would have had.
"""
