"""One file a family of models. Adding a family is adding one file here: nothing else names an architecture."""
