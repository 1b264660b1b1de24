"""One file a family of models. Adding a family is adding one file here: nothing else names an architecture."""

USUAL = "gpt_bigcode"  # of a new model, where no family is asked for
