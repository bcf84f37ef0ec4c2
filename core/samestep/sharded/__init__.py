"""Save and load models that no rank holds as a whole.

``tensors``: a rank's shard of an array, and a stored array that can be read in parts; ``storage``: checkpoints of
which each rank writes a shard; ``run``: a `Run` of such a model; ``safetensors_layout``: where a safetensors file has
its arrays.
"""
