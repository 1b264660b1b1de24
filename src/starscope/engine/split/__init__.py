"""One graph over several devices: each part of it run by an engine of its own, as a plan says.

weights     some of a model's weights, as an engine takes them
compiler    the native engine with a part of the operations
caches      one sequence's keys and values, at several places
steps       one step at one place: values come in, operations run, values go out
engine      the engine: what runs where, in which order, and what moves
passes      steps that stop
"""
